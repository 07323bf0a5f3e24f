// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file One replica of `ParallelStrategy<DP>`, whose steps are run phase by phase together with
/// others.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/gathered_outputs.hpp"
#include "lockstep/strategy/placed_share.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/shares.hpp"
#include "lockstep/strategy/step_graphs.hpp"
#include "lockstep/strategy/tell_others.hpp"

namespace lockstep::detail {

/// Its members are the phases of a step, each called on this replica's thread. A failure before
/// replicas begin to communicate is only thrown; from then on all other replicas are told, and the
/// job is over.
template <class Model, class Policies, class Comm>
class DpReplica {
  using ThisReplica = Replica<Model, Policies, Comm>;
  using traits = typename ThisReplica::traits;
  using execution_type = typename ThisReplica::execution_type;
  using Shares = PlacedShare<execution_type, traits::gathers_outputs>;
  /// Have replicas outputs to gather, for the loss or for a program that asks for them?
  static constexpr bool has_outputs = traits::scatters && OutputDeclaring<Model>;
  template <class Batch>
  using Share = typename Shares::template Share<Batch>;

 public:
  using Loss = typename ThisReplica::Loss;
  /// Does the loss of a replica stay on its device?
  static constexpr bool defers_loss = LossDeferring<execution_type>;
  /// Has the model an evaluation of its own?
  template <class Batch, class Tally>
  static constexpr bool has_evaluation =
      EvaluationRunning<Model, typename ThisReplica::evaluation_step, Share<Batch>, Tally>;

  /// `root` is the replica that gathers outputs and takes their loss. **Ranks** all replicas.
  /// **Host** blocks until all have come.
  DpReplica(Comm comm, Model model, Seed seed, Rank root)
      : comm_(std::move(comm)),
        root_(root),
        replica_(comm_,
                 tell_others_of<traits::alone>(
                     comm_, [&] { return typename ThisReplica::layouts_type(model); }),
                 std::move(model)),
        shares_(replica_.execution(), comm_.rank().value(), comm_.rank() == root) {
    tell([&] { replica_.initialize_from_model(seed); });
  }

  ThisReplica& replica() { return replica_; }
  const ThisReplica& replica() const { return replica_; }

  /// Takes over the numbers of the first replica's optimizer.
  void follow(DpReplica& first) {
    if (this == &first) return;
    replica_.group_options() = first.replica_.group_options();
    replica_.schedule() = first.replica_.schedule();
  }

  /// **Host** blocks until the replica's device is idle.
  void synchronize() {
    if constexpr (StreamCommunicator<Comm>) comm_.synchronize();
  }

  /// Waits before the end, because others may use this replica's memory; not after a failure.
  void settle() {
    try {
      synchronize();
    } catch (const std::exception&) {
      return;
    }
  }

  template <class F>
  void initialize(const F& f, Seed seed) {
    tell([&] { replica_.initialize(f, seed); });
  }

  /// Gives all replicas the first replica's buffers, or their average with `Buffers<Synced>`.
  void synchronize_buffers() {
    if constexpr (traits::unites_buffers) tell([&] { replica_.synchronize_buffers(); });
  }

  // The outputs that are gathered on one replica.

  void join_outputs(DpReplica& root)
    requires(has_outputs)
  {
    outputs_.join(root.outputs_, replica_.execution().is_far_from(root.replica_.execution()));
  }
  std::size_t output_capacity() const { return outputs_.capacity(); }
  void reserve_outputs(std::size_t rows) { outputs_.reserve(replica_.model(), rows); }

  // A step.

  /// Takes its share of a batch.
  template <class Batch>
  void take(const Batch& batch, const BatchCut& cut, const BatchPart& part) {
    replica_.select_device();
    part_ = part;
    if constexpr (traits::weighs_shares) replica_.weigh(weight());
    shares_.take(batch, cut, part);
  }

  template <class Batch>
  void forward() {
    broadcast_buffers();
    if (has_samples())
      run_model([&] { loss_.emplace(replica_.forward(share<Batch>(), Sync::no)); });
  }

  /// Computes the mean loss over all samples on the devices, where losses stay there.
  void average_losses() {
    if constexpr (defers_loss && traits::weighs_shares)
      tell([&] { replica_.execution().average_loss(weight()); });
  }

