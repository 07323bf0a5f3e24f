// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A classifier's last layer and its loss: one kernel forward, one back.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "device_array.cuh"
#include "lockstep/lockstep.cuh"

/// The last layer is narrow: a product with ten columns is a few dot products for each row, and
/// costs less than launching another kernel for it would.
///
/// Nothing here depends on which block comes first: sums are taken in a fixed order.
namespace softmax {

/// A batch's sums: losses, right answers, weights.
struct Score {
  double loss = 0;
  double correct = 0;
  double weight = 0;
};

/// The results of `forward_rows` for each row, and a counter that its blocks share.
struct Scratch {
  float* errors;      // the loss's gradient by the outputs, Classes of them
  float* losses;      // times the row's weight
  float* correct;     // the row's weight, or 0
  unsigned* arrived;  // blocks that are done; zero between launches
};

template <class T>
__device__ T warp_sum(T value) {
  for (int other = 16; other > 0; other /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, other);
  }
  return value;
}

inline __device__ float warp_max(float value) {
  for (int other = 16; other > 0; other /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, other));
  }
  return value;
}

/// The weight of a row: one where there are no weights.
inline __device__ float weight_of(const float* weights, int row) {
  return weights == nullptr ? 1 : weights[row];
}

/// outputs = hidden weight^T + bias; softmax cross entropy; its gradient by the outputs. The mean
/// is weighted: a row of weight 0 counts nothing. A block for each row, a warp for each class.
template <class T, std::size_t Hidden, std::size_t Classes>
LOCKSTEP_KERNEL __launch_bounds__(32 * Classes)
    forward_rows(const T* hidden, const T* weight, const T* bias, const std::int32_t* labels,
                 const float* weights, const float* scale, Scratch scratch, Score* score,
                 double* mean_loss) {
  const int row = static_cast<int>(blockIdx.x);
  const int rows = static_cast<int>(gridDim.x);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __shared__ float outputs[Classes];
  float output = 0;
  for (int i = lane; i < Hidden; i += 32) {
    output += static_cast<float>(hidden[static_cast<std::size_t>(row) * Hidden + i]) *
              static_cast<float>(weight[warp * Hidden + i]);
  }
  output = warp_sum(output);
  if (lane == 0) outputs[warp] = output + static_cast<float>(bias[warp]);
  float all_weights = 0;
  if (warp == 0) {
    for (int i = lane; i < rows; i += 32) all_weights += weight_of(weights, i);
    all_weights = warp_sum(all_weights);
  }
  __syncthreads();
  if (warp != 0) return;

  const int label = labels[row];
  const bool is_class = lane < Classes;
  output = is_class ? outputs[lane] : -INFINITY;
  const float highest = warp_max(output);  // less this, no exponential overflows
  const bool is_correct = __ffs(__ballot_sync(0xffffffffu, output == highest)) - 1 == label;
  const float power = is_class ? expf(output - highest) : 0;
  const float sum = warp_sum(power);
  // A label that is no class makes the loss NaN: a kernel cannot throw.
  float own = __shfl_sync(0xffffffffu, output, label & 31);
  if (label < 0 || label >= Classes) own = NAN;
  const float counts = weight_of(weights, row);
  float share = all_weights == 0 ? 0 : counts / all_weights;
  if (scale != nullptr) share *= *scale;
  if (is_class) {
    scratch.errors[static_cast<std::size_t>(row) * Classes + lane] =
        share * (power / sum - (lane == label ? 1.f : 0.f));
  }

  // The block that comes last adds up the results of all blocks, in order of rows.
  unsigned earlier = 0;
  if (lane == 0) {
    scratch.losses[row] = counts == 0 ? 0 : counts * (logf(sum) + highest - own);
    scratch.correct[row] = is_correct ? counts : 0;
    __threadfence();
    earlier = atomicInc(scratch.arrived, gridDim.x - 1);  // the last one makes it zero again
  }
  if (__shfl_sync(0xffffffffu, earlier, 0) != gridDim.x - 1) return;
  __threadfence();
  double loss = 0;
  double correct = 0;
  for (int i = lane; i < rows; i += 32) {
    loss += static_cast<double>(__ldcg(&scratch.losses[i]));  // written by other multiprocessors
    correct += static_cast<double>(__ldcg(&scratch.correct[i]));
  }
  loss = warp_sum(loss);
  correct = warp_sum(correct);
  if (lane == 0) {
    *score = {loss, correct, static_cast<double>(all_weights)};
    if (mean_loss != nullptr) {
      *mean_loss = all_weights == 0 ? 0 : loss / static_cast<double>(all_weights);
    }
  }
}

inline constexpr int tile_columns = 32;  // of the hidden layer, for a block
inline constexpr int row_groups = 8;     // of warps, which share a block's rows

