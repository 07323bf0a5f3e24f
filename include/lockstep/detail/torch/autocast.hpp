// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Scopes of 16-bit operations, as `torch.autocast` in Python.

#include <ATen/autocast_mode.h>
#include <c10/core/DeviceType.h>

#include "lockstep/detail/torch/tensors.hpp"

namespace lockstep {

inline namespace torch_modules {

/// While this lives, eligible operations of the calling thread on this device type run in 16 bits;
/// parameters keep their type. Forward passes and losses belong inside, backward passes outside:
///
///     torch::Tensor loss(const Batch& batch) {
///       const Autocast in_bf16(at::kCUDA);
///       return torch::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
///     }
///
/// With `at::kHalf`, give the job `Precision<ScaledLoss>`, or small gradients are lost. Scopes
/// nest. Weights are cast once per outermost scope, whose end clears the cache for the next update.
class [[nodiscard]] Autocast {
 public:
  explicit Autocast(at::DeviceType device, at::ScalarType type = at::kBFloat16,
                    bool is_enabled = true)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        had_type_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, is_enabled);
    at::autocast::set_autocast_dtype(device, type);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(device_, had_type_);
    at::autocast::set_autocast_enabled(device_, was_enabled_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// Full precision inside another scope: `const auto exact = Autocast::off(at::kCUDA);`
  static Autocast off(at::DeviceType device) {
    return Autocast(device, at::autocast::get_autocast_dtype(device), false);
  }

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType had_type_;
};

}  // namespace torch_modules

}  // namespace lockstep
