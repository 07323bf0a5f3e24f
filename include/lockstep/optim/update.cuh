// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's pass over a contiguous piece of a bucket, on the device: unscale, clip and
/// update in one, every byte read and written once.

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/vector.cuh"
#include "lockstep/optim/anomaly.cuh"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/step_numbers.hpp"
#include "lockstep/optim/update.hpp"

namespace lockstep::detail {

using UpdateShape = PassShape<256, 2>;

/// The arrays of a piece. As a kernel's argument its type depends on element types alone.
template <class Rule, class Master, class Gradient, class Param>
struct UpdateArrays {
  using A = Accumulator<Master>;
  static constexpr std::size_t states = Rule::states;
  static constexpr std::size_t slots = states == 0 ? 1 : states;  // arrays have an element
  static constexpr bool copies = !std::is_same_v<Param, Master>;
  using State = std::conditional_t<states == 0, Master, A>;  // a type that widens no packet
  static constexpr std::size_t packet = packet_size<Master, Gradient, State, Param>;

  Master* master;
  const Gradient* gradients;
  Param* parameters;
  State* state[slots];
};

/// The pass over a piece. Only parameters stay in the cache, for the next forward pass. One that
/// watches looks for gradients that are not finite.
template <class Rule, class Master, class Gradient, class Param, class Shape, bool Watches>
struct UpdateSweep {
  using Arrays = UpdateArrays<Rule, Master, Gradient, Param>;
  using A = typename Arrays::A;
  using State = typename Arrays::State;
  static constexpr std::size_t states = Arrays::states;
  static constexpr std::size_t slots = Arrays::slots;
  static constexpr bool copies = Arrays::copies;
  static constexpr Caching master_use = copies ? Shape::once : Caching::keep;

  const Arrays& arrays;
  ScaledUpdate<Rule, A> numbers;
  bool skip;
  const StepNumbers<Rule>* step;

  template <std::size_t N>
  struct Loaded {
    Packet<Gradient, N> gradient;
    Packet<Master, N> master;
    Packet<State, N> state[slots];
  };

  template <std::size_t N>
  __device__ Loaded<N> load(std::size_t at) const {
    Loaded<N> loaded;
    loaded.gradient = load_packet<Shape::once, N>(arrays.gradients + at);
    loaded.master = load_packet<master_use, N>(arrays.master + at);
#pragma unroll
    for (std::size_t s = 0; s != states; ++s) {
      loaded.state[s] = load_packet<Shape::once, N>(arrays.state[s] + at);
    }
    return loaded;
  }

  template <std::size_t N>
  __device__ void finish(std::size_t at, Loaded<N> loaded) const {
    if (skip) return;
    if constexpr (Watches) look(at, loaded.gradient);
    Packet<Param, N> copy;
#pragma unroll
    for (std::size_t i = 0; i < N; ++i) {
      const auto gradient = static_cast<Accumulator<Gradient>>(loaded.gradient.at[i]);
      auto value = static_cast<A>(loaded.master.at[i]);
      A values[slots] = {};
#pragma unroll
      for (std::size_t s = 0; s != states; ++s) values[s] = static_cast<A>(loaded.state[s].at[i]);
      numbers.update(value, numbers.scale * static_cast<A>(gradient), values);
      loaded.master.at[i] = static_cast<Master>(value);
      if constexpr (copies) copy.at[i] = static_cast<Param>(static_cast<Accumulator<Param>>(value));
#pragma unroll
      for (std::size_t s = 0; s != states; ++s)
        loaded.state[s].at[i] = static_cast<State>(values[s]);
    }
    store_packet<master_use>(arrays.master + at, loaded.master);
    if constexpr (copies) store_packet<Caching::keep>(arrays.parameters + at, copy);
#pragma unroll
    for (std::size_t s = 0; s != states; ++s) {
      store_packet<Shape::once>(arrays.state[s] + at, loaded.state[s]);
    }
  }

  /// Tells of the first gradient of a packet that is not finite.
  template <std::size_t N>
  __device__ void look(std::size_t at, const Packet<Gradient, N>& gradients) const {
    auto blemishes = blemish(Accumulator<Gradient>{0});
#pragma unroll
    for (std::size_t i = 0; i < N; ++i)
      blemishes |= blemish(static_cast<Accumulator<Gradient>>(gradients.at[i]));
    if (blemishes == 0) return;
    for (std::size_t i = 0; i < N; ++i) {
      if (blemish(static_cast<Accumulator<Gradient>>(gradients.at[i])) == 0) continue;
      atomicMin(&step->watch.record->gradient,
                reinterpret_cast<unsigned long long>(arrays.gradients + at + i));
      break;
    }
    tell_anomaly(step->watch, step->step);
  }
};

template <class Shape, std::size_t Count, bool Watches, class Rule, class Master, class Gradient,
          class Param>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    update(const StepNumbers<Rule>* numbers, UpdateArrays<Rule, Master, Gradient, Param> arrays,
           Size<Count> count) {
  bool skip = numbers->skip;
  if constexpr (Watches) {
    // After a bad step nothing changes any more, until the host knows.
    const std::uint64_t bad = numbers->watch.record->step;
    skip = skip || (bad != 0 && bad != numbers->step);
    if (blockIdx.x == 0 && threadIdx.x == 0 && !skip && !is_finite(*numbers->watch.loss)) {
      numbers->watch.record->loss = true;
      tell_anomaly(numbers->watch, numbers->step);
    }
  }
  const UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{
      arrays, numbers->template in<Accumulator<Master>>(), skip, numbers};
  sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count.value());
}

/// Updates `count` elements as `numbers` says: reads gradients, reads and writes `master` and
/// `states`. If Param is another type, the new masters are also written to `parameters` in that
/// type; otherwise `parameters` is not used. A `Count` that the compiler knows becomes part of the
/// kernel. With `Watches` it looks for anomalies, as the numbers say. **Stream** in its order.
/// **Host** does not block.
template <class Rule, class Master, class Gradient, class Param = Master,
          std::size_t Count = dynamic, bool Watches = false, class Shape = UpdateShape>
void launch_update(cudaStream_t stream, const StepNumbers<Rule>* numbers, Master* master,
                   const Gradient* gradients, const StatesOf<Rule, Master>& states,
                   std::type_identity_t<Param>* parameters, std::size_t count = Count) {
  using Arrays = UpdateArrays<Rule, Master, Gradient, Param>;
  if (count == 0) return;
  Arrays arrays{master, gradients, parameters, {}};
  require_alignment("update", {master, gradients});
  if constexpr (Arrays::copies) require_alignment("update", {parameters});
  if constexpr (Rule::states != 0) {
    for (std::size_t s = 0; s != Rule::states; ++s) {
      require_alignment("update", {states[s]});
      arrays.state[s] = states[s];
    }
  }
  const auto blocks = static_cast<unsigned>(tiles_of<Shape, Arrays::packet>(count));
  update<Shape, Count, Watches>
      <<<blocks, Shape::threads, 0, stream>>>(numbers, arrays, make_size<Count>(count));
  check_launch("update");
}

}  // namespace lockstep::detail
