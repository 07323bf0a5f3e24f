// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A training step as a CUDA graph, captured from a stream once and replayed.

#include <cuda_runtime_api.h>

#include "lockstep/detail/device/cuda/runtime.cuh"

namespace lockstep::detail {

/// A captured step, or the reason why there is none. Copies share the graph, also among ranks.
class StepGraph {
 public:
  /// The communicator may destroy it first, as NCCL needs. CUDA frees a running graph at its end.
  using Executable =
      std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, CudaDelete<cudaGraphExecDestroy>>;

  explicit StepGraph(std::string reason) : reason_(std::move(reason)) {}
  explicit StepGraph(cudaGraphExec_t graph) : executable_(std::make_shared<Executable>(graph)) {}

  explicit operator bool() const { return executable_ != nullptr; }

  const std::string& reason() const { return reason_; }

  /// For the communicator, which may destroy the graph before its owner does.
  const std::shared_ptr<Executable>& executable() const { return executable_; }

  /// **Host** does not block. **Stream** ordered on `stream`.
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

inline cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status;
}

/// Describes a call that failed during capture, and clears CUDA's last error.
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

using OwnedGraph =
    std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, CudaDelete<cudaGraphDestroy>>;

inline StepGraph instantiate(const OwnedGraph& graph, cudaStream_t stream) {
  std::size_t nodes = 0;
  cudaError_t error = cudaGraphGetNodes(graph.get(), nullptr, &nodes);
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphGetNodes"));
  if (nodes == 0) return StepGraph(std::string("the step gave the compute stream nothing to do"));
  cudaGraphExec_t executable = nullptr;
  error = cudaGraphInstantiate(&executable, graph.get(), 0);
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphInstantiate"));
  StepGraph step(executable);
  error = cudaGraphUpload(executable, stream);  // or the first launch is slower
  if (error != cudaSuccess) return StepGraph(capture_fault(error, "cudaGraphUpload"));
  return step;
}

/// Captures what `f()` enqueues. A failure or exception becomes the reason why there is no graph.
/// Other threads may use CUDA meanwhile. **Host** runs `f`. **Stream** `stream` must not be
/// capturing; streams that `f` makes wait for it are captured, and it waits for them within `f`.
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
