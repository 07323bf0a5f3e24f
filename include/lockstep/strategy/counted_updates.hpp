// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Updates that leave parameters out: which parameters an update changes, and how many
/// updates each has had.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Is every value zero? Most gradients say no with their first values, so that the pass that comes
/// next is the first to read the rest; those that say yes are not read again.
template <class T>
bool all_zero(std::span<const T> values) {
  using A = Accumulator<T>;
  constexpr std::size_t block = 64;
  for (std::size_t i = 0; i < values.size(); i += block) {
    const std::size_t end = std::min(values.size(), i + block);
    bool found = false;
    for (std::size_t j = i; j < end; ++j) found |= static_cast<A>(values[j]) != A{0};
    if (found) return false;
  }
  return true;
}

/// Which parameters have an averaged gradient that is not zero, where ranks see parts of them. A
/// rank says what it finds in its own part: `note_nonzero`, or `note_zeros` when it has seen the
/// last element of a part of which other ranks have the rest. After `meet` all ranks know all.
///
/// Where ranks have slices in memory that they share, they say it there: the call that hands them
/// their averages returns when all ranks have seen theirs, and is all the synchronisation that this
/// needs. Entries hold the number of the update, so that nobody has to clear them. Elsewhere flags
/// meet in a small collective.
template <class Traits, class Comm>
class NonzeroGradients {
  /// Slices are handed out by a call that all ranks make together.
  static constexpr bool in_common = Traits::shares_parameters;
  static constexpr bool meets = Traits::divides_states && !in_common;
  static constexpr std::size_t parameters = Traits::layout::count;
  using Flags = KeptTable<std::uint8_t, parameters>;
  enum Found : std::uint8_t { nonzero = 1, zeros = 2 };

 public:
  NonzeroGradients(Comm& comm, std::size_t count)
      : comm_(comm),
        mine_(make_kept_table<std::uint8_t, parameters>(count)),
        all_(make_kept_table<std::uint8_t, parameters>(count)) {
    if constexpr (in_common) common_ = comm.template allocate_shared<std::uint32_t>(2 * count);
  }

  /// An update begins: nothing is known.
  void begin() {
    ++turn_;
    std::ranges::fill(mine_, std::uint8_t{0});
  }

  void note_nonzero(std::size_t parameter) {
    mine_[parameter] |= nonzero;
    if constexpr (in_common) say(parameter);
  }
  void note_zeros(std::size_t parameter) {
    mine_[parameter] |= zeros;
    if constexpr (in_common) say(mine_.size() + parameter);
  }
  /// Has this rank found an element that is not zero?
  bool found(std::size_t parameter) const { return (mine_[parameter] & nonzero) != 0; }

  /// **Ranks** all, after each has seen its averages.
  void meet() {
    if constexpr (meets) {
      all_ = mine_;
      comm_.all_reduce(all_, BitOr{}, step_call<Traits>());
    }
  }
  /// After `meet`: has any rank found one?
  bool is_nonzero(std::size_t parameter) const { return any_found(parameter, nonzero); }
  /// After `meet`: is a rank's part zero of a parameter that is not? All ranks have one answer.
  bool leaves_zeros() const {
    for (std::size_t p = 0; p != mine_.size(); ++p) {
      if (any_found(p, zeros) && any_found(p, nonzero)) return true;
    }
    return false;
  }

 private:
  bool any_found(std::size_t parameter, Found what) const {
    if constexpr (in_common) return said(parameter + (what == zeros ? mine_.size() : 0));
    return ((meets ? all_ : mine_)[parameter] & what) != 0;
  }
  void say(std::size_t entry) {
    std::atomic_ref(common_[entry]).store(turn_, std::memory_order_relaxed);
  }
  bool said(std::size_t entry) const {
    return std::atomic_ref(common_[entry]).load(std::memory_order_relaxed) == turn_;
  }

  Comm& comm_;
  Flags mine_;
  Flags all_;
  std::span<std::uint32_t> common_;  // by parameter: not zero, then zeros
  std::uint32_t turn_ = 0;           // the number of the update
};

/// Every gradient counts.
struct AnyGradients {
  constexpr AnyGradients(auto&, std::size_t) {}
};

/// Which parameters the update under way changes, and how many updates each has had.
template <class Traits, class Comm>
class CountedUpdates {
  using layout = typename Traits::layout;
  static constexpr bool filters = Traits::skips_zero_gradients;

 public:
  CountedUpdates(Comm& comm, const layout& where)
      : layout_(where),
        used_(make_kept_table<std::uint8_t, layout::count>(where.infos().size())),
        updates_(make_kept_table<std::uint64_t, layout::count>(where.infos().size())),
        nonzero_(comm, where.infos().size()) {}

