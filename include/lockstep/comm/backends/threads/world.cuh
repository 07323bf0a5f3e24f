// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The state that the ranks of one process share, and how they find it.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/comm/backends/threads/kernels.cuh"
#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/mail.hpp"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/staging.cuh"
#include "lockstep/comm/backends/threads/world_capture.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::threads {

struct SharedWorld {
  /// `most_staged`: see `Staging`.
  explicit SharedWorld(WorldSize size, std::size_t most_staged = most_staged_bytes)
      : calls(std::make_shared<Meeting>(size)),
        gate(std::make_shared<Meeting>(size)),
        mail(size),
        most_staged(most_staged) {
    if (size.value() <= most_ranks) return;
    throw Error("Backend<Shm>", std::to_string(size.value()) + " ranks are threads of one process",
                "start at most " + std::to_string(most_ranks) + ", or use Backend<Nccl>");
  }

  /// All ranks have come, each with its GPU.
  void open(std::span<const Offer> ranks) {
    std::vector<std::size_t> gpus;
    for (const Offer& rank : ranks) {
      const Gpu& gpu = *static_cast<const Gpu*>(rank.in);
      gpus.push_back(gpu.index());
      streams.push_back(gpu.stream());
      const OnGpu current(gpu.index());
      received.emplace_back();
    }
    lanes.emplace(gpus, most_staged);
  }

  std::shared_ptr<Meeting> calls;
  std::shared_ptr<Meeting> gate;  // where ranks meet even after a fault
  Mailboxes mail;
  std::size_t most_staged;
  std::optional<Lanes> lanes;
  std::vector<cudaStream_t> streams;  // every rank's compute stream
  /// When every rank has taken its last message: its sender may wait for that after it has left.
  std::vector<CudaEvent> received;
  std::mutex turns;  // to add to the capture
  WorldCapture capture;
};

/// The worlds of this process that not all ranks have joined yet.
class OpenWorlds {
 public:
  /// The world of this name; the first rank that asks makes it.
  static std::shared_ptr<SharedWorld> find(const std::string& name, WorldSize size) {
    const std::lock_guard lock(mutex());
    std::weak_ptr<SharedWorld>& known = worlds()[name];
    std::shared_ptr<SharedWorld> world = known.lock();
    if (!world) {
      world = std::make_shared<SharedWorld>(size);
      known = world;
    }
    return world;
  }
  /// All ranks have joined: the next world of this name is another one.
  static void close(const std::string& name) {
    const std::lock_guard lock(mutex());
    worlds().erase(name);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<std::string, std::weak_ptr<SharedWorld>>& worlds() {
    static std::map<std::string, std::weak_ptr<SharedWorld>> worlds;
    return worlds;
  }
};

}  // namespace lockstep::detail::threads
