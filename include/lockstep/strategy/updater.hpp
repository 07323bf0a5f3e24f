// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's optimizer: it keeps the states of what this rank updates, and updates it.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/update.hpp"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/in_flight.hpp"

namespace lockstep {

/// One optimizer over all parameters, in one pass over gradients, states and parameters. With
/// parameters that a host shares, each rank has a slice of every run of elements, and where no norm
/// is needed first, the pass that updates the slice is the one that reduces it.
template <class Traits, class Comm, class Gradients>
class Updater : public UpdateClock<typename Traits::rule, typename Traits::curve> {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  static constexpr auto reduction = reduction_of_gradients<Traits::sums_gradients>();

 public:
  Updater(Comm& comm, const layout& where, std::byte* parameters)
      : comm_(comm), layout_(where), parameters_(parameters), states_(state_bytes()) {}

  /// The next update begins: before either of the two below.
  void begin() { rate_ = this->advance(); }

  /// Averages the gradients and updates the parameters. **Ranks** all. **Host** blocks until the
  /// parameters are new on all ranks.
  void reduce_and_update(Gradients& gradients) {
    count_used(gradients);
    if constexpr (!Traits::shares_parameters) {
      if constexpr (Traits::clips) {
        update_reduced(gradients);
      } else {
        update_as_they_land(gradients);
      }
    } else if constexpr (Traits::clips) {
      double squares = 0;
      for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
        const auto mine = elements_at<T>(gradients.gradients(), run.offset, run.bytes);
        // Nobody else reads this slice of anybody's gradients: it may be overwritten at once.
        comm_.reduce_slice(mine, reduction, [&](std::size_t at, std::span<const T> averages) {
          std::copy(averages.begin(), averages.end(), &mine[at]);
        });
        squares += sum_of_squares<T>(mine.subspan(slice.begin, slice.count()));
      });
      comm_.all_reduce(std::span(&squares, 1), Sum{});
      update_slices(gradients, squares);
    } else {
      for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
        with_pass<T>(run, slice, 1, [&](const auto& pass) {
          comm_.reduce_slice(elements_at<T>(gradients.gradients(), run.offset, run.bytes),
                             reduction, pass);
        });
      });
    }
    end(gradients);
  }

  /// Updates the parameters from gradients that every rank has averaged. **Ranks** all. **Host**
  /// blocks.
  void update_averaged(Gradients& gradients) {
    count_used(gradients);
    if constexpr (Traits::shares_parameters) {
      double squares = 0;
      if constexpr (Traits::clips) squares = all_squares(gradients.gradients());
      update_slices(gradients, squares);
    } else {
      update_reduced(gradients);
    }
    end(gradients);
  }

 private:
  /// The elements of a run that this rank updates, and where their states begin.
  struct Slice {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t states = 0;  // bytes
    constexpr std::size_t count() const { return end - begin; }
  };

  /// Calls `f(run, slice, type)` for every run.
  template <class F>
  void for_each_run(const F& f) const {
    std::size_t states = 0;
    const auto visit = [&](const Run& run) {
      Traits::with_element(run.element, [&]<class T>(std::type_identity<T> type) {
        Slice slice{0, run.count(), states};
        if constexpr (Traits::shares_parameters) {
          std::tie(slice.begin, slice.end) = comm_.template slice<T>(run.count());
        }
        f(run, slice, type);
        states += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
      });
    };
    if constexpr (Traits::has_dynamic_parameters) {
      for (const Run& run : runs_) visit(run);
    } else {
      constexpr auto runs = make_runs(layout::plan());
      for (const Run& run : runs) visit(run);
    }
  }

  std::size_t state_bytes() {
    if constexpr (Traits::has_dynamic_parameters) {
      const auto table = make_runs(layout_.plan());
      runs_.assign(table.begin(), table.end());
    }
    std::size_t bytes = 0;
    for_each_run([&]<class T>(const Run&, const Slice& slice, std::type_identity<T>) {
      bytes += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
    });
    return bytes;
  }

  void count_used(Gradients& gradients) {
    if constexpr (Traits::skips_unused) {
      used_ = gradients.agree_on_usage();
      for (std::size_t p = 0; p != Traits::parameters; ++p) updates_[p] += used_[p];
    }
  }

  void end(Gradients& gradients) { gradients.finish_step(); }

  /// Buckets in order, each as soon as it is averaged.
  void update_as_they_land(Gradients& gradients) {
    const auto& buckets = layout_.plan().bucket_table;
    std::size_t b = 0;
    for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
      with_pass<T>(run, slice, 1, [&](const auto& pass) {
        for (; b != layout_.plan().bucket_count && buckets[b].offset < run.offset + run.bytes;
             ++b) {
          gradients.wait(b);
          pass((buckets[b].offset - run.offset) / sizeof(T),
               elements_at<T>(gradients.gradients(), buckets[b].offset, buckets[b].bytes));
        }
      });
    });
  }

  /// Everything, on every rank, once all buckets are averaged.
  void update_reduced(Gradients& gradients) {
    gradients.reduce();
    double squares = 0;
    if constexpr (Traits::clips) squares = all_squares(gradients.gradients());
    update_slice_of_each_run(gradients.gradients(), factor(squares));
  }

  void update_slices(Gradients& gradients, double squares) {
    update_slice_of_each_run(gradients.gradients(), factor(squares));
    comm_.barrier();  // nobody reads parameters before all are new
  }

  void update_slice_of_each_run(std::byte* gradients, double clip) {
    for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
      const auto averages = elements_at<T>(gradients, run.offset, run.bytes);
      with_pass<T>(run, slice, clip, [&](const auto& pass) {
        pass(slice.begin, averages.subspan(slice.begin, slice.count()));
      });
    });
  }

  double all_squares(std::byte* gradients) const {
    double squares = 0;
    for_each_run([&]<class T>(const Run& run, const Slice&, std::type_identity<T>) {
      squares += sum_of_squares<T>(elements_at<T>(gradients, run.offset, run.bytes));
    });
    return squares;
  }

  /// The norm is that of the mean over micro-batches; gradients hold their sum.
  static double factor(double squares) {
    if constexpr (!Traits::clips) return 1;
    const double norm = std::sqrt(squares) / static_cast<double>(Traits::micro_batches);
    return clip_factor(norm, Traits::template policy<axes::Clip>::norm);
  }

  /// Calls `run_with(pass)`, where `pass(at, averages)` updates a run's elements from `at` on. What
  /// is the same for all of them is computed before.
  template <class T, class RunWith>
  void with_pass(const Run& run, const Slice& slice, double clip, const RunWith& run_with) {
    using A = Accumulator<T>;
    const auto scale = [clip] {
      if constexpr (Traits::clips || Traits::micro_batches > 1) {
        return Scaled<A>{static_cast<A>(clip / static_cast<double>(Traits::micro_batches))};
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

  /// Parameters each by itself: those that nobody used not at all, and the others with their own
  /// count of updates, as PyTorch keeps it.
  template <class T, class Scale>
  void update_used(const Run& run, UpdatePass<Rule, T, Scale>& pass, std::size_t at,
                   std::span<const T> averages) {
    const auto& placements = layout_.plan().placements;
    for (std::size_t p = 0; p != Traits::parameters; ++p) {
      if (used_[p] == 0 || placements[p].offset < run.offset ||
          placements[p].offset >= run.offset + run.bytes) {
        continue;
      }
      const std::size_t first = (placements[p].offset - run.offset) / sizeof(T);
      const std::size_t begin = std::max(at, first);
      const std::size_t end =
          std::min(at + averages.size(), first + placements[p].bytes / sizeof(T));
      if (begin >= end) continue;
      pass.update = Rule::template at<Accumulator<T>>(this->options(), rate_, updates_[p]);
      pass(begin, averages.subspan(begin - at, end - begin));
    }
  }

  Comm& comm_;
  const layout& layout_;
  std::byte* parameters_;
  std::vector<Run> runs_;  // of dynamic shapes
  HostArena states_;
  double rate_ = 0;
  typename Gradients::Usage used_{};                         // where unused ones are skipped
  std::array<std::uint64_t, Traits::parameters> updates_{};  // of each parameter, likewise
};

}  // namespace lockstep
