// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The optimizer's pass on a GPU: unscale, clip and update in one kernel.

#include "lockstep/detail/device/cuda/vector.cuh"
#include "lockstep/detail/optim/constants.hpp"
#include "lockstep/detail/optim/optimizer.hpp"

namespace lockstep::detail {

using UpdateShape = PassShape<256, 2>;

/// Records an anomaly and sets the host's flag. Concurrent threads write the same values.
__device__ inline void report_anomaly(const AnomalyWatch& watch, std::uint64_t step) {
  watch.record->step = step;
  *watch.seen = 1;
}

/// The arrays of a piece. As a kernel argument, the type depends on element types alone.
template <class Rule, class Master, class Gradient, class Param>
struct UpdateArrays {
  using A = Accumulator<Master>;
  static constexpr std::size_t states = Rule::states;
  static constexpr std::size_t slots = states == 0 ? 1 : states;  // at least one element
  static constexpr bool copies = !std::is_same_v<Param, Master>;
  using State = std::conditional_t<states == 0, Master, A>;  // a type that widens no packet
  static constexpr std::size_t packet = packet_size<Master, Gradient, State, Param>;

  Master* master;
  const Gradient* gradients;
  Param* parameters;
  State* state[slots];
  std::size_t offset;  // of the piece, in bytes from the start of the parameter arena
};

/// Only parameters stay in the cache, for the next forward. `Watches`: looks for NaN and infinity.
template <class Rule, class Master, class Gradient, class Param, class Shape, bool Watches>
struct UpdatePass {
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
    // Nothing is updated: other ranks may read the parameters before this rank's host knows.
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

