// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's kernels, launched from addresses and element kinds.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/optim/norm.cuh"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update.cuh"

namespace lockstep {

// nvcc writes a type into a kernel's host stub the way it was reached, and cannot write the names
// and numbers that policies have for arguments. So these functions see addresses, element kinds and
// a deduced rule, and nothing of a job's type.
namespace detail {

template <ElementKind Kind>
auto* as(std::byte* data) {
  return reinterpret_cast<ElementOf<Kind>*>(data);
}

template <class R, ElementKind Master>
StatesOf<R, ElementOf<Master>> states_as(std::byte* const* states) {
  StatesOf<R, ElementOf<Master>> typed;
  for (std::size_t k = 0; k != R::states; ++k)
    typed[k] = reinterpret_cast<Accumulator<ElementOf<Master>>*>(states[k]);
  return typed;
}

template <ElementKind Master, ElementKind Gradient, ElementKind Param, std::size_t Count,
          bool Watches, class R>
void update_by_kind(Optimizer<R>, cudaStream_t stream, const std::byte* numbers, std::byte* master,
                    std::byte* gradients, std::byte* const* states, std::byte* parameters,
                    std::size_t count) {
  launch_update<R, ElementOf<Master>, ElementOf<Gradient>, ElementOf<Param>, Count, Watches>(
      stream, reinterpret_cast<const StepNumbers<R>*>(numbers), as<Master>(master),
      as<Gradient>(gradients), states_as<R, Master>(states), as<Param>(parameters), count);
}

template <ElementKind Master, ElementKind Gradient, ElementKind Param, std::size_t Count,
          bool Watches, class R>
void update_groups_by_kind(Optimizer<R>, cudaStream_t stream, const std::byte* numbers,
                           const GroupPieces& groups, std::byte* master, std::byte* gradients,
                           std::byte* const* states, std::byte* parameters, std::size_t count) {
  launch_group_update<R, ElementOf<Master>, ElementOf<Gradient>, ElementOf<Param>, Count, Watches>(
      stream, reinterpret_cast<const StepNumbers<R>*>(numbers), groups, as<Master>(master),
      as<Gradient>(gradients), states_as<R, Master>(states), as<Param>(parameters), count);
}

template <ElementKind Kind, std::size_t Count>
void squares_by_kind(cudaStream_t stream, std::byte* values, double* partials, std::size_t count) {
  launch_squares<ElementOf<Kind>, Count>(stream, as<Kind>(values), partials, count);
}

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

/// Computes the numbers of groups 1 and on from those of group 0, which have been decided.
template <class Rule>
LOCKSTEP_KERNEL number_groups(const StepInputs<Rule>* inputs, const StepState* state,
                              StepNumbers<Rule>* numbers, std::size_t groups) {
  const std::size_t group = threadIdx.x + 1;
  if (group >= groups) return;
  StepNumbers<Rule> own{};
  if (!numbers->skip) {
    own = step_numbers<Rule>(inputs[group].options, inputs[group].lr, state->updates,
                             numbers->in_double.scale);
    own.watch = numbers->watch;
  }
  own.skip = numbers->skip;
  numbers[group] = own;
}

template <class R>
void decide_group_numbers(Optimizer<R>, cudaStream_t stream, const std::byte* inputs,
                          const StepState* state, std::byte* numbers, std::size_t groups) {
  launch_kernel<number_groups<R>>("numbers of groups", stream, 1, static_cast<unsigned>(groups),
                                  reinterpret_cast<const StepInputs<R>*>(inputs), state,
                                  reinterpret_cast<StepNumbers<R>*>(numbers), groups);
}

}  // namespace detail

}  // namespace lockstep
