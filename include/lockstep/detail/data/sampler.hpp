// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Samplers: their policies, the samples of each rank, and a job's position in its data.

#include <iterator>

#include "lockstep/detail/data/order.hpp"

namespace lockstep {

/// The position in an epoch, from `state()` of samplers and loaders, for `resume`. It is the same
/// on every rank. Ranks draw positions of the epoch's order in turn, so that after `position` draws
/// of each of `world` ranks exactly the positions below `first + position * world` are done: this
/// is all that a job with another number of ranks needs.
struct SamplerState {
  std::size_t samples = 0;
  WorldSize world;
  Seed seed;
  std::uint64_t rule = 0;  ///< hash of remainder and order
  Epoch epoch;
  std::size_t first = 0;     ///< positions that were done when this world began
  std::size_t position = 0;  ///< finished draws of each rank of this world

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

namespace axes {
struct Sampler : WithName<"Sampler"> {};
struct Remainder : WithName<"Remainder"> {};
}  // namespace axes

/// Rank r of W draws every W-th sample from the r-th on, as PyTorch's DistributedSampler.
struct Distributed : WithName<"Distributed">, Choice<axes::Sampler> {};

/// The first samples are repeated to fill the last round: PyTorch's default. Biases evaluation.
struct Padding : WithName<"Padding">, Choice<axes::Remainder> {};

/// Samples that do not divide evenly are left out of the epoch.
struct DropLast : WithName<"DropLast">, Choice<axes::Remainder> {};

/// Every sample is drawn once; ranks may differ by one draw.
struct Exact : WithName<"Exact">, Choice<axes::Remainder> {};

/// Ranks draw equally many samples; the added duplicates have weight 0.
struct Masked : WithName<"Masked">, Choice<axes::Remainder> {};

/// The policy of which samples a rank draws: `Sampler<Distributed, DropLast>`.
template <class Scheme, class Rest = Padding, class Sequence = TorchShuffle>
struct Sampler : detail::ChoicePolicy<axes::Sampler, Scheme> {
  using remainder = Rest;
  using order = Sequence;
  static constexpr bool well_formed = detail::ChoiceOf<Scheme, axes::Sampler> &&
                                      detail::ChoiceOf<Rest, axes::Remainder> &&
                                      detail::ChoiceOf<Sequence, axes::Order>;
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Sampler::name).text(Scheme::name).text(Rest::name);
    detail::add_choice<Sequence>(hash);
  }
};

namespace detail {

/// Throws unless samplers in these states draw in the same order, for any number of ranks.
void require_same_draws(const SamplerState& own, const SamplerState& saved);

/// A rank's share of positions [first, n) of an epoch's order; `first` is not 0 if another world
/// began the epoch. Draw k is the sample at position `(first + r + k*W) mod n`; the remainder
/// policy decides how many draws there are, and which count. For W > n the order repeats.
template <class Remainder>
class Share {
 public:
  constexpr Share(std::size_t samples, WorldSize world, Rank rank, std::size_t first = 0)
      : samples_(samples), world_(world.value()), rank_(rank.value()), first_(first) {
    if (rank_ >= world_)
      detail::fail("DistributedSampler", {"rank ", rank_, " of a world of ", world_},
                   "ranks count from 0 and are below the world size");
  }

  constexpr std::size_t samples() const { return samples_; }
  constexpr WorldSize world() const { return WorldSize{world_}; }
  constexpr Rank rank() const { return Rank{rank_}; }
  constexpr std::size_t first() const { return first_; }

  /// The number of draws of the rank that has most.
  constexpr std::size_t longest() const {
    if constexpr (std::is_same_v<Remainder, DropLast>) return shared() / world_;
    return shared() / world_ + (shared() % world_ != 0);
  }

  constexpr std::size_t size() const {
    if constexpr (std::is_same_v<Remainder, Exact>)
      return shared() / world_ + (rank_ < shared() % world_);
    return longest();
  }

  /// The position of draw k in the order of the epoch.
  constexpr std::size_t index(std::size_t k) const {
    const std::size_t at = first_ + rank_ + k * world_;
    return at < samples_ ? at : at % samples_;
  }

  constexpr float weight(std::size_t k) const {
    if constexpr (std::is_same_v<Remainder, Masked>)
      return first_ + rank_ + k * world_ < samples_ ? 1.f : 0.f;
    return 1.f;
  }

 private:
  constexpr std::size_t shared() const { return samples_ - first_; }

  std::size_t samples_;
  std::size_t world_;
  std::size_t rank_;
  std::size_t first_;
};

}  // namespace detail

/// How a `DistributedSampler` draws.
struct SamplerOptions {
  bool shuffle = true;  ///< false: in order, regardless of the order policy
  Seed seed{0};         ///< the same on every rank
};

/// PyTorch's DistributedSampler, index for index with `Padding` or `DropLast` under `TorchShuffle`.
/// Iteration begins at the epoch's first draw, or after `resume` where the state was taken, with
/// any number of ranks. Without `set_epoch`, all epochs have the same order.
template <class Remainder = Padding, class Order = TorchShuffle>
class DistributedSampler {
  static_assert(detail::ChoiceOf<Remainder, axes::Remainder> &&
                    detail::ChoiceOf<Order, axes::Order>,
                "lockstep: DistributedSampler takes a remainder (Padding, DropLast, Exact, Masked) "
                "and an order (TorchShuffle, KeyedShuffle, BlockShuffle<4096, 16>, InOrder)");

