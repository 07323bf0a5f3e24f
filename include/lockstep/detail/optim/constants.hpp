// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The constants of an optimizer's step, with clipping and loss scaling, and their table.

#include <cmath>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/optim/update.hpp"

namespace lockstep {

namespace axes {
struct Clip : WithName<"Clip"> {};
}  // namespace axes

/// Gradients are scaled down so that their norm over all parameters is at most `Norm`, a number of
/// any type: `Clip<1>` is `Clip<1.0>`. An infinite norm clips nothing.
template <auto Norm = std::numeric_limits<double>::infinity()>
struct Clip : detail::ValuePolicy<axes::Clip> {
  static constexpr bool well_formed = std::is_arithmetic_v<decltype(Norm)>;
  static constexpr double norm = [] {
    if constexpr (well_formed) return static_cast<double>(Norm);
    return 0.0;
  }();
  static constexpr bool clips = norm != std::numeric_limits<double>::infinity();
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Clip::name).number(__builtin_bit_cast(std::uint64_t, norm));
  }
};

/// GradScaler's arguments and defaults.
struct LossScaleOptions {
  float initial = 65536;
  float growth = 2;
  float backoff = 0.5;
  std::uint32_t interval = 2000;  // finite steps until the scale grows
};

namespace detail {

/// Short blocks are summed in the elements' arithmetic, which vectorises better.
template <Element T>
double sum_of_squares(std::span<const T> values) {
  constexpr std::size_t block = 64;
  constexpr std::size_t lanes = 8;
  double sum = 0;
  for (std::size_t begin = 0; begin < values.size(); begin += block) {
    Accumulator<T> lane[lanes] = {};
    const std::size_t end = std::min(values.size(), begin + block);
    for (std::size_t i = begin; i < end; ++i) {
      const auto value = static_cast<Accumulator<T>>(values[i]);
      lane[(i - begin) % lanes] += value * value;
    }
    for (const auto part : lane) sum += static_cast<double>(part);
  }
  return sum;
}

/// The factor that brings the gradients' norm down to `max_norm`: PyTorch's `clip_grad_norm_`, with
/// its guard against a norm of zero. As in PyTorch, a NaN norm makes every gradient NaN.
LOCKSTEP_HOST_DEVICE constexpr double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

/// The factor of the loss, which keeps small gradients from underflowing in 16 bits.
struct LossScale {
  float scale = 1;
  std::uint32_t good_steps = 0;  // finite steps since the last change
};

/// A scale below this will not recover: about forty steps have overflowed since the initial scale.
inline constexpr float smallest_loss_scale = 1e-7F;

constexpr LossScale first_loss_scale(const LossScaleOptions& options) {
  return {options.initial, 0};
}

/// The next scale: gradients that are not finite shrink it, `interval` finite steps grow it.
LOCKSTEP_HOST_DEVICE constexpr LossScale next_loss_scale(LossScale now, bool finite,
                                                         const LossScaleOptions& options) {
  if (!finite) return {now.scale * options.backoff, 0};
  if (now.good_steps + 1 < options.interval) return {now.scale, now.good_steps + 1};
  const float grown = now.scale * options.growth;
  return {is_finite(grown) ? grown : now.scale, 0};
}

template <class Rule, class A>
struct ScaledUpdate {
  decltype(Rule::template at<A>({}, 0.0, 1)) update;
  A scale;
};

/// The constants of a step, written before its update kernels, which a graph can replay.
template <class Rule>
struct StepNumbers {
  ScaledUpdate<Rule, float> in_float;
  ScaledUpdate<Rule, double> in_double;
  bool skip;                // change nothing
  std::uint64_t step = 0;   // the update's number, from 1
  AnomalyWatch watch = {};  // where update kernels look for anomalies

