// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The passes of `TopK` on a GPU.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/hook/hook_device.cuh"
#include "lockstep/hook/selection.hpp"
#include "lockstep/hook/selection_kernels.cuh"

namespace lockstep::detail {

/// The passes for elements of a kind. They have nothing of a job's type, and may be part of a
/// captured step.
template <ElementKind Kind>
class GpuSelection {
  using T = ElementOf<Kind>;

 public:
  using A = Accumulator<T>;

  /// Buckets are sorted one after the other, so that all of a device share its scratch memory.
  GpuSelection(GpuHookDevice& device, std::size_t count, std::size_t selected)
      : device_(device), selected_(selected), residual_(count), sort_(count) {
    device.reserve_scratch(sort_.bytes());
  }

  void select(std::span<const T> values, std::span<std::uint32_t> sent) {
    std::byte* const scratch = device_.scratch();
    launch_kernel<take_gradients<T>>("gradients of TopK", device_.stream(), blocks(values.size()),
                                     selection_threads, values.data(), residual_.span().data(),
                                     sort_.keys(scratch), sort_.places(scratch), values.size());
    const std::uint32_t* const order = sort_.sort(device_.stream(), scratch);
    launch_kernel<send_largest<T>>("largest elements", device_.stream(), blocks(selected_),
                                   selection_threads, order, residual_.span().data(), sent.data(),
                                   selected_);
  }

  void add_up(std::span<const std::uint32_t> all, std::size_t ranks, std::span<T> values) {
    device_.zero(values);
    const std::size_t words = all.size() / ranks;
    for (std::size_t rank = 0; rank != ranks; ++rank) {
      launch_kernel<add_largest<T>>("sums of TopK", device_.stream(), blocks(selected_),
                                    selection_threads, all.data() + rank * words, values.data(),
                                    static_cast<A>(ranks), selected_);
    }
  }

  std::span<A> residual() { return residual_.span(); }

 private:
  static unsigned blocks(std::size_t count) {
    return static_cast<unsigned>((count + selection_threads - 1) / selection_threads);
  }

  GpuHookDevice& device_;
  std::size_t selected_;
  DeviceElements<A> residual_;
  MagnitudeSort<A> sort_;
};

template <class T, class Comm>
class Selection<T, HookDevice<Cuda, Comm>> : public GpuSelection<element_kind<T>()> {
 public:
  Selection(HookDevice<Cuda, Comm>& device, SelectionPlan<T> plan)
      : GpuSelection<element_kind<T>()>(device, plan.count, plan.selected), plan_(plan) {}

  const SelectionPlan<T>& plan() const { return plan_; }

 private:
  SelectionPlan<T> plan_;
};

}  // namespace lockstep::detail
