// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater of the host, for parameters that ranks share and for those that they do not.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/group_pieces.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/optim/update.hpp"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/host_counted_update.hpp"
#include "lockstep/strategy/noted_anomaly.hpp"
#include "lockstep/strategy/owned_parameters.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// One optimizer over all parameters. A pass reads gradients once, and reads and writes states and
/// parameters once; where no norm is needed first, it is the pass that consumes the averages.
template <class Traits, class Comm, class Owned>
class HostUpdater
    : public UpdateClock<typename Traits::rule, typename Traits::curve, typename Traits::groups>,
      HostCountedUpdate<HostUpdater<Traits, Comm, Owned>, Traits, Comm> {
  using Clock = typename HostUpdater::UpdateClock;
  using Counted = HostCountedUpdate<HostUpdater, Traits, Comm>;
  friend Counted;
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;

 public:
  template <class Execution>
  HostUpdater(Comm& comm, const Execution&, const layout& where, std::byte* parameters)
      : Counted(comm, where),
        owned_(comm, where, parameters),
        layout_(where),
        parameters_(parameters),
        runs_(where),
        groups_(where),
        states_(count_state_bytes()) {}

  /// Begins an update from the sum of this many micro-batches.
  void begin(std::size_t micro_batches = Traits::micro_batches) {
    rate_ = this->advance();
    if constexpr (divides) micro_batches_ = static_cast<double>(micro_batches);
  }

  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    this->counted_.begin(gradients);
    count_live(gradients);
    if constexpr (needs_norm) {
      double squares = reduce_slices(gradients);
      owned_.add_others(squares);
      if constexpr (Traits::skips_zero_gradients) this->counted_.decide();
      update_slices(gradients, squares);
    } else {
      for_each_run([&]<class T>(const auto& run, const Slice& slice, std::type_identity<T>) {
        owned_.template reduce<T>(gradients, layout_.plan(), run, make_pass<T>(run, slice, 0));
      });
      if constexpr (Traits::skips_zero_gradients) {
        if (this->update_zeros() && !Owned::publishes_late) owned_.publish();
      }
      require_no_anomaly();
      this->counted_.end();
      if constexpr (Owned::publishes_late) owned_.publish();
    }
  }

  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    this->counted_.begin(gradients);
    count_live(gradients);
    double squares = 0;
    if constexpr (needs_norm || Traits::skips_zero_gradients) {
      for_each_run([&]<class T>(const auto& run, const Slice&, std::type_identity<T>) {
        const auto averages = gradients.template averages<T>(run.offset, run.bytes);
        if constexpr (needs_norm) squares += sum_of_squares<T>(averages);
        if constexpr (Traits::skips_zero_gradients)
          this->template note_zeros<T>(run, Shard{0, run.count()}, 0, averages);
      });
    }
    if constexpr (Traits::skips_zero_gradients) this->counted_.decide();
    update_slices(gradients, squares);
  }

  /// How many updates were left out because of `Anomaly<Skip>`.
  std::uint64_t skipped() const { return skipped_; }
  /// The bytes of the states that this rank keeps.
  std::size_t state_bytes() const { return states_.bytes(); }
  /// The parameters that are coming back from other ranks.
  auto& gathers()
    requires(Traits::shards)
  {
    return owned_.gathers();
  }
  /// On a host an anomaly is thrown where it is found.
  static constexpr void require_finite() {}

  /// Calls `f(parameter, state, values, first)` for the states that this rank keeps: the
  /// parameter's number, the state's name, and all its values or, from value `first` on, a slice.
  template <class F>
  void for_each_state(const F& f) const {
    for_each_run([&]<class T>(const auto& run, const Slice& slice, std::type_identity<T>) {
      using A = Accumulator<T>;
      const std::size_t stride = align_up(slice.count() * sizeof(A)) / sizeof(A);
      A* const states = reinterpret_cast<A*>(states_.data() + slice.states);
      for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
        const Placement& placement = layout_.plan().placements[p];
        if (placement.offset < run.offset || placement.offset >= run.offset + run.bytes) continue;
        const std::size_t at = (placement.offset - run.offset) / sizeof(T);
        const std::size_t begin = std::max(slice.begin, at);
        const std::size_t end = std::min(slice.end, at + placement.bytes / sizeof(T));
        if (begin >= end) continue;
        for (std::size_t k = 0; k != Rule::states; ++k) {
          f(p, state_name<Rule>(k),
            std::span<A>(states + k * stride + (begin - slice.begin), end - begin), begin - at);
        }
      }
    });
  }
  /// Where updates leave parameters out: how many each parameter had.
  std::span<std::uint64_t> update_counts() { return this->counted_.counts(); }

  void tell_progress(ReplicaProgress& progress) const {
    Clock::tell_progress(progress);
    progress.skipped = skipped_;
    progress.counted = number();
  }
  void take_progress(const ReplicaProgress& progress) {
    Clock::take_progress(progress);
    skipped_ = progress.skipped;
    this->counted_.set_counts(progress.counted);
  }

 private:
  static constexpr bool needs_norm = Traits::clips || Traits::skips_anomalies;
  /// Is the sum of gradients divided by another number than that of all ranks?
  static constexpr bool divides = Traits::micro_batches > 1 || Traits::divides_by_live;

  /// The elements of a run that this rank updates, and where their states begin.
  struct Slice : Shard {
    std::size_t states = 0;  // bytes
  };

  /// Calls `f(run, slice, type)` for every run.
  template <class F>
  void for_each_run(const F& f) const {
    std::size_t states = 0;
    for (const auto& run : runs_.table) {
      Traits::with_element(run.element, [&]<class T>(std::type_identity<T> type) {
        const Slice slice{owned_.template slice<T>(run), states};
        f(run, slice, type);
        states += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
      });
    }
  }

  std::size_t count_state_bytes() const {
    std::size_t bytes = 0;
    for_each_run([&]<class T>(const auto&, const Slice& slice, std::type_identity<T>) {
      bytes += Rule::states * align_up(slice.count() * sizeof(Accumulator<T>));
    });
    return bytes;
  }

  /// Averages are over all ranks: that of the live ones is larger, as one of fewer micro-batches.
  template <class Gradients>
  void count_live([[maybe_unused]] Gradients& gradients) {
    if constexpr (Traits::divides_by_live) micro_batches_ *= gradients.live_share();
  }

  /// Averages this rank's slices, and returns the sum of their squares. Averages take the place of
  /// this rank's own gradients, which no other rank reads: each reads its slice of them.
  template <class Gradients>
  double reduce_slices(Gradients& gradients) {
    double squares = 0;
    for_each_run([&]<class T>(const auto& run, const Slice& slice, std::type_identity<T>) {
      const std::span<T> own = owned_.template averages<T>(gradients, run, slice);
      owned_.template reduce<T>(gradients, layout_.plan(), run,
                                [&](std::size_t at, std::span<const T> averages) {
                                  if constexpr (Traits::skips_zero_gradients)
                                    this->note_zeros(run, slice, at, averages);
                                  T* const kept = own.data() + (at - slice.begin);
                                  if (averages.data() != kept)
                                    std::copy(averages.begin(), averages.end(), kept);
                                });
      squares += sum_of_squares<T>(own);
    });
    return squares;
  }

  /// Updates this rank's slices from averages, clipped as the sum of all squares says.
  template <class Gradients>
  void update_slices(Gradients& gradients, double squares) {
    if constexpr (Traits::skips_anomalies) {
      if (!is_finite(squares)) [[unlikely]]
        return skip();
    }
    for_each_run([&]<class T>(const auto& run, const Slice& slice, std::type_identity<T>) {
      make_pass<T>(run, slice, squares)(
          slice.begin, std::span<const T>(owned_.template averages<T>(gradients, run, slice)));
    });
    require_no_anomaly();
    this->counted_.end();
    owned_.publish();
  }

  /// A skipped update does not count, as in PyTorch.
  [[gnu::cold]] void skip() { ++skipped_; }
  /// The number of this update for the rule, from 1.
  std::uint64_t number() const {
    if constexpr (Traits::skips_anomalies) return this->steps() - skipped_;
    return this->steps();
  }

  double micro_batches() const {
    if constexpr (!divides) return 1;
    return micro_batches_;
  }

  /// The clip factor. Gradients hold the sum over micro-batches; the norm is that of their mean.
  double clip(double squares) const {
    if constexpr (!Traits::clips) return 1;
    return clip_factor(std::sqrt(squares) / micro_batches(),
                       Traits::template policy<axes::Clip>::norm);
  }

  /// A pass over a run in which all elements have the constants of one group.
  template <class T>
  auto update_pass(const Run& run, const Slice& slice, double squares) const {
    using A = Accumulator<T>;
    const auto scale = [&] {
      if constexpr (Traits::clips || divides) {
        return Scaled<A>{static_cast<A>(clip(squares) / micro_batches())};
      } else {
        return Unscaled{};
      }
    }();
    UpdatePass<Rule, T, std::remove_const_t<decltype(scale)>, Traits::stops_at_anomaly> pass{
        Rule::template at<A>(this->options(), rate_, number()),
        reinterpret_cast<T*>(parameters_ + run.offset),
        {},
        slice.begin,
        scale};
    const std::size_t stride = align_up(slice.count() * sizeof(A));
    for (std::size_t k = 0; k != Rule::states; ++k) {
      pass.states[k] = reinterpret_cast<A*>(states_.data() + slice.states + k * stride);
    }
    return pass;
  }

  /// A pass over a run: `pass(at, averages)` updates elements from `at` on. Constants are computed
  /// here.
  template <class T>
  auto make_pass(const Run& run, const Slice& slice, double squares) const {
    using A = Accumulator<T>;
    auto pass = update_pass<T>(run, slice, squares);
    if constexpr (!Traits::counts_updates && !Traits::has_groups && !Traits::stops_at_anomaly) {
      return pass;
    } else {
      std::array<decltype(pass.update), Traits::has_groups ? Traits::groups::count : 0> constants;
      for (std::size_t group = 0; group != constants.size(); ++group)
        constants[group] = constants_of<A>(group, number());
      return [this, &run, slice, pass, constants](std::size_t at, std::span<const T> averages,
                                                  auto... sources) {
        bool finite = true;
        if constexpr (Traits::counts_updates) {
          finite = this->update_used(run, slice, pass, at, averages);
        } else if constexpr (Traits::has_groups) {
          finite = update_groups(run, pass, constants, at, averages);
        } else {
          finite = pass(at, averages);
        }
        if constexpr (Traits::stops_at_anomaly) {
          if (!finite) [[unlikely]]
            anomaly_.note(run.offset, at, averages, std::span<T* const>(sources)...);
        }
      };
    }
  }

  void require_no_anomaly() {
    if constexpr (Traits::stops_at_anomaly) {
      if (anomaly_.is_there()) [[unlikely]]
        anomaly_.report(layout_, owned_.whose(), this->steps());
    }
  }

  /// Updates piece by piece, each with the constants of its group.
  template <class T, class Pass>
  bool update_groups(const Run& run, const Pass& pass, const auto& constants, std::size_t at,
                     std::span<const T> averages) const {
    bool finite = true;
    const std::size_t end = at + averages.size();
    const GroupPiece* piece = groups_.table.at(run.offset + at * sizeof(T));
    for (std::size_t begin = at; begin != end; ++piece) {
      const std::size_t stop = std::min(end, (piece->end - run.offset) / sizeof(T));
      finite &=
          pass.with(constants[piece->group], begin, averages.subspan(begin - at, stop - begin));
      begin = stop;
    }
    return finite;
  }

  /// The rule's constants for a group, in update `step`.
  template <class A>
  auto constants_of([[maybe_unused]] std::size_t group, std::uint64_t step) const {
    if constexpr (Traits::has_groups) {
      const auto options = this->group_options().of(group);
      return Rule::template at<A>(options, this->rate_of(options), step);
    } else {
      return Rule::template at<A>(this->options(), rate_, step);
    }
  }
  std::size_t group_of([[maybe_unused]] std::size_t parameter) const {
    if constexpr (Traits::has_groups) {
      return groups_.table.groups[parameter];
    } else {
      return 0;
    }
  }

  [[no_unique_address]] Owned owned_;
  const layout& layout_;
  std::byte* parameters_;
  [[no_unique_address]] typename Owned::Runs runs_;
  [[no_unique_address]] GroupsOf<Traits> groups_;
  HostArena states_;
  double rate_ = 0;
  double micro_batches_ = static_cast<double>(Traits::micro_batches);
  std::uint64_t skipped_ = 0;
  mutable NotedAnomaly anomaly_;  // in the update that is under way
};

template <class Traits, class Comm>
auto choose_owned() {
  if constexpr (Traits::shards) {
    return std::type_identity<OwnsShard<Traits, Comm>>{};
  } else if constexpr (Traits::shares_parameters) {
    return std::type_identity<OwnsSlice<Traits, Comm>>{};
  } else {
    return std::type_identity<OwnsAll<Traits, Comm>>{};
  }
}

template <class Traits, class Comm>
struct UpdaterOn<Cpu, Traits, Comm> {
  using type = HostUpdater<Traits, Comm, typename decltype(choose_owned<Traits, Comm>())::type>;
};

}  // namespace lockstep::detail