  template <class A>
  LOCKSTEP_HOST_DEVICE constexpr const ScaledUpdate<Rule, A>& in() const {
    if constexpr (std::is_same_v<A, double>) {
      return in_double;
    } else {
      return in_float;
    }
  }
};

/// The constants of update `step`, from 1, with gradients multiplied by `scale`. If no norm is
/// needed, the host computes them and stores them (`launch_store`) before the step or the graph.
template <class Rule>
LOCKSTEP_HOST_DEVICE constexpr StepNumbers<Rule> step_numbers(const typename Rule::Options& options,
                                                              double lr, std::uint64_t step,
                                                              double scale) {
  return {{Rule::template at<float>(options, lr, step), static_cast<float>(scale)},
          {Rule::template at<double>(options, lr, step), scale},
          false,
          step,
          {}};
}

/// The host's inputs to a step whose constants depend on the gradients, stored in the same way.
template <class Rule>
struct StepInputs {
  typename Rule::Options options;
  double lr;
  double scale;  // of gradients before clipping: 1 / micro-batches
  AnomalyWatch watch = {};
};

struct StepLimits {
  double max_norm = std::numeric_limits<double>::infinity();
  bool scales_loss = false;  // and skips steps with gradients that are not finite
  bool skips = false;        // skips them without loss scaling
  LossScaleOptions loss_scale{};
};

template <class Traits>
inline constexpr bool decides_steps =
    Traits::clips || Traits::scales_loss || Traits::skips_anomalies;

template <class Traits>
constexpr StepLimits step_limits() {
  StepLimits limits;
  if constexpr (Traits::clips) limits.max_norm = Traits::template policy<axes::Clip>::norm;
  limits.scales_loss = Traits::scales_loss;
  limits.skips = Traits::skips_anomalies;
  return limits;
}

/// The state that such a step passes to the next. A skipped step is no update, as in PyTorch.
struct StepState {
  std::uint64_t updates = 0;
  double norm = 0;  // of the last step, before clipping
  LossScale loss_scale{};
  bool skipped = false;     // the last step
  std::uint64_t skips = 0;  // number of skipped steps
};

/// Decides from the sum of squares of all gradients whether a step is skipped, and returns the
/// factor of the gradients: `scale / divisor`, unscaled and clipped.
LOCKSTEP_HOST_DEVICE constexpr double decide_scale(double scale, double divisor, double squares,
                                                   const StepLimits& limits, StepState& state) {
  using std::sqrt;
  state.skipped = false;
  if (limits.scales_loss) {
    scale /= static_cast<double>(state.loss_scale.scale);
    state.skipped = !is_finite(squares);
    state.loss_scale = next_loss_scale(state.loss_scale, !state.skipped, limits.loss_scale);
  } else if (limits.skips) {
    state.skipped = !is_finite(squares);
  }
  state.norm = sqrt(squares) * scale / divisor;
  if (state.skipped) {
    ++state.skips;
    return 0;
  }
  ++state.updates;
  return scale * clip_factor(state.norm, limits.max_norm) / divisor;
}

template <class Rule>
LOCKSTEP_HOST_DEVICE constexpr StepNumbers<Rule> decide_step(const StepInputs<Rule>& inputs,
                                                             double squares,
                                                             const StepLimits& limits,
                                                             StepState& state) {
  const double scale = decide_scale(inputs.scale, 1, squares, limits, state);
  if (state.skipped) {
    StepNumbers<Rule> none{};
    none.skip = true;
    return none;
  }
  auto numbers = step_numbers<Rule>(inputs.options, inputs.lr, state.updates, scale);
  numbers.watch = inputs.watch;
  return numbers;
}

// The table of constants has a row for each parameter group or, if updates may leave out
// parameters, so that each has its own count of updates, for each parameter.

/// Bytes of the arena with one row's constants. A piece begins where the one before it ends.
struct TablePiece {
  std::size_t end = 0;  // offset in the arena
  std::size_t row = 0;
};

LOCKSTEP_HOST_DEVICE constexpr const TablePiece* table_piece_at(const TablePiece* piece,
                                                                std::size_t count,
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

/// The pieces of all buckets by `row_of(parameter)`; neighbours with the same row are merged.
std::vector<TablePiece> make_table_pieces(const auto& plan, const auto& row_of) {
  std::vector<TablePiece> pieces;
  for (std::size_t b = 0; b != plan.bucket_count; ++b) {
    for (const std::size_t p : plan.members(b)) {
      const std::size_t row = row_of(p);
      if (pieces.empty() || pieces.back().row != row) pieces.push_back({0, row});
      pieces.back().end = plan.placements[p].offset + align_up(plan.placements[p].bytes);
    }
  }
  return pieces;
}

/// The group of every parameter. Throws if a group of a listed model has no trained parameter.
template <class Groups, class Layout>
std::vector<std::uint16_t> groups_of_parameters(const Layout& layout) {
  std::vector<std::uint16_t> groups(layout.infos().size());
  std::vector<bool> is_trained(Groups::count);
  for (std::size_t p = 0; p != groups.size(); ++p) {
    groups[p] =
        static_cast<std::uint16_t>(Groups::group_of(layout.name(p), layout.infos()[p].rank));
    if (layout.plan().is_trained(p)) is_trained[groups[p]] = true;
  }
  for (std::size_t group = 1; Layout::count == dynamic && group != Groups::count; ++group) {
    if (!is_trained[group]) {
      fail("ParameterGroups",
           {"group ", group, " of ", Groups::count - 1, " has no parameter that is trained"},
           "compare its patterns with the names that the model lists; an earlier group or Frozen "
           "may have them all");
    }
  }
  return groups;
}

/// The row of every parameter and the group of every row; empty if constants are common to all.
template <class Traits>
struct TableLayout {
  static constexpr bool is_needed = Traits::has_groups || Traits::counts_updates;

  std::vector<std::uint16_t> groups;  // by row
  std::vector<TablePiece> pieces;

  explicit TableLayout([[maybe_unused]] const typename Traits::layout& where) {
    if constexpr (is_needed) {
      groups = groups_of_parameters<typename Traits::groups>(where);
      pieces = make_table_pieces(where.plan(), [&](std::size_t p) -> std::size_t {
        return Traits::counts_updates ? p : groups[p];
      });
      if constexpr (!Traits::counts_updates) {
        groups.resize(Traits::groups::count);
        for (std::size_t g = 0; g != groups.size(); ++g) groups[g] = static_cast<std::uint16_t>(g);
      }
    }
  }
  std::size_t rows() const { return groups.size(); }

  /// Calls `f(row, begin, end)` for the pieces of the bytes [begin, end) of the arena.
  void for_each_row(std::size_t begin, std::size_t end, const auto& f) const {
    const TablePiece* piece = table_piece_at(pieces.data(), pieces.size(), begin);
    for (; begin != end; ++piece) {
      const std::size_t stop = piece->end < end ? piece->end : end;
      f(piece->row, begin, stop);
      begin = stop;
    }
  }
};

}  // namespace detail

}  // namespace lockstep
