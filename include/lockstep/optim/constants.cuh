// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The constants of a step in device memory: stored by the host, or computed by kernels from
/// the norm of the gradients and from each parameter's count of updates. A graph may hold all of
/// it.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <span>

#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/optim/anomaly.cuh"
#include "lockstep/optim/constants.hpp"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/optimizer.hpp"

namespace lockstep::detail {

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

/// What the rows of a table depend on beside the step, in device memory.
struct TableRows {
  const std::uint16_t* groups;       // by row
  std::uint8_t* used = nullptr;      // by this step; null where a step uses all rows
  std::uint64_t* updates = nullptr;  // that each row has had; null where all have had the step's
};

/// Computes the numbers of the rows from `first` on from those of the step, counts their updates,
/// and forgets the step's use. Rows that the step does not use are skipped, and all are where the
/// step is.
template <class Rule>
LOCKSTEP_KERNEL number_rows(const StepInputs<Rule>* inputs, const StepNumbers<Rule>* step,
                            TableRows rows, std::size_t first, std::size_t count,
                            StepNumbers<Rule>* numbers) {
  const std::size_t row = first + blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= count) return;
  StepNumbers<Rule> own{};
  own.skip = step->skip || (rows.used != nullptr && rows.used[row] == 0);
  if (!own.skip) {
    const StepInputs<Rule>& input = inputs[rows.groups[row]];
    const std::uint64_t update = rows.updates == nullptr ? step->step : ++rows.updates[row];
    own = step_numbers<Rule>(input.options, input.lr, update, step->in_double.scale);
    own.step = step->step;
    own.watch = step->watch;
  }
  if (rows.used != nullptr) rows.used[row] = 0;
  numbers[row] = own;
}

/// Flags of the host on their way to the device, as a kernel's argument.
struct FlagBits {
  static constexpr std::size_t most = 2048;
  std::uint32_t words[most / 32];
};

template <class Flag>
LOCKSTEP_KERNEL spread_flags(FlagBits bits, Flag* to, std::size_t count) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<Flag>(bits.words[i / 32] >> (i % 32) & 1U);
}

/// Stores flags, each zero or one. They are part of the launch, so that a captured step keeps those
/// with which it was captured. **Stream** in its order. **Host** does not block.
inline void launch_store_flags(cudaStream_t stream, std::uint8_t* to,
                               std::span<const std::uint8_t> flags) {
  constexpr unsigned threads = 256;
  for (std::size_t first = 0; first < flags.size(); first += FlagBits::most) {
    const std::size_t count = std::min(flags.size() - first, FlagBits::most);
    FlagBits bits{};
    for (std::size_t i = 0; i != count; ++i)
      bits.words[i / 32] |= std::uint32_t{flags[first + i] != 0} << (i % 32);
    launch_kernel<spread_flags<std::uint8_t>>(
        "flags", stream, static_cast<unsigned>((count + threads - 1) / threads), threads, bits,
        to + first, count);
  }
}

// As in update.cuh, these functions see nothing of a job's type.

template <class R>
constexpr std::size_t size_of_numbers(Optimizer<R>) {
  return sizeof(StepNumbers<R>);
}
template <class R>
constexpr std::size_t size_of_inputs(Optimizer<R>) {
  return sizeof(StepInputs<R>);
}

template <class R>
void store_inputs(Optimizer<R>, cudaStream_t stream, std::byte* to,
                  const typename R::Options& options, double lr, double scale,
                  const AnomalyWatch& watch) {
  launch_store(stream, reinterpret_cast<StepInputs<R>*>(to), {options, lr, scale, watch});
}

template <class R>
void store_numbers(Optimizer<R>, cudaStream_t stream, std::byte* to,
                   const typename R::Options& options, double lr, std::uint64_t step, double scale,
                   const AnomalyWatch& watch) {
  auto numbers = step_numbers<R>(options, lr, step, scale);
  numbers.watch = watch;
  launch_store(stream, reinterpret_cast<StepNumbers<R>*>(to), numbers);
}

template <class R>
void decide_numbers(Optimizer<R>, cudaStream_t stream, const std::byte* inputs,
                    const double* partials, std::size_t count, const StepLimits& limits,
                    StepState* state, std::byte* numbers) {
  launch_decide<R>(stream, reinterpret_cast<const StepInputs<R>*>(inputs), partials, count, limits,
                   state, reinterpret_cast<StepNumbers<R>*>(numbers));
}

template <class R>
void number_table_rows(Optimizer<R>, cudaStream_t stream, const std::byte* inputs,
                       const std::byte* step, const TableRows& rows, std::size_t first,
                       std::size_t count, std::byte* numbers) {
  constexpr unsigned threads = 64;
  if (first >= count) return;
  const auto blocks = static_cast<unsigned>((count - first + threads - 1) / threads);
  launch_kernel<number_rows<R>>("numbers of rows", stream, blocks, threads,
                                reinterpret_cast<const StepInputs<R>*>(inputs),
                                reinterpret_cast<const StepNumbers<R>*>(step), rows, first, count,
                                reinterpret_cast<StepNumbers<R>*>(numbers));
}

}  // namespace lockstep::detail
