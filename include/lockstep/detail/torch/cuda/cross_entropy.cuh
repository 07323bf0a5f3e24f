// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The mean cross entropy of scores on a GPU in one pass forward and one backward. LibTorch's
/// own casts 16-bit scores to float and keeps two copies of them, which is a tenth of GPT-2's step.

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <limits>
#include <stdexcept>

#include "lockstep/detail/device/cuda/vector.cuh"
#include "lockstep/detail/torch/tensors.hpp"

namespace lockstep::detail::cross_entropy {

/// How many threads share a row, and how many a block has: few if rows are short, since a small
/// network's whole batch is then one block's, which waits for itself alone.
template <unsigned Row, unsigned Block>
struct Shape {
  static constexpr unsigned row = Row;
  static constexpr unsigned block = Block;
  static constexpr std::int64_t rows_at_once = Block / Row;
  static constexpr std::int64_t most_of_one_block = Row == Block ? 1 : 4 * rows_at_once;
};
using Short = Shape<1, 128>;
using Medium = Shape<32, 1024>;
using Long = Shape<1024, 1024>;
inline constexpr std::int64_t most_short = 32, most_medium = 1024;  // classes

/// The sum of exp(score - largest) over scores that were seen.
struct Exponentials {
  float largest = std::numeric_limits<float>::lowest();
  float sum = 0;

  __device__ void add(float score) {
    if (score > largest) {
      sum *= expf(largest - score);
      largest = score;
    }
    sum += expf(score - largest);  // of NaN and of infinity: NaN
  }
};
struct Joined {
  __device__ Exponentials operator()(const Exponentials& a, const Exponentials& b) const {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
  }
};

/// A table of scores with a label for each row.
template <class T>
struct Rows {
  const T* scores;
  const std::int64_t* labels;
  std::int64_t rows;
  std::int64_t classes;
  std::int64_t ignored;  // the label of rows that do not count

