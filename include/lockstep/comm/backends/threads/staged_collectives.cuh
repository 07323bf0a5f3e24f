// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Collectives of device memory among ranks on GPUs that cannot use each other's memory.
///
/// Every lane works on its own GPU's memory and on pinned host memory, through which the other
/// ranks' data comes, a piece at a time: lanes copy their ranks' data to the host, meet, and take
/// what they need from there. Values are combined by the same kernel and in the same order as where
/// GPUs reach each other, so that results are the same bits. There are copies, kernels and events
/// only, all on the lanes' streams: it can be captured, and nothing is allocated.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/backends/threads/device_collectives.cuh"
#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep::detail::threads {

/// **Stream** the lane's.
inline void copy_on(const Lane& lane, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, lane.stream), "cudaMemcpyAsync");
}

/// Copies `rows` of `bytes` each, which begin `from_pitch` bytes apart, to rows `to_pitch` apart.
inline void copy_rows_on(const Lane& lane, unsigned char* to, std::size_t to_pitch,
                         const unsigned char* from, std::size_t from_pitch, std::size_t bytes,
                         std::size_t rows) {
  constexpr std::size_t most_pitch = 0x7fffffff;  // of every device
  if (rows > 1 && std::max(from_pitch, to_pitch) <= most_pitch) {
    check_cuda(cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, bytes, rows, cudaMemcpyDefault,
                                 lane.stream),
               "cudaMemcpy2DAsync");
    return;
  }
  for (std::size_t r = 0; r < rows; ++r)
    copy_on(lane, to + r * to_pitch, from + r * from_pitch, bytes);
}

/// Calls `f(rank)` for the ranks on a lane's GPU.
template <class F>
void for_each_rank_on(const Lanes& lanes, const Lane& lane, std::size_t world, const F& f) {
  for (std::size_t w = 0; w < world; ++w) {
    if (&lane == &lanes.of(Rank{w})) f(w);
  }
}

/// Calls `f(first, count)` for pieces of at most `most` elements.
template <class F>
void for_each_piece(std::size_t count, std::size_t most, const F& f) {
  for (std::size_t first = 0; first < count; first += most) f(first, std::min(most, count - first));
}

/// Every rank's values from `first` on, as a lane reads them: its own ranks' where they are, those
/// of other ranks from the host, where they begin `staged` elements into the slot.
template <class T>
std::vector<const T*> near_ins(const Lanes& lanes, const Lane& lane, std::span<const Offer> ranks,
                               std::size_t first, std::size_t staged) {
  std::vector<const T*> all;
  for (std::size_t w = 0; w < ranks.size(); ++w) {
    const bool is_near = &lane == &lanes.of(Rank{w});
    all.push_back(is_near ? static_cast<const T*>(ranks[w].in) + first
                          : reinterpret_cast<const T*>(lanes.staging()->of(w)) + staged);
  }
  return all;
}

/// Each lane combines its share of a piece, and stores it to its own ranks and to the host, where
/// the others take it from.
template <std::size_t Ranks, class T, class Op>
void enqueue_staged(const calls::AllReduce<T, Op>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const std::size_t shares = lanes.all().size();
  T* const result = reinterpret_cast<T*>(staging.result());
  const auto stage = [&](std::size_t first, std::size_t count) {
    const std::size_t packets = (count + packet_size<T> - 1) / packet_size<T>;
    const auto border = [&](const Lane& lane, std::size_t next) {
      const auto share = static_cast<std::size_t>(&lane - lanes.all().data()) + next;
      return std::min(count, packets * share / shares * packet_size<T>);
    };
    // A lane's own share need not leave its GPU, nor come back.
    const auto copy_other_shares = [&](const Lane& lane, T* to, const T* from) {
      const std::size_t end = border(lane, 1);
      copy_on(lane, to, from, border(lane, 0) * sizeof(T));
      copy_on(lane, to + end, from + end, (count - end) * sizeof(T));
    };
    lanes.each([&](const Lane& lane) {
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        copy_other_shares(lane, reinterpret_cast<T*>(staging.of(w)),
                          static_cast<const T*>(ranks[w].in) + first);
      });
    });
    lanes.meet();
    lanes.each([&](const Lane& lane) {
      const std::size_t begin = border(lane, 0);
      std::vector<T*> outs{result + begin};
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        outs.push_back(static_cast<T*>(ranks[w].out) + first + begin);
      });
      const std::size_t targets = outs.size();
      enqueue_combine<Ranks, T>(
          lane,
          LaneCombination<T>{near_ins<T>(lanes, lane, ranks, first + begin, begin), std::move(outs),
                             border(lane, 1) - begin, 1, targets},
          call.op);
    });
    lanes.meet();
    lanes.each([&](const Lane& lane) {
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        copy_other_shares(lane, static_cast<T*>(ranks[w].out) + first, result);
      });
    });
  };
  lanes.run_in_stages(ranks, ticket,
                      [&] { for_each_piece(call.count, staging.bytes() / sizeof(T), stage); });
}

