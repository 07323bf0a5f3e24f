// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater of the host, for parameters that ranks share and for those that they do not.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/update.hpp"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

// Two policies say which parameters a rank owns, and so updates: `slice<T>(count)` of the elements
// of every run. `reduce` hands the averages of a slice to `consume(at, averages)`, piece by piece;
// `add_others` completes a sum over slices; `publish` makes new parameters known to all ranks.

/// `Sharding<Replicated>`: a rank owns all parameters. A bucket's averages are there as soon as it
/// lands.
template <class Traits, class Comm>
struct OwnsAll {
  constexpr explicit OwnsAll(Comm&) {}

  template <class T>
  static constexpr std::pair<std::size_t, std::size_t> slice(std::size_t count) {
    return {0, count};
  }
  template <class T, class Gradients, class Consume>
  static void reduce(Gradients& gradients, const auto& plan, const Run& run,
                     const Consume& consume) {
    for (std::size_t b = run.first_bucket; b != run.first_bucket + run.buckets; ++b) {
      const Bucket& bucket = plan.bucket_table[b];
      gradients.wait(b);
      consume((bucket.offset - run.offset) / sizeof(T),
              std::span<const T>(gradients.template averages<T>(bucket.offset, bucket.bytes)));
    }
  }
  static constexpr void add_others(double&) {}
  static constexpr void publish() {}
};

/// `Sharding<HostShared>`: a rank owns a slice of the parameters, which lie in memory that ranks
/// share. Its gradients are reduced in the pass that consumes them.
template <class Traits, class Comm>
struct OwnsSlice {
  Comm& comm;

  template <class T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return comm.template slice<T>(count);
  }
  template <class T, class Gradients, class Consume>
  void reduce(Gradients& gradients, const auto&, const Run& run, const Consume& consume) const {
    comm.reduce_slice(gradients.template own<T>(run.offset, run.bytes),
                      reduction_of_gradients<Traits::sums_gradients>(), consume, JobCall::step);
  }
  void add_others(double& squares) const {
    comm.all_reduce(std::span(&squares, 1), Sum{}, JobCall::step);
  }
  void publish() const { comm.barrier(JobCall::step); }
};

/// One optimizer over all parameters. A pass reads gradients once, and reads and writes states and
/// parameters once; where no norm is needed first, it is the pass that consumes the averages.
template <class Traits, class Comm, class Owned>
class HostUpdater : public UpdateClock<typename Traits::rule, typename Traits::curve> {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;

 public:
  template <class Execution>
  HostUpdater(Comm& comm, const Execution&, const layout& where, std::byte* parameters)
      : owned_{comm},
        layout_(where),
        parameters_(parameters),
        runs_(where),
        states_(state_bytes()),
        used_(make_table<std::uint8_t, layout::count>(where.infos().size())),
        updates_(make_table<std::uint64_t, layout::count>(where.infos().size())) {}

