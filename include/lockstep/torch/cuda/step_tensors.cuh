// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a step of lockstep gives to a module, and takes from it, on a GPU: everything is put
/// on the step's stream, and the host waits for nothing.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>

#include "lockstep/device/cuda/runtime.cuh"
#include "lockstep/torch/adopted_tensors.hpp"
#include "lockstep/torch/cuda/gradient_copies.cuh"
#include "lockstep/torch/step_tensors.hpp"

namespace lockstep::detail {

/// The current GPU, as LibTorch numbers it.
inline at::Device current_torch_gpu() {
  int index = 0;
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

/// Makes a stream of lockstep's the one on which LibTorch works, for this thread and a while.
class OnTorchStream {
 public:
  explicit OnTorchStream(cudaStream_t stream)
      : guard_(c10::cuda::getStreamFromExternal(stream, current_torch_gpu().index())) {}

 private:
  c10::cuda::CUDAStreamGuard guard_;
};

/// Lets a backward pass run on the thread that asks for it. LibTorch has one thread for each GPU:
/// there, a hook of one rank that waits for another rank would keep that one's pass from going on,
/// where ranks are threads that share a GPU. Besides, a hand-over to another thread takes longer
/// than a small layer.
class BackwardHere {
 public:
  BackwardHere() { state().set_multithreading_enabled(false); }
  ~BackwardHere() { state().set_multithreading_enabled(before_); }
  BackwardHere(const BackwardHere&) = delete;
  BackwardHere& operator=(const BackwardHere&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  bool before_ = state().get_multithreading_enabled();
};

/// A step on a GPU.
template <class Step>
  requires requires(const Step& step) {
    { step.stream() } -> std::convertible_to<cudaStream_t>;
    { step.loss() } -> std::convertible_to<double*>;
  }
struct TorchDevice<Step> {
  /// What must hold while a module runs in this step.
  class Scope {
   public:
    explicit Scope(const Step& step) : on_(step.stream()) {}

   private:
    OnTorchStream on_;
    BackwardHere here_;
  };

  static at::Device device(const Step&) {
    at::globalContext().lazyInitDevice(at::kCUDA);
    return current_torch_gpu();
  }

  /// LibTorch's generator goes on from this step's key. While a step is captured it must not: every
  /// run of the graph has a key of its own, which is set before it.
  static void seed(const Step& step) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(step.stream(), &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) seed_torch(step, device(step));
  }

  /// Writes the loss to where the step has it. **Stream** the step's.
  static void hand_out(const Step& step, const at::Tensor& loss) {
    number_at(step.loss(), at::kDouble).copy_(loss.reshape(at::IntArrayRef{}));
  }

  /// The loss times the scale that keeps small gradients in 16 bits, where the job has one.
  static at::Tensor scaled(const Step& step, const at::Tensor& loss) {
    if constexpr (requires { step.loss_scale(); }) {
      return loss * number_at(step.loss_scale(), at::kFloat);
    } else {
      return loss;
    }
  }

  static void zero(const Step& step, void* to, std::size_t bytes) {
    check_cuda(cudaMemsetAsync(to, 0, bytes, step.stream()), "cudaMemsetAsync");
  }

  /// The gradients of one backward pass. They are ready when their copies are on the step's stream,
  /// where they were computed.
  class Gradients {
   public:
    explicit Gradients(Step& step) : step_(step), copies_(step) {}
    void write(std::size_t parameter, void* to, at::ScalarType type, const at::Tensor& gradient) {
      if (gradient.scalar_type() == type && gradient.is_cuda() && gradient.is_contiguous()) {
        copies_.add(parameter, to, gradient);
      } else {
        tensor_at(to, gradient, type, current_torch_gpu()).copy_(gradient);
        step_.ready(parameter);
      }
    }
    void finish() { copies_.finish(); }

   private:
    Step& step_;
    GradientCopies<Step> copies_;
  };

 private:
  static at::Tensor number_at(const void* data, at::ScalarType type) {
    return at::from_blob(const_cast<void*>(data), at::IntArrayRef{},
                         at::TensorOptions().dtype(type).device(current_torch_gpu()));
  }
};

}  // namespace lockstep::detail
