// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Tensors and random numbers between a step and a module on a GPU, on the step's stream.

#include <c10/core/AutogradState.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <thread>

#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/torch/step_tensors.hpp"

namespace lockstep::detail {

inline at::Device current_torch_gpu() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

/// Copies by one kernel, each block one tile.
struct CopiesTogether {
  static constexpr std::size_t most = 32;
  static constexpr unsigned threads = 256;
  static constexpr std::size_t packet = 16;
  static constexpr std::size_t tile = std::size_t{threads} * packet * 4;

  struct Copy {
    const char* from;
    char* to;
    std::size_t bytes;
    unsigned end;  // index after its last tile
  };
  Copy copies[most];

  static bool is_aligned(const void* data) {
    return reinterpret_cast<std::uintptr_t>(data) % packet == 0;
  }
};

/// A template, because a kernel in a header cannot be inline.
template <class All>
LOCKSTEP_KERNEL __launch_bounds__(All::threads) copy_together(All all) {
  unsigned i = 0;
  while (blockIdx.x >= all.copies[i].end) ++i;
  const auto& copy = all.copies[i];
  const std::size_t begin = (blockIdx.x - (i == 0 ? 0 : all.copies[i - 1].end)) * All::tile;
  const std::size_t end = begin + All::tile < copy.bytes ? begin + All::tile : copy.bytes;
  const std::size_t whole = end / All::packet * All::packet;
  for (std::size_t at = begin + threadIdx.x * All::packet; at < whole;
       at += All::threads * All::packet)
    *reinterpret_cast<uint4*>(copy.to + at) = *reinterpret_cast<const uint4*>(copy.from + at);
  const std::size_t at = whole + threadIdx.x;  // fewer bytes than threads
  if (at < end) copy.to[at] = copy.from[at];
}

/// The gradients of one backward pass, ready when their copies are enqueued on the step's stream.
/// Small copies share a launch, which costs more than they do, but must not delay reductions much.
template <class Step>
class GradientCopies {
 public:
  explicit GradientCopies(Step& step) : step_(step) {}

  /// Copies a gradient to `to`, now or in a later call.
  void write(std::size_t parameter, void* to, at::ScalarType type, const at::Tensor& gradient) {
    if (gradient.scalar_type() != type || !gradient.is_cuda() || !gradient.is_contiguous()) {
      tensor_at(to, gradient.sizes(), type, current_torch_gpu()).copy_(gradient);
      step_.ready(parameter);
      return;
    }
    waiting_[count_++] = {parameter, to, gradient};
    bytes_ += gradient.nbytes();
    if (count_ == waiting_.size() || bytes_ >= most_waiting) copy();
  }
  void finish() { copy(); }

 private:
  static constexpr std::size_t most_waiting = std::size_t{1} << 20;

  struct Waiting {
    std::size_t parameter;
    void* to;
    at::Tensor gradient;
  };

  void copy() {
    CopiesTogether together;
    std::size_t copies = 0;
    unsigned tiles = 0;
    for (std::size_t i = 0; i != count_; ++i) {
      const auto& [parameter, to, gradient] = waiting_[i];
      const void* const from = gradient.const_data_ptr();
      const std::size_t bytes = gradient.nbytes();
      if (count_ == 1 || !CopiesTogether::is_aligned(from) || !CopiesTogether::is_aligned(to)) {
        check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, step_.stream()),
                   "cudaMemcpyAsync");
      } else if (bytes != 0) {
        tiles += static_cast<unsigned>((bytes + CopiesTogether::tile - 1) / CopiesTogether::tile);
        together.copies[copies++] = {static_cast<const char*>(from), static_cast<char*>(to), bytes,
                                     tiles};
      }
    }
    if (copies != 0) {
      launch_kernel<copy_together<CopiesTogether>>("copy_together", step_.stream(), tiles,
                                                   CopiesTogether::threads, together);
    }
    // The allocator may reuse their memory for later work on the same stream.
    for (std::size_t i = 0; i != count_; ++i) {
      waiting_[i].gradient.reset();
      step_.ready(waiting_[i].parameter);
    }
    count_ = 0;
    bytes_ = 0;
  }

  Step& step_;
  std::array<Waiting, CopiesTogether::most> waiting_{};
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
};

/// Makes a stream of lockstep's LibTorch's current one, for this thread.
inline c10::cuda::CUDAStreamGuard on_torch_stream(cudaStream_t stream) {
  return c10::cuda::CUDAStreamGuard(
      c10::cuda::getStreamFromExternal(stream, current_torch_gpu().index()));
}

/// Runs backward passes on the calling thread. On LibTorch's one thread per GPU, ranks that share a
/// GPU as threads would deadlock in hooks; and the hand-over takes longer than a small layer.
class BackwardHere {
 public:
  BackwardHere() { state().set_multithreading_enabled(false); }
  /// The setting is the thread's: another thread leaves its own as it is.
  ~BackwardHere() {
    if (thread_ == std::this_thread::get_id()) state().set_multithreading_enabled(before_);
  }
  BackwardHere(const BackwardHere&) = delete;
  BackwardHere& operator=(const BackwardHere&) = delete;

  /// Would, or does, a pass run on a thread of LibTorch's, which inherits the caller's settings?
  static bool is_elsewhere() { return state().get_multithreading_enabled(); }

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  bool before_ = is_elsewhere();
  std::thread::id thread_ = std::this_thread::get_id();
};

template <class Step>
  requires requires(const Step& step) {
    { step.stream() } -> std::convertible_to<cudaStream_t>;
    { step.loss() } -> std::convertible_to<double*>;
  }
struct TorchDevice<Step> {
  /// RAII state around a module's passes.
  struct Scope {
    explicit Scope(const Step& step) : on(on_torch_stream(step.stream())) {}
    c10::cuda::CUDAStreamGuard on;
    BackwardHere here;
  };

  static at::Device device(const Step&) {
    at::globalContext().lazyInitDevice(at::kCUDA);
    return current_torch_gpu();
  }

  /// Seeds LibTorch's generator with this step's key; for graphs, before every replay instead.
  static void seed(const Step& step) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(step.stream(), &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) seed_torch(step, device(step));
  }

  /// Writes the loss to the step's memory. **Stream** the step's.
  static void publish(const Step& step, const at::Tensor& loss) {
    tensor_at(step.loss(), {}, at::kDouble, current_torch_gpu())
        .copy_(loss.reshape(at::IntArrayRef{}));
  }

  /// What backward starts from: the job's loss scale if there is one, else one.
  static at::Tensor gradient(const Step& step, const at::Tensor& loss, at::Tensor& one) {
    if constexpr (requires { step.loss_scale(); }) {
      return tensor_at(step.loss_scale(), loss.sizes(), at::kFloat, current_torch_gpu())
          .to(loss.scalar_type());
    } else {
      return ones_for(loss, one);
    }
  }

  static void zero(const Step& step, void* to, std::size_t bytes) {
    check_cuda(cudaMemsetAsync(to, 0, bytes, step.stream()), "cudaMemsetAsync");
  }

  using Gradients = GradientCopies<Step>;
};

}  // namespace lockstep::detail
