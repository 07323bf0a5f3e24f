// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The first pass over averaged gradients on a GPU, and a step's constants in its memory.

#include <cub/block/block_reduce.cuh>

#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/optim/update.cuh"

namespace lockstep::detail {

using SquaresShape = PassShape<256, 4>;

/// Eight blocks per SM of an H200. A constant, so that sums are equal on all GPUs.
inline constexpr std::size_t most_norm_blocks = 1056;

/// `Squares`: packets are summed in the elements' arithmetic and accumulated in double, as on the
/// host. `Finds`: marks every parameter with an element other than zero (NaN included).
template <class T, bool Squares, bool Finds>
struct ObservingPass {
  static constexpr std::size_t several = static_cast<std::size_t>(-1);

  const T* values;
  const TablePieces& where;
  std::uint8_t* used;         // by parameter
  std::size_t parameter = 0;  // of the whole tile, or `several`
  double sum = 0;

  template <std::size_t N>
  __device__ Packet<T, N> load(std::size_t at) const {
    return load_packet<Caching::keep, N>(values + at);  // the update reads it next
  }
  template <std::size_t N>
  __device__ void finish(std::size_t at, const Packet<T, N>& loaded) {
    using A = Accumulator<T>;
    if constexpr (Squares) {
      A squares = 0;
#pragma unroll
      for (std::size_t i = 0; i < N; ++i) {
        const auto value = static_cast<A>(loaded.at[i]);
        squares += value * value;
      }
      sum += static_cast<double>(squares);
    }
    if constexpr (Finds) {
      bool any = false;
#pragma unroll
      for (std::size_t i = 0; i < N; ++i) any |= static_cast<A>(loaded.at[i]) != A{0};
      if (!any) return;
      const std::size_t p = parameter == several ? where.at(at)->row : parameter;
      if (__ldcg(used + p) == 0) __stcg(used + p, std::uint8_t{1});
    }
  }
};

/// The first pass over averaged gradients. Blocks write only ones to `used`, so that their order
/// does not matter. Without `Squares`, a tile of a parameter that is already marked is not read.
template <class T, bool Squares, bool Finds, std::size_t Count>
LOCKSTEP_KERNEL __launch_bounds__(SquaresShape::threads)
    observe(const T* values, TablePieces where, std::uint8_t* used, double* partials,
            Size<Count> count) {
  constexpr std::size_t packet = packet_size<T>;
  const std::size_t tiles = tiles_of<SquaresShape, packet>(count.value());
  ObservingPass<T, Squares, Finds> pass{values, where, used};
  for (std::size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if constexpr (Finds) {
      constexpr std::size_t length = SquaresShape::tile * packet;
      const std::size_t first = tile * length;
      const std::size_t last =
          (first + length < count.value() ? first + length : count.value()) - 1;
      const TablePiece* const piece = where.at(first);
      const bool one = where.holds(piece, last);
      if (!Squares && one && __ldcg(used + piece->row) != 0) continue;
      pass.parameter = one ? piece->row : pass.several;
    }
    pass_over_tile<SquaresShape, packet>(pass, tile, count.value());
  }
  if constexpr (Squares) {
    using Reduce = cub::BlockReduce<double, SquaresShape::threads>;
    __shared__ typename Reduce::TempStorage storage;
    const double sum = Reduce(storage).Sum(pass.sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  }
}

inline constexpr unsigned decide_threads = 512;

/// The sum of all partial sums, in the first thread of the only block.
__device__ inline double sum_of_partials(const double* partials, std::size_t count) {
  double mine = 0;
  for (std::size_t i = threadIdx.x; i < count; i += decide_threads) mine += partials[i];
  using Reduce = cub::BlockReduce<double, decide_threads>;
  __shared__ typename Reduce::TempStorage storage;
  return Reduce(storage).Sum(mine);
}

template <class T>
LOCKSTEP_KERNEL __launch_bounds__(decide_threads)
    add_partials(const T* partials, std::size_t count, T* sum) {
  const T all = sum_of_partials(partials, count);
  if (threadIdx.x == 0) *sum = all;
}

template <class T>
constexpr std::size_t square_partials(std::size_t count) {
  return std::min(tiles_of<SquaresShape, packet_size<T>>(count), most_norm_blocks);
}

template <class T, bool Squares, bool Finds, std::size_t Count>
void launch_observe(cudaStream_t stream, const T* values, const TablePieces& where,
                    std::uint8_t* used, double* partials, std::size_t count) {
  if (count == 0) return;
  require_alignment("first pass over gradients", {values});
  const auto blocks = static_cast<unsigned>(square_partials<T>(count));
  launch_kernel<observe<T, Squares, Finds, Count>>("first pass over gradients", stream, blocks,
                                                   SquaresShape::threads, values, where, used,
                                                   partials, make_size<Count>(count));
}

/// The partial sums of squares of a bucket. Launched right after the bucket's reduction, the kernel
/// reads from the L2 cache. **Stream** in its order. **Host** does not block.
template <class T, std::size_t Count = dynamic>
void launch_squares(cudaStream_t stream, const T* values, double* partials,
                    std::size_t count = Count) {
  launch_observe<T, true, false, Count>(stream, values, {}, nullptr, partials, count);
}

/// Sets `used[p]` for every parameter with a nonzero element, and clears none; with `partials`,
/// also computes the sums of `launch_squares`. **Stream** in its order. **Host** does not block.
template <class T>
void launch_find_used(cudaStream_t stream, const T* values, const TablePieces& where,
                      std::uint8_t* used, double* partials, std::size_t count) {
  const auto launch = partials != nullptr ? launch_observe<T, true, true, dynamic>
                                          : launch_observe<T, false, true, dynamic>;
  launch(stream, values, where, used, partials, count);
}

template <class Rule>
LOCKSTEP_KERNEL __launch_bounds__(decide_threads)
    decide(const StepInputs<Rule>* inputs, const double* partials, std::size_t count,
           StepLimits limits, StepState* state, StepNumbers<Rule>* numbers) {
  const double squares = sum_of_partials(partials, count);
  if (threadIdx.x != 0) return;
  StepState next = *state;
  *numbers = decide_step(*inputs, squares, limits, next);
  if (limits.scales_loss && inputs->watch.record != nullptr &&
      next.loss_scale.scale < smallest_loss_scale) {
    inputs->watch.record->scale = true;
    report_anomaly(inputs->watch, next.updates + next.skips);
  }
  *state = next;
}

/// Computes this step's constants and the next state from all `partials`, in device memory: a graph
/// may capture it. **Stream** in its order. **Host** does not block.
template <class Rule>
void launch_decide(cudaStream_t stream, const StepInputs<Rule>* inputs, const double* partials,
                   std::size_t count, const StepLimits& limits, StepState* state,
                   StepNumbers<Rule>* numbers) {
  launch_kernel<decide<Rule>>("step numbers", stream, 1, decide_threads, inputs, partials, count,
                              limits, state, numbers);
}

struct TableRows {
  const std::uint16_t* groups;       // by row
  std::uint8_t* used = nullptr;      // in this step; null if a step uses all rows
  std::uint64_t* updates = nullptr;  // of each row; null if all rows have the step's count
};

/// Computes the constants of the rows from `first` on, counts their updates and clears `used`. Rows
/// that the step does not use are skipped; a skipped step skips all rows.
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

struct FlagBits {
  static constexpr std::size_t most = 2048;
  std::uint32_t words[most / 32];
};

template <class Flag>
LOCKSTEP_KERNEL spread_flags(FlagBits bits, Flag* to, std::size_t count) {
  const std::size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<Flag>(bits.words[i / 32] >> (i % 32) & 1U);
}

/// Stores flags (0 or 1). They are launch arguments, so that a captured step keeps the flags of its
/// capture. **Stream** in its order. **Host** does not block.
inline void launch_store_flags(cudaStream_t stream, std::uint8_t* to,
                               std::span<const std::uint8_t> flags) {
  constexpr unsigned threads = 256;
  for (std::size_t first = 0; first < flags.size(); first += FlagBits::most) {
    const std::size_t count = std::min(flags.size() - first, FlagBits::most);
    FlagBits bits{};
    for (std::size_t i = 0; i != count; ++i)
      bits.words[i / 32] |= std::uint32_t{flags[first + i] != 0} << (i % 32);
    launch_kernel<spread_flags<std::uint8_t>>("flags", stream, blocks_for(count, threads), threads,
                                              bits, to + first, count);
  }
}

/// The constants of a job's steps in device memory and their inputs: those of the groups (group 0
/// has the step's), then those of the rows. For the deduced rule see `update_by_kind`.
template <class R>
class DeviceNumbers {
 public:
  DeviceNumbers(Optimizer<R>, std::size_t groups, std::size_t rows)
      : groups_(groups),
        first_row_(rows == 0 ? 0 : groups),
        inputs_(groups),
        numbers_(groups + rows) {}

  std::size_t groups() const { return groups_; }
  StepInputs<R>* inputs() const { return inputs_.data(); }
  StepNumbers<R>* step() const { return numbers_.data(); }
  StepNumbers<R>* rows() const { return step() + first_row_; }

  // **Stream** in its order. **Host** does not block.

  /// Stores the inputs of a group, if its constants depend on the gradients, or else its constants.
  void store_inputs(cudaStream_t stream, std::size_t group, const StepInputs<R>& inputs) {
    launch_store(stream, this->inputs() + group, inputs);
  }
  void store(cudaStream_t stream, std::size_t group, const StepNumbers<R>& numbers) {
    launch_store(stream, step() + group, numbers);
  }
  void number_rows(cudaStream_t stream, const TableRows& table, std::size_t first,
                   std::size_t count) {
    constexpr unsigned threads = 64;
    if (first >= count) return;
    launch_kernel<detail::number_rows<R>>("numbers of rows", stream,
                                          blocks_for(count - first, threads), threads, inputs(),
                                          step(), table, first, count, rows());
  }

 private:
  std::size_t groups_;
  std::size_t first_row_;
  DeviceElements<StepInputs<R>> inputs_;
  DeviceElements<StepNumbers<R>> numbers_;
};

}  // namespace lockstep::detail
