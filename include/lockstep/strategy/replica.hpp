// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica: one model with its parameters, gradients and optimizer, on one rank.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/optim/anomaly.hpp"
#include "lockstep/strategy/anomaly_error.hpp"
#include "lockstep/strategy/concepts.hpp"
#include "lockstep/strategy/gathered_outputs.hpp"
#include "lockstep/strategy/gradient_buckets.hpp"
#include "lockstep/strategy/host_execution.hpp"
#include "lockstep/strategy/host_updater.hpp"
#include "lockstep/strategy/job_groups.hpp"
#include "lockstep/strategy/norm_step.hpp"
#include "lockstep/strategy/random_step.hpp"
#include "lockstep/strategy/replica_buffers.hpp"
#include "lockstep/strategy/replica_evaluation.hpp"
#include "lockstep/strategy/replica_graphs.hpp"
#include "lockstep/strategy/replica_hooks.hpp"
#include "lockstep/strategy/replica_kept.hpp"
#include "lockstep/strategy/replica_memory.hpp"
#include "lockstep/strategy/replica_options.hpp"
#include "lockstep/strategy/replica_steps.hpp"
#include "lockstep/strategy/replica_subgraphs.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/replica_uneven.hpp"
#include "lockstep/strategy/replica_values.hpp"
#include "lockstep/strategy/sharded_step.hpp"
#include "lockstep/strategy/subgraph_step.hpp"