  __device__ bool counts(std::int64_t row) const { return labels[row] != ignored; }
};

/// What the forward pass leaves: of each row the logarithm of its exponentials' sum, and its loss;
/// then the mean of losses, and one over the number of rows that count.
struct Results {
  float* log_sums;
  float* losses;
  float* mean;
  float* share;
};

/// All threads of one block, in an order that depends on nothing but the number of rows.
template <unsigned Threads, class T>
__device__ void average(const Rows<T>& of, const Results& results) {
  using Reduce = cub::BlockReduce<float2, Threads>;
  __shared__ typename Reduce::TempStorage storage;
  float2 own{0, 0};
  for (std::int64_t row = threadIdx.x; row < of.rows; row += Threads) {
    if (!of.counts(row)) continue;
    own.x += results.losses[row];
    own.y += 1;
  }
  const auto plus = [](float2 a, float2 b) { return float2{a.x + b.x, a.y + b.y}; };
  const float2 sum = Reduce(storage).Reduce(own, plus);
  if (threadIdx.x != 0) return;
  *results.mean = sum.x / sum.y;
  *results.share = 1 / sum.y;
}
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(Long::block) average_rows(Rows<T> of, Results results) {
  average<Long::block>(of, results);
}

/// The exponentials of a row, in the first of its threads.
template <class S>
__device__ Exponentials join(const Exponentials& own) {
  if constexpr (S::row == 1) {
    return own;
  } else if constexpr (S::row == S::block) {
    using Reduce = cub::BlockReduce<Exponentials, S::block>;
    __shared__ typename Reduce::TempStorage storage;
    return Reduce(storage).Reduce(own, Joined{});
  } else {
    using Reduce = cub::WarpReduce<Exponentials, S::row>;
    __shared__ typename Reduce::TempStorage storage[S::rows_at_once];
    return Reduce(storage[threadIdx.x / S::row]).Reduce(own, Joined{});
  }
}

/// The row that this thread begins with.
template <class S>
__device__ std::int64_t first_row() {
  return blockIdx.x * S::rows_at_once + threadIdx.x / S::row;
}

/// Reads packets of N scores. A single block finds the mean too.
template <class T, class S, std::size_t N>
LOCKSTEP_KERNEL __launch_bounds__(S::block) forward(Rows<T> of, Results results) {
  const unsigned lane = threadIdx.x % S::row;
  for (std::int64_t row = first_row<S>(); row < of.rows; row += gridDim.x * S::rows_at_once) {
    const T* const scores = of.scores + row * of.classes;
    Exponentials own;
#pragma unroll 4
    for (std::int64_t i = lane * N; i < of.classes; i += S::row * N) {
      const auto packet = load_packet<Caching::keep, N>(scores + i);
      for (const T& score : packet.at) own.add(static_cast<float>(score));
    }
    const Exponentials all = join<S>(own);
    if (lane != 0) continue;
    const std::int64_t label = of.labels[row];
    const float log_sum = all.largest + logf(all.sum);
    results.log_sums[row] = log_sum;
    if (label == of.ignored) continue;
    if (label < 0 || label >= of.classes) {
      printf("lockstep: the label of row %lld is %lld, and there are %lld classes\n",
             static_cast<long long>(row), static_cast<long long>(label),
             static_cast<long long>(of.classes));
      __trap();
    }
    results.losses[row] = log_sum - static_cast<float>(scores[label]);
  }
  if (gridDim.x != 1) return;
  __syncthreads();
  average<S::block>(of, results);
}

/// The gradient of each score is its probability, less one at the label, times the loss's gradient.
template <class T, class S, std::size_t N>
LOCKSTEP_KERNEL __launch_bounds__(S::block)
    backward(Rows<T> of, const float* log_sums, const float* share, const float* of_loss,
             T* gradients) {
  const std::int64_t row = first_row<S>();
  if (row >= of.rows) return;
  const float scale = of.counts(row) ? *share * *of_loss : 0.f;
  const float log_sum = log_sums[row];
  const std::int64_t label = of.labels[row];
  for (std::int64_t i = threadIdx.x % S::row * N; i < of.classes; i += S::row * N) {
    auto packet = load_packet<Caching::stream, N>(of.scores + row * of.classes + i);
    for (std::size_t k = 0; k != N; ++k) {
      const float probability = expf(static_cast<float>(packet.at[k]) - log_sum);
      const float gradient = probability - (i + static_cast<std::int64_t>(k) == label ? 1.f : 0.f);
      packet.at[k] = static_cast<T>(scale == 0.f ? 0.f : gradient * scale);
    }
    store_packet<Caching::keep>(gradients + row * of.classes + i, packet);
  }
}

/// Calls `f.operator()<T, Shape, N>()` with what suits these scores.
void choose(const at::Tensor& scores, const auto& f) {
  const auto by_width = [&]<class T, std::size_t N>() {
    if (scores.size(1) <= most_short) {
      f.template operator()<T, Short, N>();
    } else if (scores.size(1) <= most_medium) {
      f.template operator()<T, Medium, N>();
    } else {
      f.template operator()<T, Long, N>();
    }
  };
  const auto by_packet = [&]<class T>() {
    constexpr std::size_t n = packet_size<T>;
    const bool fits = scores.size(1) % static_cast<std::int64_t>(n) == 0 &&
                      reinterpret_cast<std::uintptr_t>(scores.const_data_ptr()) % 16 == 0;
    if (fits) {
      by_width.template operator()<T, n>();
    } else {
      by_width.template operator()<T, 1>();
    }
  };
  switch (scores.scalar_type()) {
    case at::kFloat:
      return by_packet.template operator()<float>();
    case at::kHalf:
      return by_packet.template operator()<at::Half>();
    default:
      return by_packet.template operator()<at::BFloat16>();
  }
}

template <class T>
Rows<T> rows_of(const at::Tensor& scores, const at::Tensor& labels, std::int64_t ignored) {
  return {scores.const_data_ptr<T>(), labels.const_data_ptr<std::int64_t>(), scores.size(0),
          scores.size(1), ignored};
}

template <class S>
unsigned blocks_for(std::int64_t rows) {
  return static_cast<unsigned>((rows + S::rows_at_once - 1) / S::rows_at_once);
}

struct Function : ::torch::autograd::Function<Function> {
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& scores,
                            const at::Tensor& labels, std::int64_t ignored) {
    const c10::cuda::CUDAGuard on(scores.device());
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const std::int64_t rows = scores.size(0);
    const at::Tensor numbers = at::empty({2 * rows + 1}, scores.options().dtype(at::kFloat));
    const at::Tensor mean = at::empty({}, numbers.options());
    auto* const floats = numbers.mutable_data_ptr<float>();
    const Results results{floats, floats + rows, mean.mutable_data_ptr<float>(), floats + 2 * rows};
    choose(scores, [&]<class T, class S, std::size_t N>() {
      const auto all = rows_of<T>(scores, labels, ignored);
      const unsigned blocks = rows <= S::most_of_one_block ? 1 : blocks_for<S>(rows);
      launch_kernel<cross_entropy::forward<T, S, N>>("cross_entropy::forward", stream, blocks,
                                                     S::block, all, results);
      if (blocks == 1) return;
      launch_kernel<average_rows<T>>("cross_entropy::average_rows", stream, 1, Long::block, all,
                                     results);
    });
    context->save_for_backward({scores, labels, numbers});
    context->saved_data["ignored"] = ignored;
    return mean;
  }

  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   const ::torch::autograd::variable_list& of) {
    if (c10::GradMode::is_enabled())
      throw std::logic_error(
          "lockstep: cross_entropy has no second derivative; use at::cross_entropy_loss");
    const auto saved = context->get_saved_variables();
    const auto& scores = saved[0];
    const auto& labels = saved[1];
    const std::int64_t ignored = context->saved_data["ignored"].toInt();
    const c10::cuda::CUDAGuard on(scores.device());
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const std::int64_t rows = scores.size(0);
    const auto* const floats = saved[2].const_data_ptr<float>();
    const at::Tensor gradients = at::empty_like(scores);
    choose(scores, [&]<class T, class S, std::size_t N>() {
      launch_kernel<cross_entropy::backward<T, S, N>>(
          "cross_entropy::backward", stream, blocks_for<S>(rows), S::block,
          rows_of<T>(scores, labels, ignored), floats, floats + 2 * rows,
          of[0].const_data_ptr<float>(), gradients.mutable_data_ptr<T>());
    });
    return {gradients, at::Tensor(), at::Tensor()};
  }
};