  std::span<std::uint64_t> counts() { return updates_; }
  void set_counts(std::uint64_t count) { std::ranges::fill(updates_, count); }

  /// An update begins. **Ranks** all, where ranks may have used different parameters.
  template <class Gradients>
  void begin(Gradients& gradients) {
    if constexpr (Traits::notes_usage) {
      used_ = gradients.agree_on_usage();
    } else {
      std::ranges::fill(used_, std::uint8_t{1});
    }
    if constexpr (filters) {
      nonzero_.begin();
      is_open_ = true;
    }
  }
  /// It has been made.
  void end() {
    for (std::size_t p = 0; p != used_.size(); ++p) updates_[p] += used_[p];
  }

  bool is_used(std::size_t parameter) const { return used_[parameter] != 0; }
  /// The number that this update has for a parameter, from 1.
  std::uint64_t number(std::size_t parameter) const { return updates_[parameter] + 1; }

  // Where gradients of zero are skipped.

  /// May a parameter still turn out to have a gradient of zero?
  bool is_undecided(std::size_t parameter) const { return is_open_ && !nonzero_.found(parameter); }
  /// Takes note of averages, in which a rank's part of this parameter ends or goes on. Returns
  /// whether they are all zero.
  template <class T>
  bool note(std::size_t parameter, std::span<const T> averages, bool ends, bool is_part) {
    if (!all_zero(averages)) {
      nonzero_.note_nonzero(parameter);
      return false;
    }
    if (ends && is_part) nonzero_.note_zeros(parameter);
    return true;
  }
  /// All averages have been seen: decides which parameters are used. Returns whether a rank has yet
  /// to update a part that is zero. **Ranks** all.
  bool decide() {
    nonzero_.meet();
    is_open_ = false;
    for (std::size_t p = 0; p != used_.size(); ++p) used_[p] &= nonzero_.is_nonzero(p) ? 1 : 0;
    return nonzero_.leaves_zeros();
  }
  /// Is this rank's part of a used parameter zero?
  bool has_zeros(std::size_t parameter) const {
    return is_used(parameter) && !nonzero_.found(parameter);
  }

  /// Calls `f(parameter, begin, end)` for the used parameters among `count` elements of a run from
  /// `at` on: the elements of the run that are the parameter's.
  template <class T, class F>
  void for_each_part(const auto& run, std::size_t at, std::size_t count, const F& f) const {
    const auto& plan = layout_.plan();
    const std::size_t from = run.offset + at * sizeof(T);
    const std::size_t to = from + count * sizeof(T);
    const auto* const last = plan.arrivals.data() + plan.trained;
    const auto* next = std::upper_bound(
        plan.arrivals.data(), last, from,
        [&](std::size_t offset, std::size_t p) { return offset < plan.placements[p].offset; });
    if (next != plan.arrivals.data()) --next;  // the parameter before may reach this far
    for (; next != last && plan.placements[*next].offset < to; ++next) {
      if (!is_used(*next)) continue;
      const auto [first, end] = elements_of<T>(run, *next);
      const std::size_t begin = std::max(at, first);
      const std::size_t stop = std::min(at + count, end);
      if (begin < stop) f(*next, begin, stop);
    }
  }
  /// The elements of a run that are a parameter's.
  template <class T>
  std::pair<std::size_t, std::size_t> elements_of(const auto& run, std::size_t parameter) const {
    const Placement& placement = layout_.plan().placements[parameter];
    const std::size_t first = (placement.offset - run.offset) / sizeof(T);
    return {first, first + placement.bytes / sizeof(T)};
  }

 private:
  const layout& layout_;
  KeptTable<std::uint8_t, layout::count> used_;
  KeptTable<std::uint64_t, layout::count> updates_;
  [[no_unique_address]] std::conditional_t<filters, NonzeroGradients<Traits, Comm>, AnyGradients>
      nonzero_;
  bool is_open_ = false;  // gradients are still being looked at
};

/// Every update changes every parameter.
struct UncountedUpdates {
  constexpr UncountedUpdates(auto&, const auto&) {}
  static constexpr void begin(auto&) {}
  static constexpr void end() {}
  static constexpr void set_counts(std::uint64_t) {}
};

template <class Traits, class Comm>
using CountedUpdatesOf =
    typename std::conditional_t<Traits::counts_updates,
                                std::type_identity<CountedUpdates<Traits, Comm>>,
                                std::type_identity<UncountedUpdates>>::type;

}  // namespace lockstep::detail
