// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From policies to the communicators of replicas.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/comm/backends/shm/communicator.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/trainer/axes.hpp"

namespace lockstep::detail {

/// How the replicas of `ParallelStrategy<DP>`, threads of one process, get their communicators. A
/// meeting is made once; then every replica calls `prepare` and `join` on its own thread. `prepare`
/// waits for no other replica, so that it may fail on one alone; `join` waits for all.
template <class Device, class Policies>
class ReplicaMeeting;

template <class Policies>
class ReplicaMeeting<Cpu, Policies> {
  static constexpr std::size_t static_size = Pick<axes::World, Policies>::static_size;
  static constexpr bool alone = static_size == 1;

 public:
  using communicator = std::conditional_t<
      alone, LoopbackCommunicator,
      ShmCommunicator<static_size, typename Pick<axes::Progress, Policies>::choice>>;

  static std::size_t devices() { return core_count(); }

  /// The numbers of devices mean nothing here: replicas share one.
  ReplicaMeeting(std::size_t replicas, std::chrono::milliseconds timeout,
                 const std::vector<std::size_t>& /*devices*/)
      : size_(replicas), timeout_(timeout), files_(replicas) {
    if constexpr (!alone) files_[0] = shm::Engine::make_file(WorldSize{replicas});
  }

  std::size_t size() const { return size_; }

  void prepare(Rank rank) {
    if constexpr (!alone) {
      if (rank != Rank{0})
        files_[rank.value()] = shm::Engine::open(shm::Engine::address(files_[0]));
    }
  }
  communicator join(Rank rank) {
    if constexpr (alone) {
      return {};
    } else {
      return communicator(rank, WorldSize{size_}, std::move(files_[rank.value()]), timeout_);
    }
  }

 private:
  std::size_t size_;
  std::chrono::milliseconds timeout_;
  std::vector<shm::MemoryFile> files_;
};

/// The meeting of the replicas of a job with these policies.
template <class Policies>
using ReplicaMeetingOf = ReplicaMeeting<typename Pick<axes::Device, Policies>::choice, Policies>;

}  // namespace lockstep::detail