  /// Records the first gradient of a packet that is not finite. Returns whether there is one.
  template <std::size_t N>
  __device__ bool look(std::size_t at, const Packet<Gradient, N>& gradients) const {
    auto non_finites = non_finite(Accumulator<Gradient>{0});
#pragma unroll
    for (std::size_t i = 0; i < N; ++i)
      non_finites |= non_finite(static_cast<Accumulator<Gradient>>(gradients.at[i]));
    if (non_finites == 0) return false;
    for (std::size_t i = 0; i < N; ++i) {
      if (non_finite(static_cast<Accumulator<Gradient>>(gradients.at[i])) == 0) continue;
      atomicMin(&step->watch.record->gradient,
                static_cast<unsigned long long>(arrays.offset + (at + i) * sizeof(Param)));
      break;
    }
    report_anomaly(step->watch, step->step);
    return true;
  }
};

/// Does the step change nothing? One thread of the kernel checks the loss.
template <bool Watches, class Rule>
__device__ bool is_skipped(const StepNumbers<Rule>* numbers) {
  bool skip = numbers->skip;
  if constexpr (Watches) {
    if (skip) return true;
    // After a bad step nothing changes until the host knows.
    const std::uint64_t bad = numbers->watch.record->step;
    skip = bad != 0 && bad != numbers->step;
    if (blockIdx.x == 0 && threadIdx.x == 0 && !skip && !is_finite(*numbers->watch.loss)) {
      numbers->watch.record->loss = true;
      report_anomaly(numbers->watch, numbers->step);
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
  const UpdatePass<Rule, Master, Gradient, Param, Shape, Watches> pass{
      arrays, numbers->template in<Accumulator<Master>>(), skip, numbers};
  pass_over_tile<Shape, arrays.packet>(pass, blockIdx.x, count.value());
}

/// The pieces of a table of constants, addressed by elements of a kernel's arrays.
struct TablePieces {
  const TablePiece* pieces;
  std::size_t count;
  std::size_t offset;   // bytes from the arena's start to the arrays
  std::size_t element;  // bytes per element in the arena

  __device__ const TablePiece* at(std::size_t index) const {
    return table_piece_at(pieces, count, offset + index * element);
  }
  /// Does a piece that holds an earlier element hold this one too?
  __device__ bool holds(const TablePiece* piece, std::size_t index) const {
    return piece->end > offset + index * element;
  }
};

/// The pass over a tile of several rows. No packet spans two: pieces are aligned to 256 bytes.
template <class Rule, class Master, class Gradient, class Param, class Shape, bool Watches>
struct TablePass {
  using Pass = UpdatePass<Rule, Master, Gradient, Param, Shape, Watches>;

  const UpdateArrays<Rule, Master, Gradient, Param>& arrays;
  const StepNumbers<Rule>* rows;
  const TablePieces& where;

  template <std::size_t N>
  __device__ auto load(std::size_t at) const {
    return Pass{arrays, {}, true, nullptr}.template load<N>(at);
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const typename Pass::template Loaded<N>& loaded) const {
    const StepNumbers<Rule>& own = rows[where.at(at)->row];
    if (own.skip) return;
    const Pass pass{arrays, own.template in<Accumulator<Master>>(), false, &own};
    pass.template finish<N>(at, loaded);
  }
};

template <class Shape, bool Watches, class Rule, class Master, class Gradient, class Param>
LOCKSTEP_KERNEL __launch_bounds__(Shape::threads)
    update_by_table(const StepNumbers<Rule>* step, const StepNumbers<Rule>* rows, TablePieces where,
                    UpdateArrays<Rule, Master, Gradient, Param> arrays, std::size_t count) {
  if (is_skipped<Watches>(step)) return;
  constexpr std::size_t tile = Shape::tile * arrays.packet;
  const std::size_t first = blockIdx.x * tile;
  const std::size_t last = (first + tile < count ? first + tile : count) - 1;
  const TablePiece* const piece = where.at(first);
  if (where.holds(piece, last)) {
    const StepNumbers<Rule>& own = rows[piece->row];
    if (own.skip) return;  // without reading the arrays
    const UpdatePass<Rule, Master, Gradient, Param, Shape, Watches> pass{
        arrays, own.template in<Accumulator<Master>>(), false, &own};
    pass_over_tile<Shape, arrays.packet>(pass, blockIdx.x, count);
  } else {
    const TablePass<Rule, Master, Gradient, Param, Shape, Watches> pass{arrays, rows, where};
    pass_over_tile<Shape, arrays.packet>(pass, blockIdx.x, count);
  }
}

/// The arrays as a kernel argument. Throws if an array is not aligned.
template <class Rule, class Master, class Gradient, class Param>
auto update_arrays(Master* master, const Gradient* gradients, const StatesOf<Rule, Master>& states,
                   Param* parameters, std::size_t offset) {
  UpdateArrays<Rule, Master, Gradient, Param> arrays{master, gradients, parameters, {}, offset};
  require_alignment("update", {master, gradients});
  if constexpr (arrays.copies) require_alignment("update", {parameters});
  if constexpr (Rule::states != 0) {
    for (std::size_t s = 0; s != Rule::states; ++s) {
      require_alignment("update", {states[s]});
      arrays.state[s] = states[s];
    }
  }
  return arrays;
}

/// Updates `count` elements with the constants in `numbers`: reads gradients, reads and writes
/// `master` and `states`; if Param is not Master, also casts the new masters to `parameters`. A
/// static `Count` is compiled into the kernel. `Watches` records anomalies; the piece is at byte
/// `offset` of the arena. **Stream** in its order. **Host** does not block.
template <class Rule, class Master, class Gradient, class Param = Master,
          std::size_t Count = dynamic, bool Watches = false, class Shape = UpdateShape>
void launch_update(cudaStream_t stream, const StepNumbers<Rule>* numbers, Master* master,
                   const Gradient* gradients, const StatesOf<Rule, Master>& states,
                   std::type_identity_t<Param>* parameters, std::size_t count = Count,
                   std::size_t offset = 0) {
  if (count == 0) return;
  const auto arrays =
      update_arrays<Rule, Master, Gradient, Param>(master, gradients, states, parameters, offset);
  const auto blocks = static_cast<unsigned>(tiles_of<Shape, arrays.packet>(count));
  launch_kernel<update<Shape, Count, Watches, Rule, Master, Gradient, Param>>(
      "update", stream, blocks, Shape::threads, numbers, arrays, make_size<Count>(count));
}

/// Updates elements with their rows' constants. **Stream** in its order. **Host** does not block.
template <class Rule, class Master, class Gradient, class Param = Master, bool Watches = false>
void launch_update_by_table(cudaStream_t stream, const StepNumbers<Rule>* step,
                            const StepNumbers<Rule>* rows, const TablePieces& where, Master* master,
                            const Gradient* gradients, const StatesOf<Rule, Master>& states,
                            std::type_identity_t<Param>* parameters, std::size_t count) {
  if (count == 0) return;
  const auto arrays = update_arrays<Rule, Master, Gradient, Param>(master, gradients, states,
                                                                   parameters, where.offset);
  const auto blocks = static_cast<unsigned>(tiles_of<UpdateShape, arrays.packet>(count));
  launch_kernel<update_by_table<UpdateShape, Watches, Rule, Master, Gradient, Param>>(
      "update by table", stream, blocks, UpdateShape::threads, step, rows, where, arrays, count);
}

/// Launches either update from addresses and element kinds: nvcc cannot write a policy's names and
/// numbers into a kernel's host stub, so that no job's type may be seen here.
template <ElementKind Master, ElementKind Gradient, ElementKind Param, std::size_t Count,
          bool Watches, bool ByTable, class R>
void update_by_kind(cudaStream_t stream, const StepNumbers<R>* step, const StepNumbers<R>* rows,
                    const TablePieces& where, std::byte* master, std::byte* gradients,
                    std::byte* const* states, std::byte* parameters, std::size_t count) {
  using M = ElementOf<Master>;
  using G = ElementOf<Gradient>;
  using P = ElementOf<Param>;
  StatesOf<R, M> typed;
  for (std::size_t k = 0; k != R::states; ++k)
    typed[k] = reinterpret_cast<Accumulator<M>*>(states[k]);
  if constexpr (ByTable) {
    launch_update_by_table<R, M, G, P, Watches>(
        stream, step, rows, where, reinterpret_cast<M*>(master), reinterpret_cast<G*>(gradients),
        typed, reinterpret_cast<P*>(parameters), count);
  } else {
    launch_update<R, M, G, P, Count, Watches>(
        stream, step, reinterpret_cast<M*>(master), reinterpret_cast<G*>(gradients), typed,
        reinterpret_cast<P*>(parameters), count, where.offset);
  }
}

}  // namespace lockstep::detail