/// From the outputs' errors: the last layer's gradients, and the errors of the hidden layer below
/// (gated by its ReLU) with its bias's gradient, unless that is null, all of which read the same
/// numbers.
template <class T, std::size_t Hidden, std::size_t Classes>
LOCKSTEP_KERNEL __launch_bounds__(32 * row_groups)
    backward_columns(const float* output_errors, const T* hidden, const T* weight, int rows,
                     T* weight_gradient, T* bias_gradient, T* hidden_errors,
                     T* hidden_bias_gradient) {
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const int column = static_cast<int>(blockIdx.x) * tile_columns + x;
  const bool inside = column < Hidden;
  __shared__ float parts[row_groups][Classes + 1][tile_columns];
  float weights[Classes];
  float sums[Classes + 1] = {};  // the weights' gradients, then the bias's
  for (int c = 0; c < Classes; ++c) {
    weights[c] = inside ? static_cast<float>(weight[c * Hidden + column]) : 0;
  }
  for (int row = y; row < rows; row += row_groups) {
    const std::size_t place = static_cast<std::size_t>(row) * Hidden + column;
    const float value = inside ? static_cast<float>(hidden[place]) : 0;
    float error = 0;
    for (int c = 0; c < Classes; ++c) {
      const float above = output_errors[static_cast<std::size_t>(row) * Classes + c];
      error += above * weights[c];
      sums[c] += above * value;
    }
    if (value <= 0) error = 0;
    sums[Classes] += error;
    if (inside) hidden_errors[place] = static_cast<T>(error);
  }
  for (int c = 0; c <= Classes; ++c) parts[y][c][x] = sums[c];
  __syncthreads();
  const int wanted = hidden_bias_gradient == nullptr ? Classes : Classes + 1;
  for (int c = y; inside && c < wanted; c += row_groups) {
    float sum = 0;
    for (int group = 0; group < row_groups; ++group) sum += parts[group][c][x];
    (c < Classes ? weight_gradient[c * Hidden + column] : hidden_bias_gradient[column]) =
        static_cast<T>(sum);
  }
  if (blockIdx.x != 0) return;
  for (int c = y; c < Classes; c += row_groups) {
    float sum = 0;
    for (int row = x; row < rows; row += 32) {
      sum += output_errors[static_cast<std::size_t>(row) * Classes + c];
    }
    sum = warp_sum(sum);
    if (x == 0) bias_gradient[c] = static_cast<T>(sum);
  }
}

/// The last layer for batches of one size. Everything is enqueued on the stream that is given.
template <class T, std::size_t Hidden, std::size_t Classes>
class Head {
 public:
  static_assert(Classes <= 32, "lockstep: a warp holds a row of outputs, so there are at most 32");

  explicit Head(std::size_t rows)
      : rows_(rows), errors_(rows * Classes), losses_(rows), correct_(rows) {}

  /// Null `weights`: all rows count the same. `scale`, unless null, multiplies the gradient alone.
  void forward(cudaStream_t stream, const T* hidden, const T* weight, const T* bias,
               const std::int32_t* labels, const float* weights, const float* scale,
               double* mean_loss) {
    if (rows_ == 0) return forward_nothing(stream, mean_loss);
    forward_rows<T, Hidden, Classes><<<static_cast<unsigned>(rows_), 32 * Classes, 0, stream>>>(
        hidden, weight, bias, labels, weights, scale, Scratch{errors_, losses_, correct_, arrived_},
        score_, mean_loss);
    lockstep::check_launch("softmax::forward_rows");
  }

  /// For the batch that `forward` has just seen. The hidden layer's bias has no gradient here where
  /// `hidden_bias_gradient` is null.
  void backward(cudaStream_t stream, const T* hidden, const T* weight, T* weight_gradient,
                T* bias_gradient, T* hidden_errors, T* hidden_bias_gradient) {
    constexpr unsigned blocks = (Hidden + tile_columns - 1) / tile_columns;
    backward_columns<T, Hidden, Classes><<<blocks, dim3(tile_columns, row_groups), 0, stream>>>(
        errors_, hidden, weight, static_cast<int>(rows_), weight_gradient, bias_gradient,
        hidden_errors, hidden_bias_gradient);
    lockstep::check_launch("softmax::backward_columns");
  }

  /// **Host** waits for the sums of the batch that `forward` has just seen.
  Score score(auto& step) {
    Score result;
    lockstep::check_cuda(
        cudaMemcpyAsync(&result, score_, sizeof result, cudaMemcpyDeviceToHost, step.stream()),
        "cudaMemcpyAsync");
    step.synchronize();
    return result;
  }

 private:
  /// An empty batch has no blocks to launch; its sums and its loss are zero.
  void forward_nothing(cudaStream_t stream, double* mean_loss) {
    const auto clear = [&](void* data, std::size_t bytes) {
      lockstep::check_cuda(cudaMemsetAsync(data, 0, bytes, stream), "cudaMemsetAsync");
    };
    clear(score_, sizeof(Score));
    if (mean_loss != nullptr) clear(mean_loss, sizeof(double));
  }

  std::size_t rows_;
  DeviceArray<float> errors_, losses_, correct_;
  DeviceArray<unsigned> arrived_{1};
  DeviceArray<Score> score_{1};
};

}  // namespace softmax
