// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's pass over a contiguous piece of a bucket, on the device: unscale, clip and
/// update in one, every byte read and written once.

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/group_pieces.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/device/cuda/launch.cuh"
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
    // What is not finite changes nothing: other ranks may use the parameters before the host of
    // this one knows.
    if constexpr (Watches) {
      if (look(at, loaded.gradient)) return;
    }
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

  /// Tells of the first gradient of a packet that is not finite. Returns whether there is one.
  template <std::size_t N>
  __device__ bool look(std::size_t at, const Packet<Gradient, N>& gradients) const {
    auto blemishes = blemish(Accumulator<Gradient>{0});
#pragma unroll
    for (std::size_t i = 0; i < N; ++i)
      blemishes |= blemish(static_cast<Accumulator<Gradient>>(gradients.at[i]));
    if (blemishes == 0) return false;
    for (std::size_t i = 0; i < N; ++i) {
      if (blemish(static_cast<Accumulator<Gradient>>(gradients.at[i])) == 0) continue;
      atomicMin(&step->watch.record->gradient,
                reinterpret_cast<unsigned long long>(arrays.gradients + at + i));
      break;
    }
    tell_anomaly(step->watch, step->step);
    return true;
  }
};

/// Is the step to change nothing? One thread of the kernel looks at the loss.
template <bool Watches, class Rule>
__device__ bool is_skipped(const StepNumbers<Rule>* numbers) {
  bool skip = numbers->skip;
  if constexpr (Watches) {
    if (skip) return true;
    // After a bad step nothing changes any more, until the host knows.
    const std::uint64_t bad = numbers->watch.record->step;
    skip = bad != 0 && bad != numbers->step;
    if (blockIdx.x == 0 && threadIdx.x == 0 && !skip && !is_finite(*numbers->watch.loss)) {
      numbers->watch.record->loss = true;
      tell_anomaly(numbers->watch, numbers->step);
    }
  }
  return skip;
}

template <class Shape, std::size_t Count, bool Watches, class Rule, class Master, class Gradient,
          class Param>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    update(const StepNumbers<Rule>* numbers, UpdateArrays<Rule, Master, Gradient, Param> arrays,
           Size<Count> count) {
  const bool skip = is_skipped<Watches>(numbers);
  const UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{
      arrays, numbers->template in<Accumulator<Master>>(), skip, numbers};
  sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count.value());
}

/// The piece that holds the byte at `offset`; the host's twin is `GroupTable::at`.
__device__ inline const GroupPiece* group_piece(const GroupPiece* piece, std::size_t count,
                                                std::size_t offset) {
  while (count != 0) {
    const std::size_t half = count / 2;
    if (piece[half].end <= offset) {
      piece += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return piece;
}

/// The pieces of an arena by group, in device memory.
struct GroupPieces {
  const GroupPiece* pieces;
  std::size_t count;
  std::size_t offset;  // bytes from the arena's start to the arrays

  template <class Param>
  __device__ const GroupPiece* at(std::size_t element) const {
    return group_piece(pieces, count, offset + element * sizeof(Param));
  }
};

/// The pass over a tile whose elements are in several groups. Pieces begin at multiples of 256
/// bytes, so that no packet has elements of two.
template <class Rule, class Master, class Gradient, class Param, class Shape, bool Watches>
struct GroupedSweep {
  using Sweep = UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches>;

  const UpdateArrays<Rule, Master, Gradient, Param>& arrays;
  const StepNumbers<Rule>* numbers;  // by group
  const GroupPieces& groups;
  bool skip;

  template <std::size_t N>
  __device__ auto load(std::size_t at) const {
    return Sweep{arrays, {}, true, nullptr}.template load<N>(at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const typename Sweep::template Loaded<N>& loaded) const {
    const StepNumbers<Rule>& own = numbers[groups.template at<Param>(at)->group];
    const Sweep sweep{arrays, own.template in<Accumulator<Master>>(), skip, &own};
    sweep.template finish<N>(at, loaded);
  }
};

template <class Shape, std::size_t Count, bool Watches, class Rule, class Master, class Gradient,
          class Param>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    update_groups(const StepNumbers<Rule>* numbers, GroupPieces groups,
                  UpdateArrays<Rule, Master, Gradient, Param> arrays, Size<Count> count) {
  constexpr std::size_t tile = Shape::tile * arrays.packet;
  const std::size_t first = blockIdx.x * tile;
  const std::size_t last = (first + tile < count.value() ? first + tile : count.value()) - 1;
  const GroupPiece* const piece = groups.at<Param>(first);
  const bool skip = is_skipped<Watches>(numbers);  // all groups or none
  if (piece->end > groups.offset + last * sizeof(Param)) {
    const StepNumbers<Rule>& own = numbers[piece->group];
    const UpdateSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{
        arrays, own.template in<Accumulator<Master>>(), skip, &own};
    sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count.value());
  } else {
    const GroupedSweep<Rule, Master, Gradient, Param, Shape, Watches> sweep{arrays, numbers, groups,
                                                                            skip};
    sweep_tile<Shape, arrays.packet>(sweep, blockIdx.x, count.value());
  }
}

/// The arrays as a kernel's argument. Throws if one begins inside of a packet.
template <class Rule, class Master, class Gradient, class Param>
UpdateArrays<Rule, Master, Gradient, Param> update_arrays(Master* master, const Gradient* gradients,
                                                          const StatesOf<Rule, Master>& states,
                                                          Param* parameters) {
  using Arrays = UpdateArrays<Rule, Master, Gradient, Param>;
  Arrays arrays{master, gradients, parameters, {}};
  require_alignment("update", {master, gradients});
  if constexpr (Arrays::copies) require_alignment("update", {parameters});
  if constexpr (Rule::states != 0) {
    for (std::size_t s = 0; s != Rule::states; ++s) {
      require_alignment("update", {states[s]});
      arrays.state[s] = states[s];
    }
  }
  return arrays;
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
  const Arrays arrays =
      update_arrays<Rule, Master, Gradient, Param>(master, gradients, states, parameters);
  const auto blocks = static_cast<unsigned>(tiles_of<Shape, Arrays::packet>(count));
  launch_kernel<update<Shape, Count, Watches, Rule, Master, Gradient, Param>>(
      "update", stream, blocks, Shape::threads, numbers, arrays, make_size<Count>(count));
}

/// Updates every element as the numbers of its group say, which lie one behind the other, in one
/// launch. **Stream** in its order. **Host** does not block.
template <class Rule, class Master, class Gradient, class Param = Master,
          std::size_t Count = dynamic, bool Watches = false, class Shape = UpdateShape>
void launch_group_update(cudaStream_t stream, const StepNumbers<Rule>* numbers,
                         const GroupPieces& groups, Master* master, const Gradient* gradients,
                         const StatesOf<Rule, Master>& states,
                         std::type_identity_t<Param>* parameters, std::size_t count = Count) {
  using Arrays = UpdateArrays<Rule, Master, Gradient, Param>;
  if (count == 0) return;
  const Arrays arrays =
      update_arrays<Rule, Master, Gradient, Param>(master, gradients, states, parameters);
  const auto blocks = static_cast<unsigned>(tiles_of<Shape, Arrays::packet>(count));
  launch_kernel<update_groups<Shape, Count, Watches, Rule, Master, Gradient, Param>>(
      "update of groups", stream, blocks, Shape::threads, numbers, groups, arrays,
      make_size<Count>(count));
}

}  // namespace lockstep::detail
