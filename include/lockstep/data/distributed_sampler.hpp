// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DistributedSampler: the indices of the samples that a rank sees, epoch by epoch.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/order.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/data/sampler_state.hpp"
#include "lockstep/data/share.hpp"

namespace lockstep {

/// How a `DistributedSampler` draws.
struct SamplerOptions {
  bool shuffle = true;  ///< false: in order, whatever the order policy
  Seed seed{0};         ///< the same on every rank
};

/// PyTorch's DistributedSampler, index for index with `Padding` and `DropLast` under
/// `TorchShuffle`.
///
/// Iterating begins at the epoch's first draw; after `resume` it goes on where the state was taken,
/// by as many ranks or by others.
/// Call `set_epoch` before every epoch, or every epoch has the same order.
template <class Remainder = Padding, class Order = TorchShuffle>
class DistributedSampler {
  static_assert(detail::ChoiceOf<Remainder, axes::Remainder> &&
                    detail::ChoiceOf<Order, axes::Order>,
                "lockstep: DistributedSampler takes a remainder (Padding, DropLast, Exact, Masked) "
                "and an order (TorchShuffle, KeyedShuffle, BlockShuffle<4096, 16>, InOrder)");

 public:
  /// Whether some draws have weight 0.
  static constexpr bool masks = std::is_same_v<Remainder, Masked>;

  DistributedSampler(std::size_t samples, WorldSize world, Rank rank, SamplerOptions options = {})
      : share_(samples, world, rank), options_(options) {}

  std::size_t samples() const { return share_.samples(); }
  WorldSize world() const { return share_.world(); }
  Rank rank() const { return share_.rank(); }
  Epoch epoch() const { return epoch_; }

  /// How many samples this rank draws in an epoch; where another world has begun it, in what was
  /// left then.
  std::size_t size() const { return share_.size(); }

  /// The sample of draw k, for k < size(). The first call of an epoch makes its permutation, and
  /// must return before other threads call.
  std::size_t operator[](std::size_t k) const {
    if (!options_.shuffle) return share_.place(k);
    if (!prepared_) prepare();
    return order_.at(share_, k);
  }

  /// The weight of draw k: 0 for duplicates under `Masked`, otherwise 1.
  float weight(std::size_t k) const { return share_.weight(k); }

  /// Begins another epoch. Setting the current epoch again changes nothing, so that a loop over
  /// epochs can begin with the resumed one.
  void set_epoch(Epoch epoch) {
    if (epoch == epoch_) return;
    epoch_ = epoch;
    position_ = 0;
    resumed_ = false;
    prepared_ = false;
    share_from(0);
  }

  /// How many draws are over, of those that `size` counts.
  std::size_t position() const { return position_; }

  /// Goes back to the first draw of the epoch, except once after `resume`.
  void start() {
    if (!resumed_) {
      position_ = 0;
      share_from(0);
    }
    resumed_ = false;
  }

  /// Counts draws as over.
  void advance(std::size_t draws) { position_ += draws; }

  SamplerState state() const {
    return {share_.samples(), share_.world(), options_.seed, rule(),
            epoch_,           share_.first(), position_};
  }

  /// Goes on where `state` was taken, on any rank of a job with the same data. Where the number of
  /// ranks is another one, they share the places of the epoch's order that are not over: no sample
  /// is lost or drawn twice, except for the remainder of what is left, by its policy.
  void resume(SamplerState state) {
    detail::require_same_draws(this->state(), state);
    if (state.first > samples() || state.world.value() == 0)
      detail::fail("DistributedSampler",
                   {"the saved state has place ", state.first, " of ", samples(), " in a world of ",
                    state.world.value()},
                   "resume from a state that state() gave");
    const detail::Share<Remainder> before(samples(), state.world, Rank{0}, state.first);
    if (state.position > before.longest())
      detail::fail(
          "DistributedSampler",
          {"the saved state is at draw ", state.position, " of an epoch of ", before.longest()},
          "resume from a state that state() gave");
    if (state.world != world()) {
      state.first = before.over(state.position);
      state.position = 0;
    }
    set_epoch(state.epoch);
    share_from(state.first);
    position_ = std::min(state.position, size());  // under Exact, ranks may differ by one
    resumed_ = true;
  }

  /// Iterates over draws; the current one counts as over.
  class Iterator {
   public:
    using value_type = std::size_t;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(DistributedSampler& sampler) : sampler_(&sampler) { ++*this; }

    std::size_t operator*() const { return index_; }
    Iterator& operator++() {
      done_ = sampler_->position_ == sampler_->size();
      if (!done_) index_ = (*sampler_)[sampler_->position_++];
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return done_; }

   private:
    DistributedSampler* sampler_;
    std::size_t index_ = 0;
    bool done_ = false;
  };

  Iterator begin() {
    start();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

 private:
  void share_from(std::size_t first) {
    if (first == share_.first()) return;
    share_ = detail::Share<Remainder>(samples(), world(), rank(), first);
    prepared_ = false;
  }

  void prepare() const {
    order_.prepare(share_, options_.seed, epoch_);
    prepared_ = true;
  }

  std::uint64_t rule() const {
    detail::Hash hash;
    hash.text(Remainder::name);
    options_.shuffle ? detail::add_choice<Order>(hash) : hash.text(InOrder::name);
    return hash.value();
  }

  detail::Share<Remainder> share_;
  SamplerOptions options_;
  Epoch epoch_{0};
  std::size_t position_ = 0;
  bool resumed_ = false;
  mutable bool prepared_ = false;
  mutable detail::EpochOrder<Order> order_;
};

static_assert(std::input_iterator<DistributedSampler<>::Iterator>);

}  // namespace lockstep
