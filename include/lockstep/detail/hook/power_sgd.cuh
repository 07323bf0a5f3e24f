// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `PowerSGD` on a GPU: one launch for all matrices of a bucket, bitwise repeatable.

#include <cub/block/block_reduce.cuh>

#include "lockstep/detail/device/cuda/step_graph.cuh"
#include "lockstep/detail/hook/hook_device.cuh"
#include "lockstep/detail/hook/power_sgd.hpp"

namespace lockstep::detail {

inline constexpr unsigned low_rank_threads = 256;
/// Columns of P or Q that a kernel computes at once.
inline constexpr unsigned most_low_rank_columns = 8;
/// Consecutive elements per thread of `restore_matrices`.
inline constexpr std::size_t low_rank_elements = 4;

/// The last of `count` entries whose `First` is at most `index`.
template <auto First, class Entry>
__device__ const Entry& entry_at(const Entry* entries, std::size_t count, std::size_t index) {
  std::size_t low = 0;
  for (std::size_t high = count; high - low > 1;) {
    const std::size_t middle = low + (high - low) / 2;
    if (entries[middle].*First <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return entries[low];
}

struct LowRankTable {
  const LowRankMatrix* matrices;
  std::size_t count;
  std::size_t columns;  // of all matrices

  template <auto First>
  __device__ const LowRankMatrix& at(std::size_t index) const {
    return entry_at<First>(matrices, count, index);
  }
};

/// M: the residual after `take` has added the gradients, or the gradients if there is no residual.
template <class T>
struct LowRankSource {
  const T* values;
  Accumulator<T>* residual;  // null without error feedback

  __device__ Accumulator<T> at(const LowRankMatrix& matrix, std::size_t i) const {
    if (residual != nullptr) return residual[matrix.residual + i];
    return static_cast<Accumulator<T>>(values[matrix.first + i]);
  }
  __device__ Accumulator<T> take(const LowRankMatrix& matrix, std::size_t i) const {
    const auto gradient = static_cast<Accumulator<T>>(values[matrix.first + i]);
    if (residual == nullptr) return gradient;
    return residual[matrix.residual + i] += gradient;
  }
};

/// Columns [from, from + N) of P = M Q, one block per row; the first launch adds the gradients.
template <unsigned N, class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    project_rows(LowRankTable table, LowRankSource<T> source, const Accumulator<T>* q, T* p,
                 std::size_t from) {
  using A = Accumulator<T>;
  using Reduce = cub::BlockReduce<A, low_rank_threads>;
  const LowRankMatrix matrix = table.at<&LowRankMatrix::first_row>(blockIdx.x);
  const std::size_t row = blockIdx.x - matrix.first_row;
  A sums[N] = {};
  for (std::size_t j = threadIdx.x; j < matrix.columns; j += low_rank_threads) {
    const std::size_t i = row * matrix.columns + j;
    const A value = from == 0 ? source.take(matrix, i) : source.at(matrix, i);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (from + k < matrix.rank) sums[k] += value * q[matrix.q + (from + k) * matrix.columns + j];
    }
  }
  __shared__ typename Reduce::TempStorage storage[N];
#pragma unroll
  for (unsigned k = 0; k < N; ++k) {
    const A sum = Reduce(storage[k]).Sum(sums[k]);
    if (threadIdx.x == 0 && from + k < matrix.rank)
      p[matrix.p + (from + k) * matrix.rows + row] = static_cast<T>(sum);
  }
}

/// `gridDim.y` partial sums of columns [from, from + N) of Q = M^T P; one thread per column of M.
template <unsigned N, class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    project_columns(LowRankTable table, LowRankSource<T> source, const Accumulator<T>* p,
                    Accumulator<T>* partials, std::size_t from) {
  using A = Accumulator<T>;
  const std::size_t column = std::size_t{blockIdx.x} * low_rank_threads + threadIdx.x;
  if (column >= table.columns) return;
  const LowRankMatrix matrix = table.at<&LowRankMatrix::first_column>(column);
  const std::size_t j = column - matrix.first_column;
  const std::size_t length = (matrix.rows + gridDim.y - 1) / gridDim.y;
  const std::size_t first = blockIdx.y * length;
  const std::size_t last = first + length < matrix.rows ? first + length : matrix.rows;
  A sums[N] = {};
  for (std::size_t row = first; row < last; ++row) {
    const A value = source.at(matrix, row * matrix.columns + j);
#pragma unroll
    for (unsigned k = 0; k < N; ++k) {
      if (from + k < matrix.rank) sums[k] += value * p[matrix.p + (from + k) * matrix.rows + row];
    }
  }
#pragma unroll
  for (unsigned k = 0; k < N; ++k)
    partials[(blockIdx.y * table.columns + column) * N + k] = sums[k];
}

template <unsigned N, class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    add_pieces(LowRankTable table, const Accumulator<T>* partials, unsigned pieces, T* q,
               std::size_t from) {
  const std::size_t column = std::size_t{blockIdx.x} * low_rank_threads + threadIdx.x;
  if (column >= table.columns) return;
  const LowRankMatrix matrix = table.at<&LowRankMatrix::first_column>(column);
  for (unsigned k = 0; k < N && from + k < matrix.rank; ++k) {
    Accumulator<T> sum = 0;
    for (std::size_t piece = 0; piece < pieces; ++piece)
      sum += partials[(piece * table.columns + column) * N + k];
    q[matrix.q + (from + k) * matrix.columns + (column - matrix.first_column)] =
        static_cast<T>(sum);
  }
}

/// values = P Q^T; the residual, this rank's M, keeps the difference. Indexed as the residual.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    restore_matrices(LowRankTable table, const Accumulator<T>* p, const Accumulator<T>* q,
                     T* values, Accumulator<T>* residual, std::size_t count) {
  using A = Accumulator<T>;
  std::size_t at = (std::size_t{blockIdx.x} * low_rank_threads + threadIdx.x) * low_rank_elements;
  const std::size_t end = at + low_rank_elements < count ? at + low_rank_elements : count;
  while (at < end) {
    const LowRankMatrix& matrix = table.at<&LowRankMatrix::residual>(at);
    std::size_t row = (at - matrix.residual) / matrix.columns;
    std::size_t j = (at - matrix.residual) % matrix.columns;
    for (; at < end && row < matrix.rows; ++at) {
      A sum = 0;
      for (std::size_t k = 0; k < matrix.rank; ++k)
        sum += p[matrix.p + k * matrix.rows + row] * q[matrix.q + k * matrix.columns + j];
      const T value = static_cast<T>(sum);
      values[matrix.first + (at - matrix.residual)] = value;
      if (residual != nullptr) {
        const A rest = residual[at] - static_cast<A>(value);
        residual[at] = rest - rest == 0 ? rest : A{0};  // a non-finite residual would persist
      }
      if (++j == matrix.columns) {
        j = 0;
        ++row;
      }
    }
  }
}

template <class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    copy_whole(const WholeTensor* tensors, std::size_t tensor_count, T* values, T* sent, bool back,
               std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * low_rank_threads + threadIdx.x;
  if (i >= count) return;
  const WholeTensor& tensor = entry_at<&WholeTensor::at>(tensors, tensor_count, i);
  T& value = values[tensor.first + (i - tensor.at)];
  if (back) {
    value = sent[i];
  } else {
    sent[i] = value;
  }
}

template <class T>
LOCKSTEP_KERNEL __launch_bounds__(low_rank_threads)
    widen_factors(const T* from, Accumulator<T>* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * low_rank_threads + threadIdx.x;
  if (i < count) to[i] = static_cast<Accumulator<T>>(from[i]);
}

/// Threads that synchronize: only one without nvcc, where the threads of a block run serially.
#if defined(__CUDACC__)
inline constexpr unsigned orthogonal_threads = 256;
#else
inline constexpr unsigned orthogonal_threads = 1;
#endif

struct BlockThreads {
  template <class F>
  __device__ static void for_each(std::size_t count, const F& f) {
    for (std::size_t i = threadIdx.x; i < count; i += orthogonal_threads) f(i);
  }
  template <class A>
  __device__ static void add_multiple(A* to, A factor, const A* from, std::size_t count) {
    for_each(count, [&](std::size_t i) { to[i] += factor * from[i]; });
  }
  /// The sum over all threads, returned to each.
  template <class A>
  __device__ static A dot(const A* a, const A* b, std::size_t count) {
    using Reduce = cub::BlockReduce<A, orthogonal_threads>;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ A sum;
    A own = 0;
    for_each(count, [&](std::size_t i) { own += a[i] * b[i]; });
    own = Reduce(storage).Sum(own);
    if (threadIdx.x == 0) sum = own;
    __syncthreads();
    const A all = sum;
    __syncthreads();  // `sum` must not be overwritten before all threads have read it
    return all;
  }
};

/// Orthogonalizes P (`rows`) or Q, one block per matrix. `step` seeds new columns; null: none.
template <class A>
LOCKSTEP_KERNEL __launch_bounds__(orthogonal_threads)
    orthogonalize_matrices(const LowRankMatrix* matrices, bool rows, A* factors, A epsilon,
                           const std::uint64_t* step, std::uint64_t bucket_seed) {
  const LowRankMatrix& matrix = matrices[blockIdx.x];
  const std::uint64_t seed = random_at(bucket_seed, matrix.parameter);
  orthogonalize(factors + (rows ? matrix.p : matrix.q), rows ? matrix.rows : matrix.columns,
                matrix.rank, epsilon, step != nullptr, BlockThreads{},
                [&](std::size_t k, std::size_t i) { return drawn_element(seed, *step, k, i); });
}

/// All passes can be captured.
template <class Element>
class LowRank<Element, HookDevice<Cuda>>
    : public LowRankState<SameElement<Element>, HookDevice<Cuda>> {
  using T = SameElement<Element>;
  using Base = LowRankState<T, HookDevice<Cuda>>;
  using Base::device_, Base::plan_, Base::p_, Base::q_, Base::residual_;

 public:
  using typename Base::A;

  LowRank(HookDevice<Cuda>& device, LowRankPlan plan)
      : Base(device, std::move(plan)),
        stream_(device.stream()),
        matrices_(device_copy_of(plan_.matrices)),
        whole_(device_copy_of(plan_.whole)),
        partials_(pieces() * plan_.columns * width()) {}

  /// The const_cast is safe, because `copy` only reads `values` here.
  void project(std::span<const T> values, std::span<T> sent, std::uint64_t step) {
    // When a captured step is replayed, the step's number is stored before the launch.
    if (capture_status(stream_) == cudaStreamCaptureStatusNone) device_.set_step(step);
    copy(const_cast<T*>(values.data()), sent.data(), false);
    orthogonalize(false, q_.data(), device_.step());
    const LowRankSource<T> source{values.data(), residual()};
    for_each_part([&]<unsigned N>(std::size_t from) {
      launch_kernel<project_rows<N, T>>(
          "rows of PowerSGD", stream_, static_cast<unsigned>(plan_.rows), low_rank_threads, table(),
          source, static_cast<const A*>(q_.data()), sent.data() + plan_.whole_count, from);
    });
  }

  void project_back(std::span<const T> values, std::span<const T> come, std::span<T> sent) {
    receive(come.data() + plan_.whole_count, p_);
    orthogonalize(true, p_.data(), nullptr);
    const LowRankSource<T> source{values.data(), residual()};
    for_each_part([&]<unsigned N>(std::size_t from) {
      launch_kernel<project_columns<N, T>>(
          "columns of PowerSGD", stream_,
          dim3(blocks(plan_.columns), static_cast<unsigned>(pieces())), low_rank_threads, table(),
          source, static_cast<const A*>(p_.data()), partials_.data(), from);
      launch_kernel<add_pieces<N, T>>("pieces of PowerSGD", stream_, blocks(plan_.columns),
                                      low_rank_threads, table(),
                                      static_cast<const A*>(partials_.data()),
                                      static_cast<unsigned>(pieces()), sent.data(), from);
    });
  }

  void restore(std::span<T> values, std::span<const T> first, std::span<const T> come) {
    receive(come.data(), q_);
    copy(values.data(), const_cast<T*>(first.data()), true);
    if (plan_.residual_count == 0) return;
    launch_kernel<restore_matrices<T>>(
        "matrices of PowerSGD", stream_,
        blocks((plan_.residual_count + low_rank_elements - 1) / low_rank_elements),
        low_rank_threads, table(), static_cast<const A*>(p_.data()),
        static_cast<const A*>(q_.data()), values.data(), residual(), plan_.residual_count);
  }

 private:
  static unsigned blocks(std::size_t count) { return blocks_for(count, low_rank_threads); }

  /// Enough pieces of columns for any GPU; their number, and so the sums, are equal on all GPUs.
  std::size_t pieces() const {
    constexpr std::size_t wanted = 256 * 1024;  // threads
    return std::clamp<std::size_t>(plan_.columns == 0 ? 1 : wanted / plan_.columns, 1, 32);
  }
  unsigned width() const {
    return static_cast<unsigned>(
        std::min<std::size_t>(std::bit_ceil(plan_.rank), most_low_rank_columns));
  }
  /// Calls `f.operator()<N>(from)` for all columns, N at a time.
  void for_each_part(const auto& f) const {
    if (plan_.matrices.empty()) return;
    for (std::size_t from = 0; from < plan_.rank; from += width()) {
      if (width() == 1) f.template operator()<1>(from);
      if (width() == 2) f.template operator()<2>(from);
      if (width() == 4) f.template operator()<4>(from);
      if (width() == most_low_rank_columns) f.template operator()<most_low_rank_columns>(from);
    }
  }

  LowRankTable table() { return {matrices_.data(), plan_.matrices.size(), plan_.columns}; }
  A* residual() { return plan_.feedback ? residual_.data() : nullptr; }

  void copy(T* values, T* sent, bool back) {
    if (plan_.whole_count == 0) return;
    launch_kernel<copy_whole<T>>("whole tensors of PowerSGD", stream_, blocks(plan_.whole_count),
                                 low_rank_threads, static_cast<const WholeTensor*>(whole_.data()),
                                 plan_.whole.size(), values, sent, back, plan_.whole_count);
  }
  void receive(const T* come, std::span<A> own) {
    if (own.empty()) return;
    launch_kernel<widen_factors<T>>("factors of PowerSGD", stream_, blocks(own.size()),
                                    low_rank_threads, come, own.data(), own.size());
  }
  void orthogonalize(bool of_rows, A* factors, const std::uint64_t* step) {
    if (plan_.matrices.empty()) return;
    launch_kernel<orthogonalize_matrices<A>>(
        "orthogonal matrices", stream_, static_cast<unsigned>(plan_.matrices.size()),
        orthogonal_threads, static_cast<const LowRankMatrix*>(matrices_.data()), of_rows, factors,
        static_cast<A>(plan_.epsilon), step, plan_.seed);
  }

  cudaStream_t stream_;
  DeviceElements<LowRankMatrix> matrices_;
  DeviceElements<WholeTensor> whole_;
  DeviceElements<A> partials_;
};

}  // namespace lockstep::detail