  /// Ends an evaluation. Where the loss is taken of all outputs, the next batch's outputs come
  /// after it: without that, a fast replica would overwrite rows that the loss still reads. In a
  /// step, `backward` waits for the loss.
  void end_evaluation() {
    average_losses();
    if constexpr (traits::gathers_outputs) await_others();
  }

  /// Replicas that share parameters communicate only after backward, if their norms do not, so a
  /// model that fails here ends its batch and not the job.
  template <class Batch>
  void backward(Sync sync) {
    average_losses();
    if constexpr (traits::shares_parameters) {
      run_model([&] { run_backward<Batch>(sync); });
    } else {
      tell([&] { run_backward<Batch>(sync); });
    }
  }

  /// The update of all replicas, after the last micro-batch of a step.
  void update() {
    tell([&] {
      replica_.begin_update();
      replica_.reduce_and_update();
    });
  }

  /// A step of the micro-batches that were too few for one.
  void step_tail() {
    tell([&] { replica_.step_tail(); });
  }
  void require_finite() {
    tell([&] { replica_.require_finite(); });
  }

  // A step whose loss is taken of all outputs: after `take`, and before `backward`. An evaluation
  // does the same, without training.

  template <class Batch, bool Trains>
  void predict() {
    if constexpr (has_parts<Batch>()) write_outputs<Batch, Trains>();
  }

  template <class Batch, bool Trains>
  void take_loss() {
    await_others();
    if (comm_.rank() != root_) return;
    if constexpr (has_parts<Batch>()) {
      loss_.emplace(with_step_of<Trains>([&](auto& step) {
        return replica_.execution().loss(replica_.model(), step, shares_.template whole<Batch>(),
                                         outputs_.all_outputs(part_.all),
                                         outputs_.all_gradients(part_.all));
      }));
      if constexpr (Trains) replica_.require_finite_loss(*loss_);
    }
  }

  // Outputs that a program asks for, after `take`. Where replicas are on GPUs, all of them must be
  // idle before the outputs are read.

  template <class Batch>
  void predict_only()
    requires(has_outputs)
  {
    static_assert(require_prediction<Model, typename ThisReplica::evaluation_step, Share<Batch>,
                                     decltype(outputs_.outputs(RowRange{}))>());
    write_outputs<Batch, false>();
    synchronize();
  }
  auto all_outputs() const { return outputs_.all_outputs(part_.all); }

  // A step as one graph, after `take`. All replicas capture it together, so that any failure ends
  // the job.

  /// A number that differs for shares of another place or size.
  template <class Batch>
  std::uint64_t digest() {
    Hash hash;
    hash.number(part_.samples.count);
    if constexpr (std::has_unique_object_representations_v<Share<Batch>>) {
      if (has_samples()) {
        const Share<Batch>& own = share<Batch>();
        hash.text({reinterpret_cast<const char*>(&own), sizeof own});
      }
    }
    return hash.value();
  }

  template <class Batch>
  void run_captured(std::uint64_t variant) {
    static_assert(std::default_initializable<Share<Batch>>,
                  "lockstep: a step of DP can be captured for batches that can be empty; give the "
                  "batch a default constructor, or leave CapturedStep out");
    const Share<Batch> nothing{};
    tell([&] {
      replica_.note_subgraph();
      if (replica_.completes_step()) replica_.begin_update();
      runner_.run(
          replica_, has_samples() ? share<Batch>() : nothing, [&] { enqueue<Batch>(); }, variant);
    });
  }

  /// The step of a replica that is alone in its world.
  template <class Batch>
  Loss run_alone(const Batch& batch, std::size_t subgraph) {
    return run_step(replica_, runner_, replica_.place(batch), subgraph);
  }

  /// How many graphs there are for batches of this type.
  template <class Batch>
  std::size_t graphs() {
    using Alone = std::remove_cvref_t<decltype(replica_.place(std::declval<const Batch&>()))>;
    using Placed = typename std::conditional_t<traits::alone, std::type_identity<Alone>,
                                               std::type_identity<Share<Batch>>>::type;
    return runner_.template graphs<ThisReplica, Placed>();
  }

  // Evaluation, after `take`.