/// The root's lane combines what lies on its GPU and what the others brought to the host.
template <std::size_t Ranks, class T, class Op>
void enqueue_staged(const calls::Reduce<T, Op>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const Lane& root = lanes.of(call.root);
  const auto stage = [&](std::size_t first, std::size_t count) {
    lanes.each([&](const Lane& lane) {
      if (&lane == &root) return;
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        copy_on(lane, staging.of(w), static_cast<const T*>(ranks[w].in) + first, count * sizeof(T));
      });
    });
    lanes.meet();
    const OnGpu current(root.gpu);
    T* const out = static_cast<T*>(ranks[call.root.value()].out) + first;
    enqueue_combine<Ranks, T>(
        root, LaneCombination<T>{near_ins<T>(lanes, root, ranks, first, 0), {out}, count}, call.op);
    lanes.meet();
  };
  lanes.run_in_stages(ranks, ticket,
                      [&] { for_each_piece(call.count, staging.bytes() / sizeof(T), stage); });
}

/// A slot has a part for each rank that the values are combined for.
template <std::size_t Ranks, class T, class Op>
void enqueue_staged(const calls::ReduceScatter<T, Op>& call, const Lanes& lanes,
                    std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const std::size_t part = staging.bytes() / ranks.size() / sizeof(T);
  const auto stage = [&](std::size_t first, std::size_t count) {
    lanes.each([&](const Lane& lane) {
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        const T* const from = static_cast<const T*>(ranks[w].in) + first;
        copy_rows_on(lane, staging.of(w), part * sizeof(T),
                     reinterpret_cast<const unsigned char*>(from), call.count * sizeof(T),
                     count * sizeof(T), ranks.size());
      });
    });
    lanes.meet();
    lanes.each([&](const Lane& lane) {
      for_each_rank_on(lanes, lane, ranks.size(), [&](std::size_t w) {
        T* const out = static_cast<T*>(ranks[w].out) + first;
        enqueue_combine<Ranks, T>(
            lane,
            LaneCombination<T>{
                near_ins<T>(lanes, lane, ranks, w * call.count + first, w * part), {out}, count},
            call.op);
      });
    });
    lanes.meet();
  };
  lanes.run_in_stages(ranks, ticket, [&] { for_each_piece(call.count, part, stage); });
}

/// Sources go to their slots on the host, from where the targets on other GPUs take them.
inline void enqueue_staged_moves(const Moves& moves, const Lanes& lanes,
                                 std::span<const Offer> ranks, std::uint64_t ticket) {
  const Staging& staging = *lanes.staging();
  const std::size_t world = ranks.size();
  const bool is_dealt = moves.in_stride != 0;
  const std::size_t part = staging.bytes() / (is_dealt ? world : 1);
  const auto in = [&](std::size_t s) { return static_cast<const unsigned char*>(ranks[s].in); };
  const auto stage = [&](std::size_t first, std::size_t bytes) {
    lanes.each([&](const Lane& lane) {
      for (const std::size_t s : moves.sources) {
        if (&lane != &lanes.of(Rank{s})) continue;
        copy_rows_on(lane, staging.of(s), part, in(s) + first, moves.in_stride, bytes,
                     is_dealt ? world : 1);
      }
    });
    lanes.meet();
    lanes.each([&](const Lane& lane) {
      for (const std::size_t t : moves.targets) {
        if (&lane != &lanes.of(Rank{t})) continue;
        Transport what{{}, {static_cast<unsigned char*>(ranks[t].out) + first}, bytes};
        for (const std::size_t s : moves.sources) {
          const bool is_near = &lane == &lanes.of(Rank{s});
          what.from.push_back(is_near ? in(s) + t * moves.in_stride + first
                                      : staging.of(s) + (is_dealt ? t * part : 0));
        }
        if (what.from.size() > 1) what.out_stride = moves.bytes;
        enqueue_move(lane, what);
      }
    });
    lanes.meet();
  };
  lanes.run_in_stages(ranks, ticket, [&] { for_each_piece(moves.bytes, part, stage); });
}

template <std::size_t, class C>
  requires std::same_as<typename C::operation, NoOperation>
void enqueue_staged(const C& call, const Lanes& lanes, std::span<const Offer> ranks,
                    std::uint64_t ticket) {
  enqueue_staged_moves(moves_of(call, ranks.size()), lanes, ranks, ticket);
}

}  // namespace lockstep::detail::threads