  void begin() { rate_ = this->advance(); }

  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    count_used(gradients);
    if constexpr (Traits::clips) {
      double squares = reduce_slices(gradients);
      owned_.add_others(squares);
      update_slices(gradients, squares);
    } else {
      for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
        owned_.template reduce<T>(gradients, layout_.plan(), run, make_pass<T>(run, slice, 0));
      });
    }
  }

  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    count_used(gradients);
    double squares = 0;
    if constexpr (Traits::clips) {
      for_each_run([&]<class T>(const Run& run, const Slice&, std::type_identity<T>) {
        squares += sum_of_squares<T>(gradients.template averages<T>(run.offset, run.bytes));
      });
    }
    update_slices(gradients, squares);
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
    for (const Run& run : runs_.table) {
      Traits::with_element(run.element, [&]<class T>(std::type_identity<T> type) {
        Slice slice{0, 0, states};
        std::tie(slice.begin, slice.end) = owned_.template slice<T>(run.count());
        f(run, slice, type);
        states += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
      });
    }
  }

  std::size_t state_bytes() const {
    std::size_t bytes = 0;
    for_each_run([&]<class T>(const Run&, const Slice& slice, std::type_identity<T>) {
      bytes += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
    });
    return bytes;
  }

  /// Where unused parameters are skipped, finds the used ones and counts their updates.
  template <class Gradients>
  void count_used(Gradients& gradients) {
    if constexpr (Traits::skips_unused) {
      used_ = gradients.agree_on_usage();
      for (std::size_t p = 0; p != used_.size(); ++p) updates_[p] += used_[p];
    }
  }

  /// Averages this rank's slices, and returns the sum of their squares. Averages take the place of
  /// this rank's own gradients, which no other rank reads: each reads its slice of them.
  template <class Gradients>
  double reduce_slices(Gradients& gradients) {
    double squares = 0;
    for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
      const auto own = gradients.template own<T>(run.offset, run.bytes);
      owned_.template reduce<T>(gradients, layout_.plan(), run,
                                [&](std::size_t at, std::span<const T> averages) {
                                  if (averages.data() != &own[at])
                                    std::copy(averages.begin(), averages.end(), &own[at]);
                                });
      squares += sum_of_squares<T>(own.subspan(slice.begin, slice.count()));
    });
    return squares;
  }

  /// Updates this rank's slices from averages, clipped as the sum of all squares says.
  template <class Gradients>
  void update_slices(Gradients& gradients, double squares) {
    for_each_run([&]<class T>(const Run& run, const Slice& slice, std::type_identity<T>) {
      const auto averages = gradients.template averages<T>(run.offset, run.bytes);
      make_pass<T>(run, slice, squares)(slice.begin, averages.subspan(slice.begin, slice.count()));
    });
    owned_.publish();
  }

  /// The clip factor. Gradients hold the sum over micro-batches; the norm is that of their mean.
  static double clip(double squares) {
    if constexpr (!Traits::clips) return 1;
    const double norm = std::sqrt(squares) / static_cast<double>(Traits::micro_batches);
    return clip_factor(norm, Traits::template policy<axes::Clip>::norm);
  }

  /// A pass over a run: `pass(at, averages)` updates elements from `at` on. Constants are computed
  /// here.
  template <class T>
  auto make_pass(const Run& run, const Slice& slice, double squares) const {
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
      return [this, &run, pass](std::size_t at, std::span<const T> averages) {
        update_used(run, pass, at, averages);
      };
    } else {
      return pass;
    }
  }

  /// Updates parameters one by one, each with its own count of updates, as PyTorch does. Parameters
  /// that no rank used are left out.
  template <class T, class Scale>
  void update_used(const Run& run, const UpdatePass<Rule, T, Scale>& pass, std::size_t at,
                   std::span<const T> averages) const {
    for (std::size_t p = 0; p != used_.size(); ++p) {
      const Placement& placement = layout_.plan().placements[p];
      if (used_[p] == 0 || placement.offset < run.offset ||
          placement.offset >= run.offset + run.bytes)
        continue;
      const std::size_t first = (placement.offset - run.offset) / sizeof(T);
      const std::size_t begin = std::max(at, first);
      const std::size_t end = std::min(at + averages.size(), first + placement.bytes / sizeof(T));
      if (begin >= end) continue;
      pass.with(Rule::template at<Accumulator<T>>(this->options(), rate_, updates_[p]), begin,
                averages.subspan(begin - at, end - begin));
    }
  }

  [[no_unique_address]] Owned owned_;
  const layout& layout_;
  std::byte* parameters_;
  [[no_unique_address]] LayoutRuns<layout> runs_;
  HostArena states_;
  double rate_ = 0;
  typename Traits::Usage used_;
  Table<std::uint64_t, layout::count> updates_;  // of each parameter
};

template <class Traits, class Comm>
struct UpdaterOn<Cpu, Traits, Comm> {
  using Owned =
      std::conditional_t<Traits::shares_parameters, OwnsSlice<Traits, Comm>, OwnsAll<Traits, Comm>>;
  using type = HostUpdater<Traits, Comm, Owned>;
};

}  // namespace lockstep::detail
