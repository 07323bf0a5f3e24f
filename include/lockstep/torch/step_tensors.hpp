// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a step of lockstep gives to a module, and takes from it, on the host. `torch.cuh` has
/// the same for GPUs.

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstddef>
#include <cstring>

#include "lockstep/torch/adopted_tensors.hpp"
#include "lockstep/torch/random.hpp"

namespace lockstep::detail {

/// The device of a step: here the host, where every call is done when it returns.
template <class Step>
struct TorchDevice {
  /// What must hold while a module runs in this step: nothing on the host.
  struct Scope {
    explicit Scope(const Step&) {}
  };
  static at::Device device(const Step&) { return at::kCPU; }

  /// LibTorch's generator goes on from this step's key.
  static void seed(const Step& step) { seed_torch(step); }

  /// The value of a loss, which the step returns.
  static double hand_out(const Step&, const at::Tensor& loss) { return loss.item<double>(); }
  /// What backward begins with.
  static at::Tensor scaled(const Step&, const at::Tensor& loss) { return loss; }

  /// Writes a gradient. One in rows of the same type is copied as bytes, which for small tensors
  /// takes a fraction of what `copy_` does.
  static void write(const Step&, void* to, at::ScalarType type, const at::Tensor& gradient) {
    const std::size_t bytes = gradient.nbytes();
    if (gradient.scalar_type() == type && bytes <= most_copied && gradient.is_contiguous()) {
      std::memcpy(to, gradient.const_data_ptr(), bytes);
    } else {
      tensor_at(to, gradient, type, at::kCPU).copy_(gradient);
    }
  }
  static void zero(const Step&, void* to, std::size_t bytes) { std::memset(to, 0, bytes); }

  /// The gradients of one backward pass, each ready as soon as it is written.
  class Gradients {
   public:
    explicit Gradients(Step& step) : step_(step) {}
    void write(std::size_t parameter, void* to, at::ScalarType type, const at::Tensor& gradient) {
      TorchDevice::write(step_, to, type, gradient);
      step_.ready(parameter);
    }
    void finish() {}

   private:
    Step& step_;
  };

 private:
  /// Larger ones are copied by all threads that LibTorch may use.
  static constexpr std::size_t most_copied = std::size_t{1} << 20;
};

}  // namespace lockstep::detail
