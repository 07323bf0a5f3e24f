// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One replica of `ParallelStrategy<DP>`: a rank of DDP that is led through its steps.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/strategy/gathered_outputs.hpp"
#include "lockstep/strategy/placed_share.hpp"
#include "lockstep/strategy/shares.hpp"

namespace lockstep {

/// Its members are the phases of a step, each called on this replica's thread; whatever is between
/// two of them is the caller's. What fails before replicas begin to communicate is only thrown;
/// from then on all others are told, and the job is over.
template <class Model, class Policies, class Comm>
class DpReplica {
  using Ddp = BasicDdp<Model, Policies, Comm>;
  using Traits = DdpTraits<Model, Policies>;
  using Executing = typename Ddp::Executing;
  using Shares = PlacedShare<Executing, Traits::gathers_outputs>;
  template <class Batch>
  using Share = typename Shares::template Share<Batch>;

 public:
  using Loss = typename Ddp::Loss;
  /// Or do they stay on their device?
  static constexpr bool losses_are_numbers = std::is_same_v<Loss, double>;

  /// **Ranks** all replicas. **Host** blocks until all have come.
  DpReplica(Comm comm, Model model, Seed seed)
      : comm_(std::move(comm)),
        ddp_(comm_, std::move(model), seed),
        shares_(ddp_.execution_, comm_.rank().value()) {}

  Ddp& ddp() { return ddp_; }
  const Ddp& ddp() const { return ddp_; }

  /// Will the next micro-batch complete a step?
  bool completes() const { return ddp_.reducer_.micro_batches() + 1 >= Traits::micro_batches; }

  /// The optimizer's numbers are the first replica's.
  void follow(DpReplica& first) {
    if (this == &first) return;
    ddp_.optimizer() = first.ddp_.optimizer();
    ddp_.schedule() = first.ddp_.schedule();
  }

  void synchronize()
    requires requires(Comm& comm) { comm.synchronize(); }
  {
    comm_.synchronize();
  }

  /// Before the end: others may be at work on memory of this one. Is all its work done? Not where
  /// it has failed before.
  bool settle() {
    if constexpr (requires(Comm& comm) { comm.synchronize(); }) {
      try {
        comm_.synchronize();
      } catch (const std::exception&) {
        return false;
      }
    }
    return true;
  }

  /// The first replica's buffers are everybody's before every forward.
  void synchronize_buffers() {
    if constexpr (Traits::broadcasts_buffers) ddp_.guard([&] { ddp_.synchronize_buffers(); });
  }

  // What is gathered on the first replica.

  void join_outputs(DpReplica& root)
    requires(Traits::gathers_outputs)
  {
    outputs_.join(root.outputs_, ddp_.execution_.is_far_from(root.ddp_.execution_));
  }
  std::size_t output_capacity() const { return outputs_.capacity(); }
  void reserve_outputs(std::size_t rows) { outputs_.reserve(ddp_.model_, rows); }

  // A step.

  /// Takes its share of a batch.
  template <class Batch>
  void take(const Batch& batch, const BatchCut& cut, const BatchPart& part) {
    part_ = part;
    if constexpr (Traits::weighs_shares) ddp_.reducer_.weigh(weight());
    shares_.take(batch, cut, part);
  }

  template <class Batch>
  void forward() {
    synchronize_buffers();
    if (has_samples()) loss_.emplace(ddp_.forward_through(shares_.template share<Batch>(), false));
  }

  /// Where a loss stays on its device, that of all samples is made there.
  void average_losses() {
    if constexpr (!losses_are_numbers && Traits::weighs_shares)
      ddp_.guard([&] { ddp_.execution_.average_loss(weight()); });
  }

  /// Where parameters are shared nothing travels before backward is over, and all may think again.
  template <class Batch>
  void backward(bool last) {
    average_losses();
    if constexpr (Traits::shares_parameters) {
      run_backward<Batch>(last);
    } else {
      ddp_.guard([&] { run_backward<Batch>(last); });
    }
  }

  /// The step of all, once its last micro-batch is there.
  void update() { ddp_.run_reduce_and_update(); }

  /// Forgets the micro-batches of a step whose backward has failed somewhere.
  void forget_step() { ddp_.reducer_.finish_step(); }

  // A step whose loss is taken of all outputs: after `take`, and before `backward`.

  template <class Batch>
  void predict() {
    using Outputs = decltype(outputs_.outputs(RowRange{}));
    using Gradients = decltype(outputs_.gradients(RowRange{}));
    using Whole = typename Shares::template Whole<Batch>;
    static_assert(
        require_parts<Model, typename Ddp::step_type, Share<Batch>, Whole, Outputs, Gradients>());
    synchronize_buffers();
    if (!has_samples()) return;
    ddp_.with_step([&](auto& step) {
      ddp_.model_.predict(step, shares_.template share<Batch>(), outputs_.outputs(part_.samples));
    });
    outputs_.deliver(ddp_.execution_, part_.samples);
  }

