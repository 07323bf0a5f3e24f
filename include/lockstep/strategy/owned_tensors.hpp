// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Whole parameters that a rank updates on the host, divided among ranks by their sizes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/greedy_partition.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

/// A parameter as a run of its own.
struct TensorRun : Run {
  std::size_t parameter = 0;
};

/// All trained parameters, in the order of their buckets and in these by arrival.
struct TensorRuns {
  std::vector<TensorRun> table;

  explicit TensorRuns(const auto& layout) {
    const auto& plan = layout.plan();
    table.reserve(plan.trained);
    for (std::size_t b = 0; b != plan.bucket_count; ++b) {
      for (const std::size_t p : plan.members(b)) {
        const auto& placement = plan.placements[p];
        table.push_back(
            {{plan.bucket_table[b].element, placement.offset, placement.bytes, b, 1}, p});
      }
    }
  }
};

/// The rank that owns each parameter of a layout; frozen ones are rank 0's.
std::vector<std::size_t> owners_of(const auto& layout, std::size_t ranks) {
  std::vector<std::size_t> trained;
  std::vector<std::size_t> sizes;
  for (std::size_t p = 0; p != layout.infos().size(); ++p) {
    if (!layout.plan().is_trained(p)) continue;
    trained.push_back(p);
    sizes.push_back(layout.infos()[p].count());
  }
  const std::vector<std::size_t> divided = partition_greedily(sizes, ranks);
  std::vector<std::size_t> owners(layout.infos().size());
  for (std::size_t i = 0; i != trained.size(); ++i) owners[trained[i]] = divided[i];
  return owners;
}

/// `Sharding<ZeroRedundancy, ByTensor>`: a rank owns whole parameters. All ranks get all averages;
/// each updates its own parameters and, unless ranks share them, sends these to the others.
template <class Traits, class Comm>
class OwnsTensors {
 public:
  using Runs = TensorRuns;
  static constexpr bool publishes_late = true;

  OwnsTensors(Comm& comm, const typename Traits::layout& where, std::byte* parameters)
      : comm_(comm), parameters_(parameters), owners_(owners_of(where, comm.world_size().value())) {
    if constexpr (!Traits::shares_parameters) {
      pieces_.resize(comm.world_size().value());
      for (const TensorRun& run : TensorRuns(where).table)
        pieces_[owners_[run.parameter]].push_back({run.offset, run.bytes});
      std::size_t most = 0;
      for (const auto& pieces : pieces_) most = std::max(most, bytes_of(pieces));
      packed_ = comm.template allocate<std::uint8_t>(most);
    }
  }

  template <class T>
  Shard slice(const TensorRun& run) const {
    return {0, owns(run.parameter) ? run.count() : 0};
  }
  template <class T, class Gradients, class Consume>
  void reduce(Gradients& gradients, const auto& plan, const TensorRun& run,
              const Consume& consume) const {
    if (run.offset == plan.bucket_table[run.first_bucket].offset) gradients.wait(run.first_bucket);
    if (owns(run.parameter))
      consume(0, std::span<const T>(gradients.template averages<T>(run.offset, run.bytes)));
  }
  template <class T, class Gradients>
  static std::span<T> averages(Gradients& gradients, const Run& run, Shard slice) {
    return gradients.template averages<T>(run.offset, run.bytes)
        .subspan(slice.begin, slice.count());
  }
  void add_others(double& squares) const {
    comm_.all_reduce(std::span(&squares, 1), Sum{}, step_call<Traits>());
  }
  /// Every rank broadcasts all of its parameters in one call.
  void publish() const {
    if constexpr (Traits::shares_parameters) {
      comm_.barrier(step_call<Traits>());
    } else {
      for (std::size_t w = 0; w != pieces_.size(); ++w) send_all(w);
    }
  }
  static const char* whose() { return "as the average over ranks"; }

 private:
  struct Piece {
    std::size_t offset = 0;
    std::size_t bytes = 0;
  };

  bool owns(std::size_t parameter) const { return owners_[parameter] == comm_.rank().value(); }

  static std::size_t bytes_of(const std::vector<Piece>& pieces) {
    std::size_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.bytes;
    return bytes;
  }

  void send_all(std::size_t owner) const {
    const std::size_t bytes = bytes_of(pieces_[owner]);
    if (bytes == 0) return;
    const bool mine = owner == comm_.rank().value();
    if (mine)
      copy(owner, [](std::byte* packed, std::byte* piece, std::size_t n) {
        std::memcpy(packed, piece, n);
      });
    comm_.broadcast(packed_.first(bytes), Rank{owner}, step_call<Traits>());
    if (!mine)
      copy(owner, [](std::byte* packed, std::byte* piece, std::size_t n) {
        std::memcpy(piece, packed, n);
      });
  }

  template <class Copy>
  void copy(std::size_t owner, const Copy& copy) const {
    auto* packed = reinterpret_cast<std::byte*>(packed_.data());
    for (const Piece& piece : pieces_[owner]) {
      copy(packed, parameters_ + piece.offset, piece.bytes);
      packed += piece.bytes;
    }
  }

  Comm& comm_;
  std::byte* parameters_;
  std::vector<std::size_t> owners_;         // by parameter
  std::vector<std::vector<Piece>> pieces_;  // by owner, where ranks have parameters of their own
  std::span<std::uint8_t> packed_;
};

}  // namespace lockstep::detail
