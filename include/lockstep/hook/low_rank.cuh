// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The passes of `PowerSGD` on a GPU.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/hook/hook_device.cuh"
#include "lockstep/hook/low_rank.hpp"
#include "lockstep/hook/low_rank_kernels.cuh"

namespace lockstep::detail {

/// The passes for elements of a kind. They have nothing of a job's type, and may all be part of a
/// captured step.
template <ElementKind Kind>
class GpuLowRank {
  using T = ElementOf<Kind>;

 public:
  using A = Accumulator<T>;

  GpuLowRank(GpuHookDevice& device, LowRankPlan plan)
      : plan_(std::move(plan)),
        device_(device),
        stream_(device.stream()),
        numbered_(number(plan_)),
        matrices_(upload(numbered_)),
        whole_(upload(plan_.whole)),
        p_(plan_.p_count),
        q_(plan_.q_count),
        residual_(plan_.feedback ? plan_.residual_count : 0),
        partials_(pieces() * columns() * width()) {}

  const LowRankPlan& plan() const { return plan_; }

  void forget_q() {
    check_cuda(cudaMemsetAsync(q_.span().data(), 0, q_.span().size_bytes(), stream_),
               "cudaMemsetAsync");
  }

  /// `values` are whole tensors too, which are only read.
  void project(std::span<const T> values, std::span<T> sent, std::uint64_t step) {
    // A captured step is replayed as others, whose numbers are stored before.
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    if (status == cudaStreamCaptureStatusNone) device_.set_step(step);
    copy(const_cast<T*>(values.data()), sent.data(), false);
    orthogonalize(false, q_.span().data(), {device_.step(), plan_.seed});
    const LowRankSource<T> source{values.data(), residual()};
    for_each_part([&]<unsigned N>(std::size_t from) {
      launch_kernel<project_rows<N, T>>(
          "rows of PowerSGD", stream_, static_cast<unsigned>(rows()), low_rank_threads, table(),
          source, static_cast<const A*>(q_.span().data()), sent.data() + plan_.whole_count, from);
    });
  }

  void project_back(std::span<const T> values, std::span<const T> come, std::span<T> sent) {
    receive(come.subspan(plan_.whole_count), p_.span());
    orthogonalize(true, p_.span().data(), {nullptr, 0});
    const LowRankSource<T> source{values.data(), residual()};
    for_each_part([&]<unsigned N>(std::size_t from) {
      launch_kernel<project_columns<N, T>>(
          "columns of PowerSGD", stream_, dim3(blocks(columns()), static_cast<unsigned>(pieces())),
          low_rank_threads, table(), source, static_cast<const A*>(p_.span().data()),
          partials_.span().data(), from);
      launch_kernel<add_pieces<N, T>>("pieces of PowerSGD", stream_, blocks(columns()),
                                      low_rank_threads, table(),
                                      static_cast<const A*>(partials_.span().data()),
                                      static_cast<unsigned>(pieces()), sent.data(), from);
    });
  }

  void restore(std::span<T> values, std::span<const T> first, std::span<const T> come) {
    receive(come, q_.span());
    copy(values.data(), const_cast<T*>(first.data()), true);
    if (plan_.residual_count == 0) return;
    launch_kernel<restore_matrices<T>>(
        "matrices of PowerSGD", stream_,
        blocks((plan_.residual_count + low_rank_elements - 1) / low_rank_elements),
        low_rank_threads, table(), static_cast<const A*>(p_.span().data()),
        static_cast<const A*>(q_.span().data()), values.data(), residual(), plan_.residual_count);
  }

  std::span<A> q_of(const LowRankMatrix& matrix) {
    return q_.span().subspan(matrix.q, matrix.rank * matrix.columns);
  }
  std::span<A> residual_of(const LowRankMatrix& matrix) {
    return residual_.span().subspan(matrix.residual, matrix.count());
  }

