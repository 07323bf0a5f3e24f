// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A training step as a CUDA graph: captured from a stream once, replayed as often as wanted.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/device/cuda/check.cuh"

namespace lockstep::detail {

/// A captured step, or the reason why there is none.
class StepGraph {
 public:
  /// What the GPU runs. Its communicator can end it: NCCL waits for graphs before it lets go of a
  /// communicator, and a graph is useless without one.
  class Executable {
   public:
    explicit Executable(cudaGraphExec_t graph) : graph_(graph) {}

    cudaGraphExec_t get() const { return graph_.get(); }
    /// One that is running is freed when it is done.
    void end() { graph_.reset(); }

   private:
    struct Destroy {
      void operator()(cudaGraphExec_t graph) const {
        static_cast<void>(cudaGraphExecDestroy(graph));
      }
    };
    std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, Destroy> graph_;
  };

  explicit StepGraph(std::string reason) : reason_(std::move(reason)) {}
  explicit StepGraph(cudaGraphExec_t graph) : executable_(std::make_shared<Executable>(graph)) {}

  StepGraph(StepGraph&&) noexcept = default;
  StepGraph& operator=(StepGraph&&) noexcept = default;

  explicit operator bool() const { return executable_ != nullptr; }

  /// Why the step could not be captured, in words; empty where it was.
  const std::string& reason() const { return reason_; }

  /// For whoever must be able to end it before its owner does.
  std::weak_ptr<Executable> executable() const { return executable_; }

  /// **Host** does not block. **Stream** the step runs after what `stream` holds and before what it
  /// is given next.
  void launch(cudaStream_t stream) const {
    if (executable_ == nullptr) {
      throw Error("replay", "there is no captured step: " + reason_, "run the step itself",
                  rank_of_thread());
    }
    check_cuda(cudaGraphLaunch(executable_->get(), stream), "cudaGraphLaunch");
  }

 private:
  std::shared_ptr<Executable> executable_;
  std::string reason_;
};

/// The reason for a call that failed while capturing. CUDA is to forget the error: it is handled.
inline std::string capture_fault(cudaError_t error, const char* call) {
  static_cast<void>(cudaGetLastError());
  switch (error) {
    case cudaErrorStreamCaptureUnjoined:
      return "the step left work on another stream for which the compute stream does not wait (an "
             "asynchronous call was not waited for)";
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureImplicit:
      return "the step called something that a graph cannot hold, such as waiting for the stream "
             "on the host, allocating device memory or using the default stream";
    default:
      return std::string(call) + ": " + cudaGetErrorString(error);
  }
}

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { static_cast<void>(cudaGraphDestroy(graph)); }
};
using OwnedGraph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;

/// Makes the graph fit to run on `stream`'s GPU.
inline StepGraph instantiate(const OwnedGraph& graph, cudaStream_t stream) {
  std::size_t nodes = 0;
  cudaError_t error = cudaGraphGetNodes(graph.get(), nullptr, &nodes);
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphGetNodes"));
  if (nodes == 0) return StepGraph(std::string("the step gave the compute stream nothing to do"));
  cudaGraphExec_t executable = nullptr;
  error = cudaGraphInstantiate(&executable, graph.get(), 0);
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphInstantiate"));
  StepGraph step(executable);
  error = cudaGraphUpload(executable, stream);  // so that the first launch is like the rest
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphUpload"));
  return step;
}

/// Runs `f()` without running what it enqueues: that becomes the graph. It does not throw: whatever
/// goes wrong, and whatever `f` throws, is the reason why there is none. **Host** runs `f`.
/// **Stream** `stream` must not be capturing; streams that `f` makes wait for it are captured too,
/// and must be waited for before `f` returns.
///
/// Other threads may use CUDA meanwhile: the capture is this thread's.
template <class F>
StepGraph capture_stream(cudaStream_t stream, F&& f) {
  const cudaError_t begun = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  if (begun != cudaSuccess) return StepGraph(capture_fault(begun, "cudaStreamBeginCapture"));
  std::string reason;
  try {
    std::forward<F>(f)();
  } catch (const std::exception& error) {
    reason = error.what();
  } catch (...) {
    reason = "the step threw an exception that is no std::exception";
  }
  cudaGraph_t captured = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &captured);
  const OwnedGraph graph(captured);
  if (ended != cudaSuccess) {
    const std::string fault = capture_fault(ended, "cudaStreamEndCapture");
    return StepGraph(reason.empty() ? fault : reason);
  }
  if (!reason.empty()) return StepGraph(reason);
  return instantiate(graph, stream);
}

}  // namespace lockstep::detail
