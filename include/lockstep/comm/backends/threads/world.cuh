// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The state that the ranks of one process share, how they find it, and the step of all
/// of them as one CUDA graph.

#include <cuda_runtime_api.h>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/threads/lanes.cuh"
#include "lockstep/comm/backends/threads/meeting.hpp"
#include "lockstep/comm/backends/threads/peer_access.cuh"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep::detail::threads {

/// One thread begins and ends the capture for all ranks while the others wait. In CUDA's relaxed
/// mode every thread may add to the capture and any thread may end it. CUDA does not promise that
/// several may add at once, so ranks take turns.
class WorldCapture {
 public:
  /// `streams[r]` is rank r's compute stream, and `ranks[r].event` an event of its GPU.
  void begin(std::span<const cudaStream_t> streams, const Lanes& lanes,
             std::span<const Offer> ranks) {
    graph_.reset();
    check_cuda(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed),
               "cudaStreamBeginCapture");
    std::string reason;
    note(cudaEventRecord(event_of(ranks[0]), streams[0]), "cudaEventRecord", reason);
    for (cudaStream_t stream : streams.subspan(1)) {
      note(cudaStreamWaitEvent(stream, event_of(ranks[0]), 0), "cudaStreamWaitEvent", reason);
    }
    if (!reason.empty()) end(streams, lanes, ranks, reason);
  }

  /// Between `begin` and `end`, unless `begin` has failed.
  bool is_open() const { return graph_ == nullptr; }

  /// Joins all streams to the first and makes the graph, or notes why there is none. Afterwards the
  /// streams may be used as before.
  void end(std::span<const cudaStream_t> streams, const Lanes& lanes, std::span<const Offer> ranks,
           std::string reason) {
    const auto join = [&](cudaStream_t stream, cudaEvent_t event) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      note(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing", reason);
      if (status != cudaStreamCaptureStatusActive) return;
      note(cudaEventRecord(event, stream), "cudaEventRecord", reason);
      note(cudaStreamWaitEvent(streams[0], event, 0), "cudaStreamWaitEvent", reason);
    };
    for (std::size_t r = 1; r < streams.size(); ++r) join(streams[r], event_of(ranks[r]));
    lanes.for_each_stream(join);
    cudaGraph_t captured = nullptr;
    note(cudaStreamEndCapture(streams[0], &captured), "cudaStreamEndCapture", reason);
    const OwnedGraph graph(captured);
    graph_ = std::make_shared<const StepGraph>(reason.empty()
                                                   ? instantiate(graph, lanes.all().front().stream)
                                                   : StepGraph(std::move(reason)));
  }

  const std::shared_ptr<const StepGraph>& graph() const { return graph_; }

 private:
  static cudaEvent_t event_of(const Offer& rank) { return static_cast<cudaEvent_t>(rank.event); }

  /// The first fault is the reason.
  static void note(cudaError_t error, const char* call, std::string& reason) {
    if (error == cudaSuccess) return;
    const std::string fault = capture_fault(error, call);
    if (reason.empty()) reason = fault;
  }

  std::shared_ptr<const StepGraph> graph_;
};

}  // namespace lockstep::detail::threads

namespace lockstep::detail {

/// A step of all ranks of a process, captured as one graph, or the reason why there is none. It is
/// the same for all ranks.
class WorldStepGraph {
 public:
  explicit WorldStepGraph(std::shared_ptr<const StepGraph> graph) : graph_(std::move(graph)) {}

  WorldStepGraph(WorldStepGraph&&) noexcept = default;
  WorldStepGraph& operator=(WorldStepGraph&&) noexcept = default;

  explicit operator bool() const { return graph_ && *graph_; }
  const std::string& reason() const { return graph_->reason(); }
  const StepGraph& graph() const { return *graph_; }

 private:
  std::shared_ptr<const StepGraph> graph_;
};

}  // namespace lockstep::detail

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
