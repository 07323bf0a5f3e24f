// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updater: the optimizer of all parameters that a rank owns, on any device.

#include "lockstep/detail/strategy/sharding/fully_shard.hpp"

namespace lockstep::detail {

/// An update is `begin`, uncaptured, then `reduce_and_update` or `update_averaged`. **Ranks** all.
///
/// One pass reduces and updates while averages are in the cache, except where clipping, steps that
/// may be skipped or the zero-gradient filter need a first pass over all averages.
///
/// The execution supplies the passes: `observe`, `decide` and `pass`. On a GPU what changes from
/// step to step lies in device memory, where `begin` puts it: the rest can be replayed as a graph.
template <class Traits, class Comm, class Execution>
class Updater
    : public StepCounter<typename Traits::rule, typename Traits::curve, typename Traits::groups> {
  using layout = typename Traits::layout;
  using Rule = typename Traits::rule;
  using Arena = typename Execution::Arena;
  static constexpr bool divides = Traits::divides_states;
  using Passes = typename Execution::UpdatePasses;
  static constexpr bool decides = decides_steps<Traits>;
  static constexpr bool needs_first_pass = decides || Traits::skips_zero_gradients;

 public:
  using Owned = OwnedBy<Traits, Comm>;

  Updater(Comm& comm, Execution& execution, const layout& where, std::byte* parameters,
          JobGroupsOf<Traits, Comm>* groups = nullptr)
      : comm_(comm),
        execution_(execution),
        layout_(where),
        parameters_(parameters),
        owned_(comm, where, parameters, groups),
        masters_(Traits::keeps_masters ? widened(owned_.state_bytes()) : 0),
        states_(Rule::states * widened(owned_.state_bytes())),
        passes_(comm, execution, where, owned_, *this) {
    // Mixed types make all parameters one type, so that master weights are at twice the offsets.
    static_assert(!Traits::keeps_masters || Traits::kinds().size == 1);
  }
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;

  /// Begins an update from so many micro-batches; `factor` times the reduced sum is the average
  /// over ranks. On a GPU throws for earlier anomalies. **Stream** before the members below.
  void begin(std::size_t micro_batches = Traits::micro_batches, double factor = 1) {
    passes_.require_none_seen();
    this->advance();
    passes_.begin(micro_batches, factor);
  }

  /// Updates from each rank's own gradients. **Host** blocks until all ranks have the new
  /// parameters (with ZeRO, until gathers have started), or on a GPU enqueues.
  void reduce_and_update(auto& gradients) { run<false>(gradients); }
  /// The same after `gradients.average()`.
  void update_averaged(auto& gradients) { run<true>(gradients); }

  /// The number of updates that `Anomaly<Skip>` left out. **Host** on a GPU, blocks.
  std::uint64_t skipped() const { return passes_.state().skips; }
  /// Throws if a step had an anomaly. **Host** on a GPU, blocks until all steps are done.
  void require_finite() { passes_.require_finite(); }

  // States and master weights are packed in the order of the pieces that the rank owns.

  std::size_t state_bytes() const { return masters_.bytes() + states_.bytes(); }
  /// Calls `f(parameter, state name, values, first)` for every state, from element `first` on.
  void for_each_state(const auto& f) const {
    for (std::size_t p = 0; p != layout_.infos().size(); ++p) {
      if (!layout_.plan().is_trained(p)) continue;
      Traits::with_element(layout_.infos()[p].element, [&]<class T>(std::type_identity<T>) {
        using A = Accumulator<T>;
        owned_.for_each_of(p, [&](std::size_t first, std::size_t count, std::size_t offset) {
          const auto states = states_at(offset);
          for (std::size_t k = 0; k != Rule::states; ++k)
            f(p, state_name<Rule>(k), std::span<A>(reinterpret_cast<A*>(states[k]), count), first);
        });
      });
    }
  }
  /// Calls `f(values, first)` for the master weights of a parameter, from element `first` on.
  void for_each_master(std::size_t parameter, const auto& f) const {
    owned_.for_each_of(parameter, [&](std::size_t first, std::size_t count, std::size_t offset) {
      f(std::span<float>(reinterpret_cast<float*>(masters_at(offset)), count), first);
    });
  }
  /// The master weights of a bucket that this rank updates whole.
  std::span<float> masters_of(const Bucket& bucket) const
    requires(Traits::keeps_masters)
  {
    return {reinterpret_cast<float*>(masters_at(bucket.offset)), bucket.count()};
  }
  std::byte* masters_at(std::size_t offset) const {
    return masters_.data() + widened(owned_.kept(offset));
  }
  /// Each parameter's count of updates, in device memory, where updates leave parameters out.
  std::span<std::uint64_t> update_counts() { return passes_.updates(); }
  Owned& owned() { return owned_; }

  /// **Host** on a GPU, both block.
  void report_progress(ReplicaProgress& progress) const {
    Updater::StepCounter::report_progress(progress);
    const StepState state = passes_.state();
    progress.skipped = state.skips;
    progress.counted = decides ? state.updates : this->steps();
    if constexpr (Traits::scales_loss) progress.loss_scale = state.loss_scale;
  }
  void take_progress(const ReplicaProgress& progress) {
    Updater::StepCounter::take_progress(progress);
    StepState state = passes_.state();
    state.updates = progress.counted;
    state.skips = progress.skipped;
    if (progress.loss_scale) state.loss_scale = *progress.loss_scale;
    passes_.set_state(state);
    if constexpr (Traits::counts_updates) passes_.set_updates(progress.counted);
  }

  // Initial values: rank 0 writes the master weights of all parameters, in the parameters' layout.

  /// Memory for all master weights, if ranks divide them. **Ranks** all; next `finish_allocations`.
  Arena allocate_masters() const {
    return Arena(divides && Traits::keeps_masters ? widened(layout_.plan().bytes) : 0);
  }
  std::byte* masters_in(const Arena& allocated) const {
    if constexpr (!Traits::keeps_masters) return nullptr;
    return divides ? allocated.data() : masters_.data();
  }
  /// Gives ranks the master weights that they keep. **Ranks** all. **Stream** the compute stream.
  void distribute_masters(const Arena& allocated) const {
    std::byte* const all = masters_in(allocated);
    comm_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(all), widened(layout_.plan().bytes)),
                    Rank{0});
    if constexpr (!divides) return;
    owned_.template for_each<Pieces::buckets>([&](const auto& own) {
      if (own.count.value() != 0)
        execution_.copy(masters_at(own.offset), all + widened(own.offset),
                        own.count.value() * sizeof(float));
    });
  }

 private:
  std::byte* parameters_at(std::size_t offset) const {
    if constexpr (Traits::gathers_parameters) return owned_.kept_parameter(offset);
    return parameters_ + offset;
  }

  template <bool Averaged, class Gradients>
  void run(Gradients& gradients) {
    if constexpr (Traits::divides_by_live) passes_.count_live(gradients);
    if constexpr (Traits::notes_usage && !Traits::skips_zero_gradients) passes_.use(gradients);
    if constexpr (needs_first_pass) {
      owned_.template for_each<Passes::observed>(
          [&]<class T, std::size_t Count>(const UpdatePiece<T, Count>& piece) {
            if constexpr (!Averaged) owned_.template bring<Passes::observed>(gradients, piece);
            passes_.observe(piece, owned_.averages(gradients, piece));
          });
    }
    if (!passes_.decide(owned_)) return;
    constexpr bool is_fused = !needs_first_pass && !Averaged;
    owned_.template for_each<is_fused ? Owned::fused : Pieces::runs>(
        [&]<class T, std::size_t Count>(const UpdatePiece<T, Count>& piece) {
          update<is_fused>(gradients, piece);
        });
    passes_.end();
    owned_.publish(is_fused);
  }

  /// Updates a piece; a `Fused` pass reduces it first.
  template <bool Fused, class Gradients, class T, std::size_t Count>
  void update(Gradients& gradients, const UpdatePiece<T, Count>& piece) {
    const std::size_t first = owned_.first_of(piece);
    std::byte* const parameters = parameters_at(piece.offset);
    std::byte* const masters = Traits::keeps_masters ? masters_at(piece.offset) : parameters;
    const auto states = states_at(piece.offset);
    [[maybe_unused]] const typename Traits::span span(
        {Fused ? "reduce and update" : "update", piece.number, piece.bytes()});
    const auto pass = passes_.pass(piece, first, parameters, masters, states.data());
    if constexpr (Fused && requires { owned_.for_each_block(gradients, piece, pass); }) {
      owned_.for_each_block(gradients, piece, pass);
    } else {
      if constexpr (Fused) owned_.template bring<Owned::fused>(gradients, piece);
      pass(first, owned_.averages(gradients, piece));
    }
  }

  /// The states of the elements from `offset` on; one more, so that the array is never empty.
  std::array<std::byte*, Rule::states + 1> states_at(std::size_t offset) const {
    std::array<std::byte*, Rule::states + 1> states{};
    for (std::size_t k = 0; k != Rule::states; ++k)
      states[k] = states_.data() + widened(k * owned_.state_bytes()) + state_offset(offset);
    return states;
  }
  /// The offset of states or master weights, which are float for 16-bit elements.
  static constexpr std::size_t widened(std::size_t offset) {
    bool has_16_bits = false;
    for (std::size_t k = 0; k != Traits::kinds().size; ++k)
      has_16_bits = has_16_bits || element_size(Traits::kinds().kinds[k]) == 2;
    return has_16_bits ? 2 * offset : offset;
  }

  /// The offset of the state of the element at `offset`. A piece's states are contiguous; a piece
  /// of wider elements beside 16-bit ones fills half of its room.
  std::size_t state_offset(std::size_t offset) const {
    std::size_t found = widened(owned_.kept(offset));
    if constexpr (widened(1) != 1 && Traits::kinds().size != 1) {
      owned_.template for_each<Pieces::runs>(
          [&]<class T, std::size_t Count>(const UpdatePiece<T, Count>& piece) {
            if (sizeof(T) != 2 && piece.offset <= offset && offset < piece.offset + piece.bytes())
              found = widened(owned_.kept(piece.offset)) + (offset - piece.offset);
          });
    }
    return found;
  }

  Comm& comm_;
  Execution& execution_;
  const layout& layout_;
  std::byte* parameters_;  // with `FullyShard`, of frozen ones
  [[no_unique_address]] Owned owned_;
  Arena masters_;
  Arena states_;
  Passes passes_;
};

}  // namespace lockstep::detail
