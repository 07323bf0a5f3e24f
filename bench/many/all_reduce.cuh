// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file All-reduces of a communicator, looked at element by element and then timed, beside NCCL's
/// own on a plain communicator where ranks are processes.

#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/nccl.cuh"
#include "measure.hpp"

namespace many {

using namespace lockstep;

/// Microseconds a call, from all ranks' start until this rank's stream is empty.
double time_calls(auto& comm, std::size_t count, const auto& call) {
  comm.barrier();
  const auto begin = bench::Clock::now();
  for (std::size_t i = 0; i < count; ++i) call();
  comm.synchronize();
  const std::chrono::duration<double, std::micro> took = bench::Clock::now() - begin;
  return took.count() / static_cast<double>(count);
}

/// How many calls make a turn of about 50 ms, `most` at most: ranks that share a GPU through
/// sockets take a thousand times as long as others. **Ranks** all.
std::size_t calls_of_a_turn(auto& comm, std::size_t most, const auto& call) {
  const double calls = 50'000 / std::max(time_calls(comm, 1, call), 1.0);
  return comm.broadcast(std::clamp<std::uint64_t>(static_cast<std::uint64_t>(calls), 1, most),
                        Rank{0});
}

/// NCCL as a program without lockstep uses it: one communicator, memory from cudaMalloc, in place.
/// Its calls go to the stream of the communicator that it was made beside.
class PlainNccl {
 public:
  PlainNccl(auto& comm, std::size_t bytes) : stream_(comm.gpu().stream()), arena_(bytes) {
    ncclUniqueId id{};
    if (comm.rank() == Rank{0}) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    std::string bytes_of_id(id.internal, sizeof id.internal);
    broadcast_object(comm, bytes_of_id, Rank{0});
    std::memcpy(id.internal, bytes_of_id.data(), sizeof id.internal);
    check(ncclCommInitRank(&comm_, static_cast<int>(comm.world_size().value()), id,
                           static_cast<int>(comm.rank().value())),
          "ncclCommInitRank");
  }
  PlainNccl(const PlainNccl&) = delete;
  PlainNccl& operator=(const PlainNccl&) = delete;
  ~PlainNccl() { static_cast<void>(ncclCommDestroy(comm_)); }

  void all_reduce(std::size_t bytes) const {
    check(ncclAllReduce(arena_.data(), arena_.data(), bytes / sizeof(float), ncclFloat, ncclSum,
                        comm_, stream_),
          "ncclAllReduce");
  }

 private:
  static void check(ncclResult_t result, const char* call) {
    if (!detail::nccl::is_made(result)) throw detail::nccl::error_of(result, call);
  }

  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_;
  DeviceArena arena_;
};

/// Every element of the sum, on every rank: whole numbers, so the sum is exact in any order.
void verify_all_reduce(auto& comm, std::span<float> data) {
  const std::size_t rank = comm.rank().value();
  const std::size_t ranks = comm.world_size().value();
  std::vector<float> values(data.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<float>((rank + 1) * (i % 97 + 1));
  detail::copy_now(data.data(), values.data(), data.size_bytes());
  comm.all_reduce(data, Sum{});
  comm.synchronize();
  detail::copy_now(values.data(), data.data(), data.size_bytes());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto want = static_cast<float>(ranks * (ranks + 1) / 2 * (i % 97 + 1));
    if (values[i] == want) continue;
    throw std::runtime_error("all-reduce of " + std::to_string(data.size_bytes()) +
                             " bytes: element " + std::to_string(i) + " is " +
                             std::to_string(values[i]) + " instead of " + std::to_string(want));
  }
}

/// A line for each size. **Ranks** all.
template <class Comm>
void measure_all_reduce(Comm& comm) {
  constexpr bool processes = std::is_same_v<Comm, NcclCommunicator<>>;
  constexpr std::size_t sizes[] = {1_KiB, 64_KiB, 1_MiB, 25_MiB, 256_MiB};
  constexpr std::size_t most = sizes[std::size(sizes) - 1];
  const auto memory = comm.template allocate<float>(most / sizeof(float));
  std::optional<PlainNccl> plain;
  if constexpr (processes) plain.emplace(comm, most);
  for (const std::size_t bytes : sizes) {
    const auto data = memory.first(bytes / sizeof(float));
    verify_all_reduce(comm, data);
    detail::copy_now(data.data(), std::vector<float>(data.size()).data(), data.size_bytes());
    const auto own = [&] { comm.all_reduce(data, Sum{}); };
    const auto peer = [&] { plain->all_reduce(bytes); };
    const std::size_t count = calls_of_a_turn(comm, 200, own);
    std::vector<double> own_times;
    std::vector<double> peer_times;
    for (int turn = 0; turn < 8; ++turn) {  // by turns; the first is not counted
      const double time = time_calls(comm, count, own);
      if (turn > 0) own_times.push_back(time);
      if (!plain) continue;
      const double peer_time = time_calls(comm, count, peer);
      if (turn > 0) peer_times.push_back(peer_time);
    }
    if (comm.rank() != Rank{0}) continue;
    std::printf(
        "many {\"what\": \"all_reduce\", \"backend\": \"%s\", \"ranks\": %zu, "
        "\"bytes\": %zu, \"us\": %.2f, \"plain_us\": %s}\n",
        processes ? "nccl" : "shm", comm.world_size().value(), bytes, bench::median(own_times),
        plain ? std::to_string(bench::median(peer_times)).c_str() : "null");
    std::fflush(stdout);
  }
}

}  // namespace many