 public:
  static constexpr bool masks = std::is_same_v<Remainder, Masked>;

  DistributedSampler(std::size_t samples, WorldSize world, Rank rank, SamplerOptions options = {})
      : share_(samples, world, rank), options_(options) {}

  std::size_t samples() const { return share_.samples(); }
  WorldSize world() const { return share_.world(); }
  Rank rank() const { return share_.rank(); }
  Epoch epoch() const { return epoch_; }

  /// This rank's draws in an epoch, or in the rest of another world's epoch.
  std::size_t size() const { return share_.size(); }

  /// The sample of draw k < size(). An epoch's first call must return before other threads call.
  std::size_t operator[](std::size_t k) const {
    if (!options_.shuffle) return share_.index(k);
    if (!prepared_) {
      order_.prepare(share_, options_.seed, epoch_);
      prepared_ = true;
    }
    return order_.at(share_, k);
  }

  /// The weight of draw k: 0 for duplicates under `Masked`, otherwise 1.
  float weight(std::size_t k) const { return share_.weight(k); }

  /// Begins another epoch. Setting the current (maybe resumed) epoch again changes nothing.
  void set_epoch(Epoch epoch) {
    if (epoch == epoch_) return;
    epoch_ = epoch;
    position_ = 0;
    resumed_ = false;
    prepared_ = false;
    share_from(0);
  }

  /// The number of finished draws of `size()`.
  std::size_t position() const { return position_; }

  /// Returns to the first draw of the epoch, except once after `resume`.
  void start() {
    if (!resumed_) {
      position_ = 0;
      share_from(0);
    }
    resumed_ = false;
  }

  void advance(std::size_t draws) { position_ += draws; }

  SamplerState state() const {
    return {share_.samples(), share_.world(), options_.seed, rule(),
            epoch_,           share_.first(), position_};
  }

  /// Continues from `state`, taken on any rank of a job with the same data. Another number of ranks
  /// shares the unfinished positions; only the remainder policy loses or repeats samples.
  void resume(SamplerState state) {
    detail::require_same_draws(this->state(), state);
    if (state.first > samples() || state.world.value() == 0)
      detail::fail("DistributedSampler",
                   {"the saved state has index ", state.first, " of ", samples(), " in a world of ",
                    state.world.value()},
                   "resume from a state that state() gave");
    const detail::Share<Remainder> before(samples(), state.world, Rank{0}, state.first);
    if (state.position > before.longest())
      detail::fail(
          "DistributedSampler",
          {"the saved state is at draw ", state.position, " of an epoch of ", before.longest()},
          "resume from a state that state() gave");
    if (state.world != world()) {
      // After the longest share all positions are finished, even with `DropLast`.
      const bool is_over = state.position == before.longest();
      state.first = is_over ? samples() : state.first + state.position * state.world.value();
      state.position = 0;
    }
    set_epoch(state.epoch);
    share_from(state.first);
    position_ = std::min(state.position, size());  // under Exact, ranks may differ by one
    resumed_ = true;
  }

  // For a rank that reads for others.

  detail::Share<Remainder> share_of(Rank rank) const {
    return {samples(), world(), rank, share_.first()};
  }
  /// The epoch's order: draw k is the sample at position k.
  DistributedSampler<Exact, Order> whole() const {
    DistributedSampler<Exact, Order> order(samples(), WorldSize{1}, Rank{0}, options_);
    order.set_epoch(epoch_);
    return order;
  }

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

namespace detail {

/// Contiguous blocks: every rank but the last ones has ceil(n / W) samples, so that the blocks of
/// all ranks, padded to that length, are the samples in order with the padding at the end.
class BlockSampler {
 public:
  static constexpr bool masks = false;

  BlockSampler(std::size_t samples, WorldSize world, Rank rank)
      : samples_(samples),
        longest_((samples + world.value() - 1) / world.value()),
        first_(std::min(rank.value() * longest_, samples)) {}

  std::size_t samples() const { return samples_; }
  /// The number of samples of rank 0.
  std::size_t longest() const { return longest_; }
  std::size_t first() const { return first_; }
  std::size_t size() const { return std::min(longest_, samples_ - first_); }
  std::size_t operator[](std::size_t k) const { return first_ + k; }
  static float weight(std::size_t) { return 1; }

  std::size_t position() const { return position_; }
  void start() { position_ = 0; }
  void advance(std::size_t draws) { position_ += draws; }
  SamplerState state() const { return {}; }
  void resume(const SamplerState&) {}

  // For a rank that reads for others: see DistributedSampler.
  BlockSampler share_of(Rank rank) const {
    BlockSampler share = *this;
    share.first_ = std::min(rank.value() * longest_, samples_);
    return share;
  }
  BlockSampler whole() const { return {samples_, WorldSize{1}, Rank{0}}; }
  std::size_t index(std::size_t k) const { return first_ + k; }

 private:
  std::size_t samples_;
  std::size_t longest_;
  std::size_t first_;
  std::size_t position_ = 0;
};

}  // namespace detail

}  // namespace lockstep