  template <class Batch>
  void evaluate() {
    synchronize_buffers();
    if (has_samples()) loss_.emplace(replica_.evaluate(share<Batch>()));
  }
  template <class Batch, class Tally>
  void evaluate(Tally& tally) {
    synchronize_buffers();
    if (has_samples())
      replica_.evaluate(share<Batch>(), tally, [&] { return part_.samples.count; });
  }

  /// This replica's part of the mean loss over all samples.
  double loss_part() const {
    if (!has_samples()) return 0;
    return loss_.value() *
           (static_cast<double>(part_.samples.count) / static_cast<double>(part_.all));
  }
  Loss loss() {
    if constexpr (defers_loss) {
      return replica_.execution().latest_loss();
    } else {
      return loss_.value();
    }
  }

 private:
  template <class F>
  void tell(const F& f) {
    tell_others(replica_, f);
  }

  /// Before a step, which averages nothing.
  void broadcast_buffers() {
    if constexpr (traits::broadcasts_buffers) synchronize_buffers();
  }

  /// Calls `f`, which runs the model. In training its norms may communicate.
  template <bool Trains = true, class F>
  void run_model(const F& f) {
    if constexpr (Trains && traits::syncs_norms) {
      tell(f);
    } else {
      f();
    }
  }

  /// Has the model all parts of such a step? A part that is missing is reported here, once.
  template <class Batch>
  static consteval bool has_parts() {
    using Outputs = decltype(outputs_.outputs(RowRange{}));
    using Gradients = decltype(outputs_.gradients(RowRange{}));
    return require_parts<Model, typename ThisReplica::step_type, Share<Batch>,
                         typename Shares::template Whole<Batch>, Outputs, Gradients>();
  }

  bool has_samples() const { return part_.samples.count != 0; }
  template <class Batch>
  const auto& share() {
    return shares_.template share<Batch>();
  }

  /// Gradients are averaged over replicas: one with more samples than the mean counts more.
  double weight() const {
    return static_cast<double>(comm_.world_size().value() * part_.samples.count) /
           static_cast<double>(part_.all);
  }

  /// **Stream** waits for the work that all replicas have enqueued. The host need not wait.
  void await_others() {
    if constexpr (StreamOrdering<Comm>) tell([&] { comm_.order_streams(); });
  }

  template <bool Trains, class F>
  auto with_step_of(const F& f) {
    if constexpr (Trains) {
      return replica_.with_step(f);
    } else {
      return replica_.with_evaluation_step(f);
    }
  }

  /// Writes the outputs of this replica's samples, and delivers them to where they are gathered.
  template <class Batch, bool Trains>
  void write_outputs() {
    if constexpr (Trains) {
      broadcast_buffers();
    } else {
      synchronize_buffers();
    }
    if (!has_samples()) return;
    run_model<Trains>([&] {
      with_step_of<Trains>([&](auto& step) {
        replica_.model().predict(step, share<Batch>(), outputs_.outputs(part_.samples));
      });
    });
    outputs_.deliver(replica_.execution(), part_.samples);
  }

  template <class Batch>
  void run_backward(Sync sync) {
    if constexpr (traits::gathers_outputs) await_others();
    if (!has_samples()) {
      replica_.backward_without_samples(sync);
    } else if constexpr (traits::gathers_outputs) {
      outputs_.fetch(replica_.execution(), part_.samples);
      replica_.backward(share<Batch>(), sync, outputs_.gradients(part_.samples));
    } else {
      replica_.backward(share<Batch>(), sync);
    }
  }

  template <class Batch>
  void enqueue() {
    const bool last = replica_.completes_step();
    if constexpr (traits::gathers_outputs) {
      predict<Batch, true>();
      take_loss<Batch, true>();
    } else {
      forward<Batch>();
      average_losses();
    }
    run_backward<Batch>(last ? Sync::yes : Sync::no);
    if (last) replica_.reduce_and_update();
  }

  Comm comm_;
  Rank root_;
  ThisReplica replica_;
  [[no_unique_address]] StepRunner<traits> runner_;
  Shares shares_;
  BatchPart part_;
  std::optional<Loss> loss_;
  [[no_unique_address]] OutputsOf<has_outputs, Model, typename traits::memory, execution_type>
      outputs_;
};

}  // namespace lockstep::detail
