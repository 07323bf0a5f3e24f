// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's pass in which every parameter has its own count of updates, and is left out
/// where the step does not use it. Flags and counts lie in device memory: a graph may hold all of
/// it.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/vector.cuh"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/parameter_pieces.cuh"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update.cuh"
#include "lockstep/optim/update_by_kind.cuh"
#include "lockstep/optim/used_gradients.cuh"

namespace lockstep::detail {

/// The tables of a job's parameters, in device memory. All but `order` go by parameter.
struct CountedParameters {
  const std::uint32_t* order;  // parameters, bucket after bucket
  const std::uint16_t* groups;
  std::uint8_t* used;      // by this step
  std::uint64_t* updates;  // how many each has had
};

/// Counts the updates of parameters that the step uses, computes their numbers, and forgets the
/// step's use. Others are skipped, and all are where the step is.
template <class Rule>
LOCKSTEP_KERNEL number_parameters(const StepInputs<Rule>* inputs, const StepNumbers<Rule>* step,
                                  CountedParameters parameters, std::size_t first,
                                  std::size_t count, StepNumbers<Rule>* numbers) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const std::size_t p = parameters.order[first + i];
  StepNumbers<Rule> own{};
  own.skip = step->skip || parameters.used[p] == 0;
  if (!own.skip) {
    const StepInputs<Rule>& input = inputs[parameters.groups[p]];
    own =
        step_numbers<Rule>(input.options, input.lr, ++parameters.updates[p], step->in_double.scale);
    own.step = step->step;
    own.watch = step->watch;
  }
  parameters.used[p] = 0;
  numbers[p] = own;
}

/// The pass over a tile whose elements are in several parameters. Parameters begin at multiples of
/// 256 bytes, so that no packet has elements of two.
template <class Rule, class Master, class Gradient, class Param, class Shape, bool Watches>
struct CountedSweep {
  using Sweep = UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches>;

  const UpdateArrays<Rule, Master, Gradient, Param>& arrays;
  const StepNumbers<Rule>* numbers;  // by parameter
  const ParameterPieces& where;

  template <std::size_t N>
  __device__ auto load(std::size_t at) const {
    return Sweep{arrays, {}, true, nullptr}.template load<N>(at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const typename Sweep::template Loaded<N>& loaded) const {
    const StepNumbers<Rule>& own = numbers[where.at(at)->group];
    if (own.skip) return;
    const Sweep sweep{arrays, own.template in<Accumulator<Master>>(), false, &own};
    sweep.template finish<N>(at, loaded);
  }
};

template <class Shape, bool Watches, class Rule, class Master, class Gradient, class Param>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    update_counted(const StepNumbers<Rule>* step, const StepNumbers<Rule>* numbers,
                   ParameterPieces where, UpdateArrays<Rule, Master, Gradient, Param> arrays,
                   std::size_t count) {
  if (is_skipped<Watches>(step)) return;
  constexpr std::size_t tile = Shape::tile * arrays.packet;
  const std::size_t first = blockIdx.x * tile;
  const std::size_t last = (first + tile < count ? first + tile : count) - 1;
  const GroupPiece* const piece = where.at(first);
  if (where.holds(piece, last)) {
    const StepNumbers<Rule>& own = numbers[piece->group];
    if (own.skip) return;  // and nothing of it is read
    const UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{
        arrays, own.template in<Accumulator<Master>>(), false, &own};
    sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count);
  } else {
    const CountedSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{arrays, numbers, where};
    sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count);
  }
}

// As in update_by_kind.cuh, these functions see nothing of a job's type.

/// Stores numbers of which nothing is updated. **Host** blocks.
template <class R>
void store_nothing(Optimizer<R>, std::byte* to) {
  StepNumbers<R> nothing{};
  nothing.skip = true;
  copy_now(to, &nothing, sizeof nothing);
}

/// Computes the numbers of the parameters from place `first` of the order on, from those of the
/// step. **Stream** in its order. **Host** does not block.
template <class R>
void number_counted(Optimizer<R>, cudaStream_t stream, const std::byte* inputs,
                    const std::byte* step, const CountedParameters& parameters, std::size_t first,
                    std::size_t count, std::byte* numbers) {
  constexpr unsigned threads = 64;
  if (count == 0) return;
  launch_kernel<number_parameters<R>>("numbers of parameters", stream,
                                      static_cast<unsigned>((count + threads - 1) / threads),
                                      threads, reinterpret_cast<const StepInputs<R>*>(inputs),
                                      reinterpret_cast<const StepNumbers<R>*>(step), parameters,
                                      first, count, reinterpret_cast<StepNumbers<R>*>(numbers));
}

/// Updates every element as the numbers of its parameter say, in one launch. **Stream** in its
/// order. **Host** does not block.
template <ElementKind Master, ElementKind Gradient, ElementKind Param, bool Watches, class R>
void update_counted_by_kind(Optimizer<R>, cudaStream_t stream, const std::byte* step,
                            const std::byte* numbers, const ParameterPieces& where,
                            std::byte* master, std::byte* gradients, std::byte* const* states,
                            std::byte* parameters, std::size_t count) {
  using M = ElementOf<Master>;
  using G = ElementOf<Gradient>;
  using P = ElementOf<Param>;
  using Arrays = UpdateArrays<R, M, G, P>;
  if (count == 0) return;
  const Arrays arrays =
      update_arrays<R, M, G, P>(as<Master>(master), as<Gradient>(gradients),
                                states_as<R, Master>(states), as<Param>(parameters));
  const auto blocks = static_cast<unsigned>(tiles_of<UpdateShape, Arrays::packet>(count));
  launch_kernel<update_counted<UpdateShape, Watches, R, M, G, P>>(
      "update of parameters", stream, blocks, UpdateShape::threads,
      reinterpret_cast<const StepNumbers<R>*>(step),
      reinterpret_cast<const StepNumbers<R>*>(numbers), where, arrays, count);
}

/// Which parameters have a gradient other than zero; see `launch_find_used`.
template <ElementKind Kind>
void find_used_by_kind(cudaStream_t stream, std::byte* values, const ParameterPieces& where,
                       std::uint8_t* used, double* partials, std::size_t count) {
  launch_find_used<ElementOf<Kind>>(stream, as<Kind>(values), where, used, partials, count);
}

}  // namespace lockstep::detail