/// Are these scores and labels ones that the kernels take? LibTorch answers for all others.
inline bool takes(const at::Tensor& scores, const at::Tensor& labels) {
  const auto type = scores.scalar_type();
  return scores.is_cuda() && labels.device() == scores.device() && scores.dim() == 2 &&
         labels.dim() == 1 && labels.scalar_type() == at::kLong && scores.numel() != 0 &&
         labels.size(0) == scores.size(0) &&
         (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

}  // namespace lockstep::detail::cross_entropy

namespace lockstep {

inline namespace torch_modules {

/// `torch::nn::functional::cross_entropy` of scores `[rows, classes]` and labels `[rows]`: the mean
/// over all rows whose label is not `ignore_index`. On a GPU, scores of 16 bits are read as they
/// are, computed with in float, and never copied; the loss is a float. Other scores and labels, and
/// those on CPUs, are LibTorch's. **Stream** LibTorch's current one.
inline at::Tensor cross_entropy(const at::Tensor& scores, const at::Tensor& labels,
                                std::int64_t ignore_index = -100) {
  if (!detail::cross_entropy::takes(scores, labels))
    return at::cross_entropy_loss(scores, labels, {}, at::Reduction::Mean, ignore_index);
  return detail::cross_entropy::Function::apply(scores.contiguous(), labels.contiguous(),
                                                ignore_index);
}

}  // namespace torch_modules

}  // namespace lockstep