 private:
  static std::vector<NumberedMatrix> number(const LowRankPlan& plan) {
    std::vector<NumberedMatrix> numbered;
    std::size_t rows = 0;
    std::size_t columns = 0;
    for (const LowRankMatrix& matrix : plan.matrices) {
      numbered.push_back({matrix, rows, columns});
      rows += matrix.rows;
      columns += matrix.columns;
    }
    return numbered;
  }
  template <class U>
  static DeviceElements<U> upload(const std::vector<U>& values) {
    DeviceElements<U> memory(values.size());
    copy_now(memory.span().data(), values.data(), values.size() * sizeof(U));
    return memory;
  }
  static unsigned blocks(std::size_t count) {
    return static_cast<unsigned>((count + low_rank_threads - 1) / low_rank_threads);
  }

  std::size_t rows() const {
    return numbered_.empty() ? 0 : numbered_.back().first_row + numbered_.back().rows;
  }
  std::size_t columns() const {
    return numbered_.empty() ? 0 : numbered_.back().first_column + numbered_.back().columns;
  }
  /// Columns are cut so that there is work for every multiprocessor. Not by how many this GPU has:
  /// sums are the same on all.
  std::size_t pieces() const {
    constexpr std::size_t wanted = 256 * 1024;  // threads
    return std::clamp<std::size_t>(columns() == 0 ? 1 : wanted / columns(), 1, 32);
  }
  std::size_t rank() const {
    std::size_t most = 1;
    for (const LowRankMatrix& matrix : plan_.matrices) most = std::max(most, matrix.rank);
    return most;
  }
  /// Columns of P and Q that are computed at once.
  unsigned width() const {
    const std::size_t most = rank();
    return most > 4 ? most_low_rank_columns : most > 2 ? 4 : static_cast<unsigned>(most);
  }
  /// Calls `f.operator()<N>(from)` for all columns, N at a time.
  template <class F>
  void for_each_part(const F& f) const {
    if (numbered_.empty()) return;
    for (std::size_t from = 0; from < rank(); from += width()) {
      switch (width()) {
        case 1:
          f.template operator()<1>(from);
          break;
        case 2:
          f.template operator()<2>(from);
          break;
        case 4:
          f.template operator()<4>(from);
          break;
        default:
          f.template operator()<most_low_rank_columns>(from);
      }
    }
  }

  LowRankTable table() { return {matrices_.span().data(), numbered_.size(), rows(), columns()}; }
  A* residual() { return plan_.feedback ? residual_.span().data() : nullptr; }

  void copy(T* values, T* sent, bool back) {
    if (plan_.whole_count == 0) return;
    launch_kernel<copy_whole<T>>("whole tensors of PowerSGD", stream_, blocks(plan_.whole_count),
                                 low_rank_threads,
                                 static_cast<const WholeTensor*>(whole_.span().data()),
                                 plan_.whole.size(), values, sent, back, plan_.whole_count);
  }
  void receive(std::span<const T> come, std::span<A> own) {
    if (own.empty()) return;
    launch_kernel<widen_factors<T>>("factors of PowerSGD", stream_, blocks(own.size()),
                                    low_rank_threads, come.data(), own.data(), own.size());
  }
  void orthogonalize(bool of_rows, A* factors, const LowRankDraw& draw) {
    if (numbered_.empty()) return;
    launch_kernel<orthogonalize_matrices<A>>(
        "orthogonal matrices", stream_, static_cast<unsigned>(numbered_.size()), orthogonal_threads,
        static_cast<const NumberedMatrix*>(matrices_.span().data()), of_rows, factors,
        static_cast<A>(plan_.epsilon), draw);
  }

  LowRankPlan plan_;
  GpuHookDevice& device_;
  cudaStream_t stream_;
  std::vector<NumberedMatrix> numbered_;
  DeviceElements<NumberedMatrix> matrices_;
  DeviceElements<WholeTensor> whole_;
  DeviceElements<A> p_;
  DeviceElements<A> q_;
  DeviceElements<A> residual_;
  DeviceElements<A> partials_;
};

template <class T, class Comm>
class LowRank<T, HookDevice<Cuda, Comm>> : public GpuLowRank<element_kind<T>()> {
 public:
  LowRank(HookDevice<Cuda, Comm>& device, LowRankPlan plan)
      : GpuLowRank<element_kind<T>()>(device, std::move(plan)) {}
};

}  // namespace lockstep::detail
