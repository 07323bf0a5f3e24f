// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater: one optimizer over all parameters that a rank owns, on any device.

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/optim/constants.hpp"
#include "lockstep/optim/progress.hpp"
#include "lockstep/optim/update_clock.hpp"
#include "lockstep/strategy/optimizer_states.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/sharding/zero.hpp"

namespace lockstep::detail {

/// An update is `begin`, which settles the learning rate and is not captured, and then one of
/// `reduce_and_update` and `update_averaged`, after which all ranks have new parameters. **Ranks**
/// all.
///
/// Where nothing must be known of all averages first, one pass waits for them or reduces them, and
/// updates, while they are in the cache. Clipping, steps that may be skipped and the zero-gradient
/// filter take a first pass over all averages.
///
/// The device's passes are those of the execution: `observe`, `decide` and `pass`. On a GPU all
/// work is enqueued on the compute stream, and what changes from step to step lies in device
/// memory, where `begin` puts it: the rest may be replayed as part of a graph.
template <class Traits, class Comm, class Execution>
class Updater
    : public UpdateClock<typename Traits::rule, typename Traits::curve, typename Traits::groups> {
  using Clock = typename Updater::UpdateClock;
  using layout = typename Traits::layout;
  using Owned = OwnedBy<Traits, Comm>;
  using Passes = typename Execution::UpdatePasses;
  static constexpr bool decides = decides_steps<Traits>;
  static constexpr bool needs_first_pass = decides || Traits::skips_zero_gradients;

 public:
  Updater(Comm& comm, Execution& execution, const layout& where, std::byte* parameters)
      : parameters_(parameters),
        owned_(comm, where, parameters),
        kept_(comm, execution, where, owned_),
        passes_(comm, execution, where, owned_, *this) {}
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// Begins the next update, from the sum of so many micro-batches, which becomes the average over
  /// ranks by `factor`. On a GPU it throws if an earlier step had an anomaly, as far as the host
  /// knows. **Stream** before the members below.
  void begin(std::size_t micro_batches = Traits::micro_batches, double factor = 1) {
    passes_.require_none_seen();
    passes_.begin(this->advance(), micro_batches, factor);
  }

  /// From gradients that are each rank's own. **Host** blocks until the parameters are new on all
  /// ranks, or on a GPU enqueues.
  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    run<false>(gradients);
  }
  /// The same after `gradients.average()`.
  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    run<true>(gradients);
  }

  /// How many updates were left out because of `Anomaly<Skip>`. **Host** on a GPU, blocks.
  std::uint64_t skipped() const { return passes_.state().skips; }
  /// Throws if a step had an anomaly. **Host** on a GPU, blocks until all steps are done.
  void require_finite() { passes_.require_finite(); }

  /// The states and master weights of the parameters that this rank updates.
  const auto& kept() const { return kept_; }
  std::size_t state_bytes() const { return kept_.state_bytes(); }
  template <class F>
  void for_each_state(const F& f) const {
    kept_.for_each_state(f);
  }
  /// The master weights of a bucket, of which this rank updates all.
  std::span<float> masters_of(const Bucket& bucket) const
    requires(Traits::keeps_masters)
  {
    return {reinterpret_cast<float*>(kept_.masters_at(bucket.offset)), bucket.count()};
  }
  /// Where updates leave parameters out: how many each parameter had, in the device's memory.
  std::span<std::uint64_t> update_counts() { return passes_.updates(); }
  /// The parameters that are coming back from other ranks.
  auto& gathers()
    requires(Traits::shards)
  {
    return owned_.gathers();
  }

  /// **Host** on a GPU, both block.
  void tell_progress(ReplicaProgress& progress) const {
    Clock::tell_progress(progress);
    const StepState state = passes_.state();
    progress.skipped = state.skips;
    progress.counted = decides ? state.updates : this->steps();
    if constexpr (Traits::scales_loss) progress.loss_scale = state.loss_scale;
  }
  void take_progress(const ReplicaProgress& progress) {
    Clock::take_progress(progress);
    StepState state = passes_.state();
    state.updates = progress.counted;
    state.skips = progress.skipped;
    if (progress.loss_scale) state.loss_scale = *progress.loss_scale;
    passes_.set_state(state);
    if constexpr (Traits::counts_updates) passes_.set_updates(progress.counted);
  }

 private:
  template <bool Averaged, class Gradients>
  void run(Gradients& gradients) {
    if constexpr (Traits::divides_by_live) passes_.count_live(gradients);
    if constexpr (Traits::notes_usage && !Traits::skips_zero_gradients) passes_.use(gradients);
    if constexpr (needs_first_pass)
      owned_.template for_each<Passes::observed>(Observe<Averaged, Gradients>{*this, gradients});
    if (!passes_.decide(owned_)) return;
    constexpr bool is_fused = !needs_first_pass && !Averaged;
    owned_.template for_each<is_fused ? Owned::fused : Pieces::runs>(
        Apply<is_fused, Gradients>{*this, gradients});
    passes_.end();
    owned_.publish(is_fused);
  }

  /// The first pass.
  template <bool Averaged, class Gradients>
  struct Observe {
    Updater& self;
    Gradients& gradients;

    template <class T, std::size_t Count>
    void operator()(const UpdatePiece<T, Count>& piece) const {
      if constexpr (!Averaged) self.owned_.template bring<Passes::observed>(gradients, piece);
      self.passes_.observe(piece, self.owned_.averages(gradients, piece));
    }
  };

  /// The pass that updates, and in a `Fused` one reduces before.
  template <bool Fused, class Gradients>
  struct Apply {
    Updater& self;
    Gradients& gradients;

    template <class T, std::size_t Count>
    void operator()(const UpdatePiece<T, Count>& piece) const {
      const std::size_t first = self.owned_.first_of(piece);
      std::byte* const parameters = self.parameters_ + piece.offset;
      std::byte* const masters =
          Traits::keeps_masters ? self.kept_.masters_at(piece.offset) : parameters;
      const auto states = self.kept_.states_at(piece.offset);
      const auto pass = self.passes_.pass(piece, first, parameters, masters, states.data());
      if constexpr (Fused) {
        self.owned_.for_each_block(gradients, piece, pass);
      } else {
        pass(first, self.owned_.averages(gradients, piece));
      }
    }
  };

  std::byte* parameters_;
  [[no_unique_address]] Owned owned_;
  OptimizerStates<Traits, Comm, Execution> kept_;
  Passes passes_;
};

}  // namespace lockstep::detail