  template <class Batch>
  void take_loss() {
    await_others();
    if (!is_root()) return;
    loss_.emplace(ddp_.with_step([&](auto& step) {
      return ddp_.execution_.loss(ddp_.model_, step, shares_.template whole<Batch>(),
                                  outputs_.all_outputs(part_.all),
                                  outputs_.all_gradients(part_.all));
    }));
  }

  // A step as one graph, after `take`. It is captured by all replicas together, so there is no
  // time to think again.

  /// Tells shares in other places and of other sizes apart.
  template <class Batch>
  std::uint64_t digest() {
    Hash hash;
    hash.number(part_.samples.count);
    if constexpr (std::has_unique_object_representations_v<Share<Batch>>) {
      if (has_samples()) {
        const Share<Batch>& own = shares_.template share<Batch>();
        hash.text({reinterpret_cast<const char*>(&own), sizeof own});
      }
    }
    return hash.value();
  }

  template <class Batch>
  void run_captured(bool last, std::uint64_t variant) {
    static_assert(std::default_initializable<Share<Batch>>,
                  "lockstep: a step of DP can be captured for batches that can be empty; give the "
                  "batch a default constructor, or leave CapturedStep out");
    const Share<Batch> nothing{};
    ddp_.guard([&] {
      if (last) ddp_.updater_.begin();
      ddp_.execution_.captured(
          has_samples() ? shares_.template share<Batch>() : nothing, last, ddp_.reducer_,
          [&] { enqueue<Batch>(last); }, variant);
    });
  }

  // Evaluation, after `take`.

  template <class Batch>
  void evaluate() {
    synchronize_buffers();
    if (has_samples())
      loss_.emplace(
          ddp_.execution_.forward(ddp_.model_, ddp_.bare_, shares_.template share<Batch>()));
  }
  template <class Batch, class Tally>
  void evaluate(Tally& tally) {
    synchronize_buffers();
    if (has_samples())
      ddp_.evaluate_placed(shares_.template share<Batch>(), tally,
                           [&] { return part_.samples.count; });
  }
  /// Has the model an evaluation of its own?
  template <class Batch, class Tally>
  static constexpr bool has_evaluation =
      requires(Model& model, typename Ddp::bare_step& step, const Share<Batch>& share,
               Tally& tally) { model.evaluate(step, share, tally); };

  /// Its part of the mean over all samples.
  double loss_part() const {
    if (!has_samples()) return 0;
    return loss_.value() *
           (static_cast<double>(part_.samples.count) / static_cast<double>(part_.all));
  }
  Loss loss() const {
    if constexpr (losses_are_numbers) {
      return loss_.value();
    } else {
      return ddp_.execution_.latest_loss();
    }
  }

 private:
  bool is_root() const { return comm_.rank() == Rank{0}; }
  bool has_samples() const { return part_.samples.count != 0; }

  /// Gradients are averaged over replicas: one that has more than the mean of all counts more.
  double weight() const {
    return static_cast<double>(comm_.world_size().value() * part_.samples.count) /
           static_cast<double>(part_.all);
  }

  /// **Stream** after what all replicas have enqueued. On the host, what they did is done.
  void await_others() {
    if constexpr (requires { comm_.order_streams(); }) ddp_.guard([&] { comm_.order_streams(); });
  }

  template <class Batch>
  void run_backward(bool last) {
    if constexpr (Traits::gathers_outputs) await_others();
    if (!has_samples()) {
      ddp_.reducer_.sit_out(last);
    } else if constexpr (Traits::gathers_outputs) {
      outputs_.fetch(ddp_.execution_, part_.samples);
      ddp_.backward_through(shares_.template share<Batch>(), last,
                            outputs_.gradients(part_.samples));
    } else {
      ddp_.backward_through(shares_.template share<Batch>(), last);
    }
  }

  template <class Batch>
  void enqueue(bool last) {
    if constexpr (Traits::gathers_outputs) {
      predict<Batch>();
      take_loss<Batch>();
    } else {
      forward<Batch>();
      average_losses();
    }
    run_backward<Batch>(last);
    if (last) ddp_.updater_.reduce_and_update(ddp_.reducer_);
  }

  Comm comm_;
  Ddp ddp_;
  Shares shares_;
  BatchPart part_;
  std::optional<Loss> loss_;
  [[no_unique_address]] typename std::conditional_t<
      Traits::gathers_outputs,
      std::type_identity<GatheredOutputs<Model, typename Traits::memory, Executing>>,
      std::type_identity<NothingGathered>>::type outputs_;
};

}  // namespace lockstep