namespace lockstep {

/// The parts of a training step. W ranks, each with a replica and its share of a batch, train like
/// one process on the whole batch; parameters are the same bits on all ranks after every step.
///
/// A replica tells nobody when it fails: the other ranks wait for it until their time limit. Its
/// clients decide whom to tell: `DDP` tells all ranks, `DP` throws as long as nothing has been
/// communicated.
///
/// A world that the compiler knows to be of one costs what the bare model costs.
template <class Model, class Policies, class Comm>
class Replica : public detail::ReplicaMemory<Replica<Model, Policies, Comm>>,
                public detail::ReplicaOptions<Replica<Model, Policies, Comm>>,
                public detail::ReplicaBuffers<Replica<Model, Policies, Comm>>,
                public detail::ReplicaValues<Replica<Model, Policies, Comm>>,
                public detail::ReplicaEvaluation<Replica<Model, Policies, Comm>>,
                public detail::ReplicaKept<Replica<Model, Policies, Comm>>,
                public detail::ReplicaUneven<Replica<Model, Policies, Comm>,
                                             detail::ReplicaTraits<Model, Policies>>,
                public detail::ReplicaHooks<Replica<Model, Policies, Comm>,
                                            detail::ReplicaTraits<Model, Policies>>,
                public detail::ReplicaSubgraphs<Replica<Model, Policies, Comm>,
                                                detail::ReplicaTraits<Model, Policies>>,
                public detail::ReplicaSteps<Replica<Model, Policies, Comm>,
                                            detail::ReplicaTraits<Model, Policies>>,
                public detail::ReplicaGraphs<Replica<Model, Policies, Comm>,
                                             detail::ReplicaTraits<Model, Policies>> {
  // Parts of this class, in headers of their own.
  friend class detail::ReplicaMemory<Replica>;
  friend class detail::ReplicaOptions<Replica>;
  friend class detail::ReplicaBuffers<Replica>;
  friend class detail::ReplicaValues<Replica>;
  friend class detail::ReplicaEvaluation<Replica>;
  friend class detail::ReplicaKept<Replica>;
  friend class detail::ReplicaUneven<Replica, detail::ReplicaTraits<Model, Policies>>;
  friend class detail::ReplicaHooks<Replica, detail::ReplicaTraits<Model, Policies>>;
  friend class detail::ReplicaSubgraphs<Replica, detail::ReplicaTraits<Model, Policies>>;
  friend class detail::ReplicaSteps<Replica, detail::ReplicaTraits<Model, Policies>>;
  friend class detail::ReplicaGraphs<Replica, detail::ReplicaTraits<Model, Policies>>;

 public:
  using model_type = Model;
  using traits = detail::ReplicaTraits<Model, Policies>;
  using communicator_type = Comm;
  using execution_type = detail::DeviceExecution<typename traits::device, traits, Comm>;
  using layouts_type = detail::TensorLayouts<traits>;
  using Sync = detail::Sync;
  /// On a GPU the host goes on, and waits for a loss when it is converted to a number.
  using Loss = typename execution_type::Loss;

 private:
  using Gradients = detail::GradientBuckets<traits, Comm, execution_type>;
  using Updating = typename detail::UpdaterOn<typename traits::device, traits, Comm>::type;
  static_assert(detail::Updater<Updating, Gradients>);
  using drawing_step = detail::RandomStepOf<traits, typename execution_type::Step>;

 public:
  using bare_step = detail::NormStepOf<traits, Comm, drawing_step>;
  /// The step that the model sees in an evaluation or a prediction.
  using evaluation_step = detail::EvaluationStep<bare_step>;
  /// The step that the model's forward and backward get.
  using step_type = detail::StepOf<traits, Model, bare_step, Gradients, Updating>;
  using subgraphs = typename traits::subgraphs;

  /// Compares the job over ranks, then gives all of them rank 0's initial values. **Ranks** all.
  /// **Host** blocks.
  explicit Replica(Comm& comm, Model model = {}, Seed seed = {})
      : Replica(comm, layouts_type(model), std::move(model)) {
    this->initialize_from_model(seed);
  }
  /// Leaves out the initial values: parameters are zero until `initialize`.
  Replica(Comm& comm, layouts_type layouts, Model&& model)
      : built_(comm),
        comm_(comm),
        model_(std::move(model)),
        execution_(comm),
        layouts_(std::move(layouts)),
        parameters_(this->template agree_and_allocate<Policies>()),
        groups_(comm),
        buffers_(this->allocate(layouts_.buffers.plan().bytes)),
        gradients_(comm, execution_, layouts_.parameters),
        updater_(comm, execution_, layouts_.parameters, parameters_),
        random_(comm),
        step_(this->make_step(gradients_.arena())),
        copies_(comm) {
    if constexpr (traits::shards_groups) {
      gradients_.use(groups_);
      updater_.gathers().use(groups_);
    }
    built_.leave();
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;
  ~Replica() { built_.return_to(comm_); }

  /// The calling thread works on this replica's GPU while the result lives, whatever its current
  /// one is. The members that a program calls do so by themselves.
  [[nodiscard]] auto on_device() const { return typename execution_type::OnDevice(comm_); }
  /// The same for good, on a thread of the library that a model may have led to another GPU.
  void select_device() const { execution_type::OnDevice::select(comm_); }

  Model& model() { return model_; }
  const Model& model() const { return model_; }
  Comm& communicator() { return comm_; }
  /// The communicators of the job's groups, `Groups<...>`.
  auto& groups() { return groups_; }
  execution_type& execution() { return execution_; }

  auto param(auto key) const {
    let_host_look();
    return step_.param(key);
  }
  auto buffer(auto key) const { return step_.buffer(key); }
  /// After `reduce`, the average over ranks; before, this rank's own.
  auto grad(auto key) const {
    static_assert(!traits::frees_gradients || sizeof(key) == 0,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> no rank has whole gradients "
                  "to look at; use ZeroRedundancy alone");
    return step_.grad(key);
  }

  // The parts of a step. A batch is placed first, and stays until the next of its type is placed.

  /// A batch where the model can read it.
  const auto& place(const auto& batch) { return execution_.place(batch); }

  /// The model draws other random numbers from now on, those of the next micro-batch. It comes
  /// before `forward` and `begin_update`, and is not captured. **Stream** on a GPU, in its order.
  void draw_anew() {
    if constexpr (traits::draws) random_.move_to(this->updates(), micro_batches_);
  }

  /// How many micro-batches are added up.
  std::size_t micro_batches() const { return micro_batches_; }

  /// Is the next micro-batch the last of `Accumulate<N>`?
  bool completes_step() const {
    if constexpr (!traits::tracks) return true;
    return micro_batches_ + 1 >= traits::micro_batches;
  }

  /// The model's loss of a batch. With `Sync::yes` all ranks have rank 0's buffers first. **Ranks**
  /// all, or with `Sync::no` and without `Norms<Synced>` this one.
  template <class Batch>
  Loss forward(const Batch& placed, Sync sync) {
    [[maybe_unused]] const auto in = this->in_step();
    if constexpr (detail::require_model<Model, step_type, Batch>()) {
      if constexpr (traits::broadcasts_buffers) {
        if (sync == Sync::yes) this->synchronize_buffers(detail::step_call<traits>());
      }
      const Loss loss =
          this->with_step([&](auto& step) { return execution_.forward(model_, step, placed); });
      require_finite_loss(loss);
      return loss;
    } else {
      std::terminate();  // never reached: a clause is missing, and has been reported
    }
  }

  /// Throws if a loss that the host knows is not finite, with `Anomaly<Stop>`.
  void require_finite_loss(const Loss& loss) const {
    if constexpr (traits::stops_at_anomaly && std::is_same_v<Loss, double>) {
      if (!detail::is_finite(loss)) [[unlikely]]
        refuse_loss(loss);
    }
  }

  /// The model's gradients of a batch, added to those of earlier micro-batches. With `Sync::yes`
  /// buckets begin to travel as they complete. `output_gradients` are given to the model where the
  /// loss is not this rank's own.
  template <class Batch, class... OutputGradients>
  void backward(const Batch& placed, Sync sync, const OutputGradients&... output_gradients) {
    [[maybe_unused]] const auto in = this->in_step();
    begin_backward(sync);
    if constexpr (BackwardRunning<Model, step_type, Batch, OutputGradients...>)  // else reported
      this->with_step([&](auto& step) { model_.backward(step, placed, output_gradients...); });
    end_backward();
  }

  /// The same for gradients that no call of the model brings: between the two, they are written to
  /// the step of `with_step`.
  void begin_backward(Sync sync) {
    await_parameters();
    if constexpr (traits::tracks) gradients_.begin_backward(pass(sync));
  }
  void end_backward() {
    if constexpr (traits::tracks) {
      gradients_.end_backward();
      ++micro_batches_;
    }
  }

  /// A backward pass in which this rank has no samples: its gradients are zero, and it uses no
  /// parameter.
  void backward_without_samples(Sync sync) {
    [[maybe_unused]] const auto in = this->in_step();
    await_parameters();
    gradients_.pass_without_samples(pass(sync));
    ++micro_batches_;
  }

  /// The gradients of this rank's later micro-batches count `weight` times, in an average over
  /// ranks whose weights have a mean of 1.
  void weigh(double weight)
    requires(traits::weighs_shares)
  {
    gradients_.weigh(weight);
  }

  /// Gradients = their average over ranks. **Ranks** all. **Host** blocks.
  template <class T = traits>
  void reduce() {
    static_assert(!T::frees_gradients,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> a rank gets the averages of "
                  "its slices alone; write reduce_and_update() instead of reduce().update()");
    [[maybe_unused]] const auto in = this->in_step();
    gradients_.average();
  }

  /// The end of a step whose update the program makes: gradients = their average over ranks, and
  /// `f(is_used)` may hand them out, where `is_used(parameter)` says whether any rank has used one.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void reduce_and_hand_out(const F& f) {
    reduce();
    if constexpr (traits::skips_unused) gradients_.agree_on_usage();
    f([&](std::size_t parameter) { return gradients_.is_used(parameter); });
    end_update();
  }

  /// Begins the optimizer's next update, from the sum of so many micro-batches: settles its
  /// learning rate. It comes before `reduce_and_update`, and is not captured.
  void begin_update(std::size_t micro_batches = traits::micro_batches) {
    if constexpr (Gradients::folds) {
      updater_.begin(micro_batches, gradients_.factor());
    } else {
      updater_.begin(micro_batches);
    }
  }

  /// The optimizer's whole update, after `reduce`. **Ranks** all. **Host** blocks until the
  /// parameters are new on all ranks, or on a GPU enqueues.
  void update() {
    [[maybe_unused]] const auto in = this->in_step();
    updater_.begin(traits::micro_batches);
    updater_.update_averaged(gradients_);
    end_update();
  }

  /// Reduces and updates in one pass over memory where possible; gradients are not averaged in
  /// place. **Ranks** all. **Host** as `update`.
  void reduce_and_update() {
    [[maybe_unused]] const auto in = this->in_step();
    updater_.reduce_and_update(gradients_);
    end_update();
  }

  /// One micro-batch: forward, backward and, if it completes a step, reduce and update. Where a
  /// step is captured, `begin_update` comes first in that case. **Ranks** all. **Host** as
  /// `update`.
  template <class Batch>
  Loss run_micro_batch(const Batch& placed) {
    const bool last = completes_step();
    const Sync sync = last ? Sync::yes : Sync::no;
    const Loss loss = forward(placed, sync);
    backward(placed, sync);
    if (last) {
      if constexpr (!traits::captures) begin_update();
      reduce_and_update();
    }
    return loss;
  }

  /// Throws if a loss or gradient was not finite, with `Anomaly<Stop>`. **Host** blocks until all
  /// steps are done.
  void require_finite() { updater_.require_finite(); }
  /// How many updates `Anomaly<Skip>` has left out. **Host** blocks until all steps are done.
  std::uint64_t skipped_steps() const {
    [[maybe_unused]] const auto on = on_device();
    return updater_.skipped();
  }

  /// Forgets all gradients: the next micro-batch is the first of a step.
  void discard_gradients() {
    micro_batches_ = 0;
    gradients_.forget_usage();
  }

  /// Adds up the losses of many steps.
  auto loss_meter() {
    [[maybe_unused]] const auto on = on_device();
    return execution_.meter();
  }

 private:
  void end_update() {
    this->count_hooked_step();
    discard_gradients();
  }

  [[noreturn, gnu::cold, gnu::noinline]] void refuse_loss(double loss) const {
    throw detail::anomaly_error("the loss is " + std::to_string(loss), this->updates() + 1)
        .on(comm_.rank());
  }

  static constexpr bool declares_outputs = OutputDeclaring<Model>;

  /// Waits until the parameters of the latest update are here. **Host** blocks, or on a GPU the
  /// compute stream waits.
  void await_parameters() {
    if constexpr (traits::shards) updater_.gathers().wait_all();
  }

  /// The same for the host, which on a GPU may have waited for the compute stream before that
  /// waited for the parameters.
  void let_host_look() const {
    if constexpr (traits::shards) {
      if (step_.await_parameters()) await_device();
    }
  }

  void await_device() const {
    if constexpr (detail::StreamCommunicator<Comm>) comm_.synchronize();
  }

  detail::BackwardPass pass(Sync sync) const { return {sync == Sync::yes, micro_batches_ != 0}; }

  [[no_unique_address]] typename execution_type::BuiltOnDevice built_;
  Comm& comm_;
  Model model_;
  [[no_unique_address]] execution_type execution_;
  [[no_unique_address]] layouts_type layouts_;
  std::byte* parameters_;
  [[no_unique_address]] detail::JobGroupsOf<traits, Comm> groups_;
  std::byte* buffers_;
  Gradients gradients_;
  Updating updater_;
  [[no_unique_address]] detail::RandomPositionOf<traits, Comm> random_;
  std::size_t micro_batches_ = 0;  // whose gradients are added up
  step_type step_;
  std::optional<step_type> adding_step_;  // of micro-batches after the first
  [[no_unique_address]] detail::OutputsOf<declares_outputs, Model, typename traits::memory,
                                          execution_type> outputs_;
  [[no_unique_address]] detail::StateCopies<typename traits::device, Comm> copies_;
};

}  // namespace lockstep
