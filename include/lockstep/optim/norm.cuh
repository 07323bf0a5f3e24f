// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The norm of gradients on the device, the same bits every time, and numbers that need it.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cub/block/block_reduce.cuh>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/vector.cuh"
#include "lockstep/optim/anomaly.cuh"
#include "lockstep/optim/step_numbers.hpp"

namespace lockstep::detail {

using SquaresShape = PassShape<256, 4>;

/// Eight blocks for each of an H200's 132 multiprocessors. A constant, so that sums are the same on
/// every GPU.
inline constexpr std::size_t most_norm_blocks = 1056;

/// Packets are summed in the elements' arithmetic and added up in double, as in clip.hpp.
template <class T>
struct SquaresPass {
  const T* values;
  double sum = 0;

  template <std::size_t N>
  __device__ Packet<T, N> load(std::size_t at) const {
    return load_packet<Caching::keep, N>(values + at);  // the update reads it next
  }
  template <std::size_t N>
  __device__ void finish(std::size_t, const Packet<T, N>& loaded) {
    Accumulator<T> squares = 0;
#pragma unroll
    for (std::size_t i = 0; i < N; ++i) {
      const auto value = static_cast<Accumulator<T>>(loaded.at[i]);
      squares += value * value;
    }
    sum += static_cast<double>(squares);
  }
};

template <class T, std::size_t Count>
LOCKSTEP_KERNEL __launch_bounds__(SquaresShape::threads)
    sum_squares(const T* values, double* partials, Size<Count> count) {
  constexpr std::size_t packet = packet_size<T>;
  const std::size_t tiles = tiles_of<SquaresShape, packet>(count.value());
  SquaresPass<T> pass{values};
  for (std::size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    sweep_tile<SquaresShape, packet>(pass, tile, count.value());
  }
  using Reduce = cub::BlockReduce<double, SquaresShape::threads>;
  __shared__ typename Reduce::TempStorage storage;
  const double sum = Reduce(storage).Sum(pass.sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

inline constexpr unsigned decide_threads = 512;

template <class Rule>
LOCKSTEP_KERNEL __launch_bounds__(decide_threads)
    decide(const StepInputs<Rule>* inputs, const double* partials, std::size_t count,
           StepLimits limits, StepState* state, StepNumbers<Rule>* numbers) {
  double mine = 0;
  for (std::size_t i = threadIdx.x; i < count; i += decide_threads) mine += partials[i];
  using Reduce = cub::BlockReduce<double, decide_threads>;
  __shared__ typename Reduce::TempStorage storage;
  const double squares = Reduce(storage).Sum(mine);
  if (threadIdx.x != 0) return;
  StepState next = *state;
  *numbers = decide_step(*inputs, squares, limits, next);
  if (limits.scales_loss && inputs->watch.record != nullptr &&
      next.loss_scale.scale < smallest_loss_scale) {
    inputs->watch.record->scale = true;
    tell_anomaly(inputs->watch, next.updates + next.skips);
  }
  *state = next;
}

/// sum = the sum of all partials.
template <class T>
LOCKSTEP_KERNEL __launch_bounds__(decide_threads)
    add_partials(const T* partials, std::size_t count, T* sum) {
  T mine = 0;
  for (std::size_t i = threadIdx.x; i < count; i += decide_threads) mine += partials[i];
  using Reduce = cub::BlockReduce<T, decide_threads>;
  __shared__ typename Reduce::TempStorage storage;
  const T all = Reduce(storage).Sum(mine);
  if (threadIdx.x == 0) *sum = all;
}

/// How many partial sums `launch_squares` writes.
template <class T>
constexpr std::size_t square_partials(std::size_t count) {
  return std::min(tiles_of<SquaresShape, packet_size<T>>(count), most_norm_blocks);
}

/// The sum of squares of a bucket, in parts. Launched as the bucket lands, it reads what is still
/// in the L2 cache. **Stream** in its order. **Host** does not block.
template <class T, std::size_t Count = dynamic>
void launch_squares(cudaStream_t stream, const T* values, double* partials,
                    std::size_t count = Count) {
  if (count == 0) return;
  require_alignment("sum of squares", {values});
  const auto blocks = static_cast<unsigned>(square_partials<T>(count));
  launch_kernel<sum_squares<T, Count>>("sum of squares", stream, blocks, SquaresShape::threads,
                                       values, partials, make_size<Count>(count));
}

/// Adds up what `launch_squares` wrote, for ranks that have squares of parts of the gradients.
/// **Stream** in its order. **Host** does not block.
inline void launch_add_partials(cudaStream_t stream, const double* partials, std::size_t count,
                                double* sum) {
  launch_kernel<add_partials<double>>("sum of partials", stream, 1, decide_threads, partials, count,
                                      sum);
}

/// Computes the numbers of this step and the state of the next from all `partials`. All values that
/// change from step to step lie in device memory, so a graph may hold this. **Stream** in its
/// order. **Host** does not block.
template <class Rule>
void launch_decide(cudaStream_t stream, const StepInputs<Rule>* inputs, const double* partials,
                   std::size_t count, const StepLimits& limits, StepState* state,
                   StepNumbers<Rule>* numbers) {
  launch_kernel<decide<Rule>>("step numbers", stream, 1, decide_threads, inputs, partials, count,
                              limits, state, numbers);
}

}  // namespace lockstep::detail
