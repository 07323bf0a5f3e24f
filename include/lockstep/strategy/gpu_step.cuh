// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step that a model sees on a GPU: its tensors, and the stream to work on.

#include <cuda_runtime_api.h>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Forward and backward enqueue everything on `stream()`, or on streams that are forked from it and
/// joined to it again; nothing waits for the GPU. Forward writes the batch's mean loss to `loss()`.
template <class Traits, class Comm>
class GpuStep : public Traits::bare_step {
 public:
  GpuStep(const TensorLayouts<Traits>& layouts, Arenas arenas, Comm& comm, double* loss,
          const float* loss_scale)
      : Traits::bare_step(layouts.parameters, layouts.buffers, arenas),
        comm_(&comm),
        loss_(loss),
        loss_scale_(loss_scale) {}

  cudaStream_t stream() const { return comm_->gpu().stream(); }

  /// Device memory, of one number.
  double* loss() const { return loss_; }

  /// The factor by which the model multiplies the gradient of its loss, so that small gradients
  /// survive in 16 bits; the optimizer divides by it. Device memory, of one number.
  const float* loss_scale() const
    requires(Traits::scales_loss)
  {
    return loss_scale_;
  }

  /// **Host** blocks until the stream is empty: for evaluation, never in forward or backward.
  void synchronize() const { comm_->synchronize(); }

 private:
  Comm* comm_;
  double* loss_;
  const float* loss_scale_;
};

}  // namespace lockstep::detail
