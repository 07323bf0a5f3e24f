// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's states and passes on the host, over the slices that a rank updates.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/update.hpp"
#include "lockstep/optim/update_clock.hpp"

namespace lockstep::detail {

/// The elements of a run that a rank updates, and where their states begin.
struct RunSlice {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t states = 0;  // bytes
  constexpr std::size_t count() const { return end - begin; }
};

/// One optimizer over all parameters, each of whose passes reads gradients once, and reads and
/// writes states and parameters once. `slices.slice<T>(count)` is the range of a run's `count`
/// elements that this rank updates; states exist for those alone.
template <class Traits, class Slices>
class HostUpdate : public UpdateClock<typename Traits::rule, typename Traits::curve> {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;

 public:
  HostUpdate(const layout& where, std::byte* parameters, Slices slices)
      : slices_(slices),
        layout_(where),
        parameters_(parameters),
        runs_(where),
        states_(state_bytes()),
        used_(make_table<std::uint8_t, layout::count>(where.infos().size())),
        updates_(make_table<std::uint64_t, layout::count>(where.infos().size())) {}

  void begin() { rate_ = this->advance(); }

 protected:
  const auto& plan() const { return layout_.plan(); }

  /// Calls `f(run, slice, type)` for every run.
  template <class F>
  void for_each_run(const F& f) const {
    std::size_t states = 0;
    for (const Run& run : runs_.table) {
      Traits::with_element(run.element, [&]<class T>(std::type_identity<T> type) {
        RunSlice slice{0, 0, states};
        std::tie(slice.begin, slice.end) = slices_.template slice<T>(run.count());
        f(run, slice, type);
        states += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
      });
    }
  }

  /// Where unused parameters are skipped: which are used, and how often each has been updated.
  template <class Gradients>
  void count_used(Gradients& gradients) {
    if constexpr (Traits::skips_unused) {
      used_ = gradients.agree_on_usage();
      for (std::size_t p = 0; p != used_.size(); ++p) updates_[p] += used_[p];
    }
  }

  /// The sum of the squares of all averages, which must be there.
  template <class Gradients>
  double squares_of(Gradients& gradients) const {
    double squares = 0;
    for_each_run([&]<class T>(const Run& run, const RunSlice&, std::type_identity<T>) {
      squares += sum_of_squares<T>(gradients.template averages<T>(run.offset, run.bytes));
    });
    return squares;
  }

  /// Updates this rank's slices from averages, clipped by what the sum of all squares says.
  template <class Gradients>
  void update_slices(Gradients& gradients, double squares) {
    for_each_run([&]<class T>(const Run& run, const RunSlice& slice, std::type_identity<T>) {
      const auto averages = gradients.template averages<T>(run.offset, run.bytes);
      with_pass<T>(run, slice, squares, [&](const auto& pass) {
        pass(slice.begin, averages.subspan(slice.begin, slice.count()));
      });
    });
  }

  /// Calls `run_with(pass)`, where `pass(at, averages)` updates a run's elements from `at` on. What
  /// is the same for all of them is computed before.
  template <class T, class RunWith>
  void with_pass(const Run& run, const RunSlice& slice, double squares, const RunWith& run_with) {
    using A = Accumulator<T>;
    const auto scale = [squares] {
      if constexpr (Traits::clips || Traits::micro_batches > 1) {
        return Scaled<A>{
            static_cast<A>(clip(squares) / static_cast<double>(Traits::micro_batches))};
      } else {
        return Unscaled{};
      }
    }();
    UpdatePass<Rule, T, std::remove_const_t<decltype(scale)>> pass{
        Rule::template at<A>(this->options(), rate_, this->steps()),
        reinterpret_cast<T*>(parameters_ + run.offset),
        {},
        slice.begin,
        scale};
    const std::size_t stride = align_up(slice.count() * sizeof(A));
    for (std::size_t k = 0; k != Rule::states; ++k) {
      pass.states[k] = reinterpret_cast<A*>(states_.data() + slice.states + k * stride);
    }
    if constexpr (Traits::skips_unused) {
      run_with([&](std::size_t at, std::span<const T> averages) {
        update_used(run, pass, at, averages);
      });
    } else {
      run_with(pass);
    }
  }

 private:
  std::size_t state_bytes() const {
    std::size_t bytes = 0;
    for_each_run([&]<class T>(const Run&, const RunSlice& slice, std::type_identity<T>) {
      bytes += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
    });
    return bytes;
  }

  /// The norm is that of the mean over micro-batches; gradients hold their sum.
  static double clip(double squares) {
    if constexpr (!Traits::clips) return 1;
    const double norm = std::sqrt(squares) / static_cast<double>(Traits::micro_batches);
    return clip_factor(norm, Traits::template policy<axes::Clip>::norm);
  }

  /// Updates parameters one by one: those that no rank used not at all, and the others with their
  /// own count of updates, as PyTorch keeps it.
  template <class T, class Scale>
  void update_used(const Run& run, UpdatePass<Rule, T, Scale>& pass, std::size_t at,
                   std::span<const T> averages) {
    for (std::size_t p = 0; p != used_.size(); ++p) {
      const Placement& place = plan().placements[p];
      if (used_[p] == 0 || place.offset < run.offset || place.offset >= run.offset + run.bytes)
        continue;
      const std::size_t first = (place.offset - run.offset) / sizeof(T);
      const std::size_t begin = std::max(at, first);
      const std::size_t end = std::min(at + averages.size(), first + place.bytes / sizeof(T));
      if (begin >= end) continue;
      pass.update = Rule::template at<Accumulator<T>>(this->options(), rate_, updates_[p]);
      pass(begin, averages.subspan(begin - at, end - begin));
    }
  }

  [[no_unique_address]] Slices slices_;
  const layout& layout_;
  std::byte* parameters_;
  [[no_unique_address]] LayoutRuns<layout> runs_;
  HostArena states_;
  double rate_ = 0;
  typename Traits::Usage used_;
  Table<std::uint64_t, layout::count> updates_;  // of each parameter
};

}  // namespace lockstep::detail
