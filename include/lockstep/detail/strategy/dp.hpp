// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DP>`: replicas in one process, each a rank of DDP on a share of a batch.

#include "lockstep/detail/strategy/ddp.hpp"
#include "lockstep/detail/strategy/replica_workers.hpp"

namespace lockstep::detail {

/// One replica, whose phases run on its own thread. An exception before replicas begin to
/// communicate is only thrown; a later one aborts all replicas, and the job is over.
template <class Model, class Policies, class Comm>
class DpReplica {
  using Ddp = BasicDdp<Model, Policies, Comm>;
  using ThisReplica = Replica<Model, Policies, Comm>;
  using traits = typename ThisReplica::traits;
  using execution_type = typename ThisReplica::execution_type;
  using Shares = DeviceShare<execution_type, traits::gathers_outputs>;
  /// Are there outputs to gather, for the loss or for the program?
  static constexpr bool has_outputs = traits::scatters && OutputDeclaring<Model>;
  template <class Batch>
  using Share = typename Shares::template Share<Batch>;

 public:
  using Loss = typename ThisReplica::Loss;
  /// Does the loss of a replica stay on its device?
  static constexpr bool defers_loss = !std::is_same_v<Loss, double>;
  template <class Batch, class Tally>
  static constexpr bool has_evaluation =
      EvaluationRunning<Model, typename ThisReplica::evaluation_step, Share<Batch>, Tally>;

  /// `root` gathers outputs and takes their loss. **Ranks** all. **Host** blocks until all join.
  DpReplica(Comm comm, Model model, Seed seed, Rank root, const BatchShares& all)
      : comm_(std::move(comm)),
        root_(root),
        all_(all),
        ddp_(comm_, std::move(model), seed),
        shares_(replica().execution(), comm_.rank().value(), comm_.rank() == root) {}

  std::size_t number() const { return comm_.rank().value(); }
  Ddp& ddp() { return ddp_; }
  ThisReplica& replica() { return ddp_.first(); }
  const ThisReplica& replica() const { return ddp_.first(); }

  /// Copies the first replica's options of optimizer and schedule.
  void follow(DpReplica& first) {
    if (this == &first) return;
    replica().group_options() = first.replica().group_options();
    replica().schedule() = first.replica().schedule();
  }

  void synchronize() {
    if constexpr (StreamCommunicator<Comm>) comm_.synchronize();
  }
  /// Synchronizes before memory is freed that others may use; does not wait after a failure.
  void synchronize_quietly() {
    try {
      synchronize();
    } catch (const std::exception&) {
      return;
    }
  }

  /// Broadcasts the first replica's buffers, or with `Buffers<Synced>` averages all replicas'.
  void synchronize_buffers() {
    if constexpr (traits::unites_buffers) run_guarded([&] { replica().synchronize_buffers(); });
  }

  void join_outputs(DpReplica& root) {
    outputs_.join(root.outputs_, replica().execution().is_far_from(root.replica().execution()));
  }
  auto& outputs() { return outputs_; }

  // The phases of a step (`Trains`) or of an evaluation.

  template <bool Trains, class Batch>
  void take(const Batch& batch) {
    replica().select_device();
    if constexpr (traits::weighs_shares) replica().weigh(weight());
    shares_.take(batch, all_);
    if constexpr (Trains) replica().draw_anew();
  }

  template <bool Trains, class Batch>
  void take_own_loss() {
    synchronize_buffers_for<Trains>();
    if (!has_samples()) return;
    if constexpr (Trains) {
      run_model<true>([&] { loss_.emplace(replica().forward(share<Batch>(), Sync::no)); });
    } else {
      loss_.emplace(replica().evaluate(share<Batch>()));
    }
  }

  /// With `LossOnOutput`: replicas write their samples' outputs, then `root` takes their loss.
  template <bool Trains, class Batch>
  void predict() {
    if constexpr (has_parts<Batch>()) write_outputs<Trains, Batch>();
  }
  template <bool Trains, class Batch>
  void take_loss() {
    await_others();
    if (comm_.rank() != root_) return;
    if constexpr (has_parts<Batch>()) {
      loss_.emplace(with_step_of<Trains>([&](auto& step) {
        return replica().execution().loss(replica().model(), step, shares_.template whole<Batch>(),
                                          outputs_.all_outputs(all_.samples()),
                                          outputs_.all_gradients(all_.samples()));
      }));
      if constexpr (Trains) replica().require_finite_loss(*loss_);
    }
  }

  /// Replicas that share parameters communicate only after backward, unless their norms do: an
  /// exception of the model ends its batch and not the job.
  template <class Batch>
  void backward(Sync sync) {
    average_losses();
    if constexpr (traits::shares_parameters) {
      run_model<true>([&] { run_backward<Batch>(sync); });
    } else {
      run_guarded([&] { run_backward<Batch>(sync); });
    }
  }
  void update() {
    run_guarded([&] {
      replica().begin_update();
      replica().reduce_and_update();
    });
  }
  /// Ends an evaluation. With gathered outputs, streams wait for the loss: a fast replica would
  /// overwrite rows that the loss still reads. In a step, `backward` waits for it.
  void end_evaluation() {
    average_losses();
    if constexpr (traits::gathers_outputs) await_others();
  }

  template <class Batch, class Tally>
  void evaluate(Tally& tally) {
    synchronize_buffers();
    if (has_samples()) replica().evaluate(share<Batch>(), tally, [&] { return samples().count; });
  }
  /// Outputs for the program, which may read them only when all replicas' GPUs are idle.
  template <class Batch>
  void predict_only() {
    static_assert(require_prediction<Model, typename ThisReplica::evaluation_step, Share<Batch>,
                                     decltype(outputs_.outputs(RowRange{}))>());
    write_outputs<false, Batch>();
    synchronize();
  }

  // A step as one graph, after `take`. All replicas capture it: any exception ends the job.

  /// A hash that differs for shares in other memory or of another size.
  template <class Batch>
  std::uint64_t digest() {
    Hash hash;
    hash.number(samples().count);
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
    run_guarded([&] {
      replica().note_subgraph();
      if (replica().completes_step()) replica().begin_update();
      runner_.run(
          replica(), has_samples() ? share<Batch>() : nothing, [&] { enqueue<Batch>(); }, variant);
    });
  }
  template <class Batch>
  std::size_t graphs() {
    return runner_.template graphs<ThisReplica, Share<Batch>>();
  }

  /// This replica's part of the mean loss over all samples.
  double loss_part() const {
    if (!has_samples()) return 0;
    return loss_.value() *
           (static_cast<double>(samples().count) / static_cast<double>(all_.samples()));
  }
  Loss loss() {
    if constexpr (defers_loss) return replica().execution().latest_loss();
    return loss_.value();
  }

 private:
  /// Calls `f()`; an exception aborts the communicator, and the other replicas fail too.
  void run_guarded(const auto& f) { abort_on_exception(replica(), f); }

  /// A step broadcasts buffers; only evaluations average them.
  template <bool Trains>
  void synchronize_buffers_for() {
    if constexpr (!Trains || traits::broadcasts_buffers) synchronize_buffers();
  }

  /// Calls `f`, which runs the model; synchronized norms communicate in training.
  template <bool Trains, class F>
  void run_model(const F& f) {
    if constexpr (Trains && traits::syncs_norms) {
      run_guarded(f);
    } else {
      f();
    }
  }

  /// A missing part of the model is reported here, once.
  template <class Batch>
  static consteval bool has_parts() {
    using Outputs = decltype(outputs_.outputs(RowRange{}));
    using Gradients = decltype(outputs_.gradients(RowRange{}));
    return require_parts<Model, typename ThisReplica::step_type, Share<Batch>,
                         typename Shares::template Whole<Batch>, Outputs, Gradients>();
  }

  RowRange samples() const { return all_[number()]; }
  bool has_samples() const { return samples().count != 0; }
  template <class Batch>
  const auto& share() {
    return shares_.template share<Batch>();
  }

  /// Gradients are averaged over replicas: a replica with more samples than the mean counts more.
  double weight() const {
    return static_cast<double>(comm_.world_size().value() * samples().count) /
           static_cast<double>(all_.samples());
  }
  /// Computes the mean loss over all samples on the devices, if losses stay there.
  void average_losses() {
    if constexpr (defers_loss && traits::weighs_shares)
      run_guarded([&] { replica().execution().average_loss(weight()); });
  }

  /// **Stream** waits for the work that all replicas have enqueued. **Host** does not.
  void await_others() {
    if constexpr (StreamOrdering<Comm>) run_guarded([&] { comm_.order_streams(); });
  }

  template <bool Trains, class F>
  auto with_step_of(const F& f) {
    if constexpr (Trains) {
      return replica().with_step(f);
    } else {
      return replica().with_evaluation_step(f);
    }
  }

  /// Writes the outputs of this replica's samples, and copies them to `root`.
  template <bool Trains, class Batch>
  void write_outputs() {
    synchronize_buffers_for<Trains>();
    if (!has_samples()) return;
    run_model<Trains>([&] {
      with_step_of<Trains>([&](auto& step) {
        replica().model().predict(step, share<Batch>(), outputs_.outputs(samples()));
      });
    });
    outputs_.deliver(replica().execution(), samples());
  }

  template <class Batch>
  void run_backward(Sync sync) {
    if constexpr (traits::gathers_outputs) await_others();
    if (!has_samples()) {
      replica().backward_without_samples(sync);
    } else if constexpr (traits::gathers_outputs) {
      outputs_.fetch(replica().execution(), samples());
      replica().backward(share<Batch>(), sync, outputs_.gradients(samples()));
    } else {
      replica().backward(share<Batch>(), sync);
    }
  }

  template <class Batch>
  void enqueue() {
    const bool last = replica().completes_step();
    if constexpr (traits::gathers_outputs) {
      predict<true, Batch>();
      take_loss<true, Batch>();
    } else {
      take_own_loss<true, Batch>();
      average_losses();
    }
    run_backward<Batch>(last ? Sync::yes : Sync::no);
    if (last) replica().reduce_and_update();
  }

  Comm comm_;
  Rank root_;
  const BatchShares& all_;
  Ddp ddp_;
  [[no_unique_address]] StepRunner<traits> runner_;
  Shares shares_;
  std::optional<Loss> loss_;
  [[no_unique_address]] OutputsOf<has_outputs, Model, typename traits::memory, execution_type>
      outputs_;
};

/// Replicas of a model on the GPUs of this process, or on threads of the CPU, which share
/// parameters by default. The result of a batch is that of one model on the whole batch. Unlike
/// PyTorch's, replicas persist: each applies the same update, and a program changes members of the
/// model in all replicas (`for_each_model`). With `Buffers<Broadcast>`, only the first replica's
/// writes to buffers last. One thread at a time calls members, and runs replica 0.
template <class Model, class Policies, class Rendezvous>
class BasicDp : public JobMembers<BasicDp<Model, Policies, Rendezvous>> {
  using Members = JobMembers<BasicDp>;
  friend Members;

 public:
  using traits = ReplicaTraits<Model, Policies>;
  static constexpr bool is_one_process = true;

 private:
  using LedReplica = DpReplica<Model, Policies, typename Rendezvous::communicator>;
  static constexpr std::size_t static_replicas = traits::template policy<axes::World>::static_size;

 public:
  using subgraphs = typename traits::subgraphs;
  using model_type = Model;
  using Loss = typename LedReplica::Loss;

  /// Models are made one after the other on their replicas' threads and devices: by default, by
  /// `[](std::size_t replica) { return Model(...); }`, or as copies. **Host** blocks.
  template <ModelSource<Model, std::size_t> Source = DefaultModel>
  explicit BasicDp(const DpOptions& options = {}, Source&& source = {})
      : rendezvous_(count_replicas(options), options.timeout, options.devices),
        root_(output_replica(options, rendezvous_.size())),
        shares_({rendezvous_.size(), traits::syncs_norms}),  // norms need samples on all replicas
        workers_(rendezvous_.size()),
        replicas_(rendezvous_.size()) {
    std::vector<std::optional<Model>> models(replicas());
    workers_.run([&](std::size_t i) { rendezvous_.prepare(Rank{i}); });
    workers_.run_in_turn([&](std::size_t i) {
      models[i].emplace(model_of<Source>(source, i, models[0], options.seed));
    });
    workers_.run([&](std::size_t i) {
      replicas_[i] = std::make_unique<LedReplica>(rendezvous_.join(Rank{i}), std::move(*models[i]),
                                                  options.seed, Rank{root_}, shares_);
    });
    if constexpr (traits::scatters && OutputDeclaring<Model>) {
      for (const auto& replica : replicas_) replica->join_outputs(*replicas_[root_]);
    }
  }
  BasicDp(const BasicDp&) = delete;
  BasicDp& operator=(const BasicDp&) = delete;
  ~BasicDp() {
    workers_.run([&](std::size_t i) { replicas_[i]->synchronize_quietly(); },
                 [&](std::size_t i) { replicas_[i].reset(); });
  }

  std::size_t replicas() const { return replicas_.size(); }
  /// Replica 0, for callers that run a step by parts.
  auto& first() { return replicas_[0]->replica(); }
  const auto& first() const { return std::as_const(*replicas_[0]).replica(); }

  /// Calls `f(parameter, state, view)` for every optimizer state. If replicas share parameters,
  /// each has slices of the states: `f(parameter, state, view, first)` gets a slice's first index.
  void for_each_state(auto&& f) const {
    for (const auto& replica : replicas_) {
      std::as_const(*replica).replica().for_each_state(f);
      if constexpr (!traits::divides_states) return;
    }
  }

  /// Calls `f(model)` on every replica's thread and device, one after the other. **Host** blocks.
  void for_each_model(auto&& f) {
    [[maybe_unused]] const auto on = this->on_device();
    workers_.run_in_turn([&](std::size_t i) { f(replicas_[i]->replica().model()); });
  }

  /// **Host** blocks until every replica's device is idle.
  void synchronize() {
    if constexpr (StreamCommunicator<typename Rendezvous::communicator>)
      run([](LedReplica& replica) { replica.synchronize(); });
  }

  /// One micro-batch; the last of `Accumulate<N>` updates. Returns the loss of the whole batch. A
  /// model's exception leaves the batch without effect, unless replicas had begun to communicate,
  /// which ends the job: in backward if they have own parameters (`Sharding<Replicated>`, GPUs),
  /// anywhere with `CapturedStep` or `Norms<Synced>`. **Host** blocks, or on a GPU enqueues.
  using Members::step;
  Loss step(const auto& set, const auto& batch) {
    if constexpr (traits::alone) {
      return alone().step(set, batch);
    } else {
      const std::size_t subgraph = subgraph_number<subgraphs>(set);
      for (const auto& replica : replicas_) replica->replica().choose_subgraph(subgraph);
      scatter(batch);
      if constexpr (traits::syncs_norms) shares_.require_samples();
      if constexpr (traits::captures) {
        run_captured(batch);
      } else {
        run_phases(batch);
      }
      return whole_loss();
    }
  }

  // As DDP's, for all replicas. **Host** blocks.

  void set_epoch(std::uint64_t epoch) {
    for (const auto& replica : replicas_) replica->replica().set_epoch(epoch);
  }
  void begin_schedule(std::uint64_t step) {
    for (const auto& replica : replicas_) replica->replica().begin_schedule(step);
  }
  void initialize(auto&& f, Seed seed = {}) {
    run([&](LedReplica& replica) { replica.ddp().initialize(f, seed); });
  }
  void synchronize_buffers() {
    run([](LedReplica& replica) { replica.synchronize_buffers(); });
  }
  void step_tail() {
    run([&](LedReplica& replica) { replica.follow(*replicas_[0]); },
        [](LedReplica& replica) { replica.ddp().step_tail(); });
  }
  void drop_tail() {
    for (const auto& replica : replicas_) replica->replica().discard_gradients();
  }
  void require_finite() {
    run([](LedReplica& replica) { replica.ddp().require_finite(); });
  }
  Loss evaluate(const auto& batch) {
    if constexpr (traits::alone) {
      return alone().evaluate(batch);
    } else {
      scatter(batch);
      run_to_loss<false>(batch, [](LedReplica& replica) { replica.end_evaluation(); });
      return whole_loss();
    }
  }
  /// Every replica has its own tally; these are added up.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    if constexpr (traits::alone) {
      alone().evaluate(batch, tally);
    } else if constexpr (traits::gathers_outputs &&
                         !LedReplica::template has_evaluation<Batch, Tally>) {
      const double loss = evaluate(batch);
      const auto samples = static_cast<double>(shares_.samples());
      tally.add("loss", loss * samples, samples);
    } else {
      scatter(batch);
      std::vector<Tally> tallies(replicas());
      run([&](LedReplica& replica) { take<false>(replica, batch); },
          [&](LedReplica& replica) {
            replica.template evaluate<Batch>(tallies[replica.number()]);
          });
      for (const Tally& part : tallies)
        for (const auto& entry : part) tally.add(entry.name, entry.sum, entry.count);
    }
  }
  using Members::evaluate;
  void evaluate_subgraph(std::size_t set) {
    for (const auto& replica : replicas_) replica->replica().evaluate_subgraph(set);
  }

  /// The outputs of a whole batch, in order, on GPUs in the memory of the output device.
  template <class Batch>
  auto predict(const Batch& batch) {
    if constexpr (!require_output<Model>()) {
      return;
    } else if constexpr (traits::alone) {
      return alone().predict(batch);
    } else {
      scatter(batch);
      if constexpr (!traits::gathers_outputs) make_room(batch);
      run([&](LedReplica& replica) { take<false>(replica, batch); },
          [](LedReplica& replica) { replica.template predict_only<Batch>(); });
      return replicas_[root_]->outputs().all_outputs(shares_.samples());
    }
  }
  using Members::predict;

  // For checkpoints. An entry's rank is the number of its replica, which copies the entry.

  void list_state(StateUse use, std::vector<StateEntry>& to) {
    for (const auto& replica : replicas_) replica->replica().list_state(use, to);
  }
  JobShape job_shape() const {
    JobShape shape = first().job_shape();
    shape.world = 1;
    return shape;
  }
  void set_progress(const ReplicaProgress& progress) {
    run([&](LedReplica& replica) { replica.replica().set_progress(progress); });
  }
  void copy_out(std::span<const StateCopy> copies) {
    std::vector<std::vector<StateCopy>> of(replicas());
    for (const StateCopy& copy : copies) of[copy.piece.rank].push_back(copy);
    run([&](LedReplica& replica) { replica.replica().copy_out(of[replica.number()]); });
  }
  /// On the calling thread: worker threads may be running a step.
  void await_copies() {
    for (const auto& replica : replicas_) replica->replica().await_copies();
  }
  void copy_in(const StateEntry& piece, const std::byte* from) {
    replicas_[piece.rank]->replica().copy_in(piece, from);
  }

  /// The number of graphs that `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(traits::captures)
  {
    if constexpr (traits::alone) {
      return alone().template captured_graphs<Batch>();
    } else {
      return replicas_[0]->template graphs<Batch>();
    }
  }

 private:
  static std::size_t count_replicas(const DpOptions& options) {
    const std::size_t replicas = replicas_of(options, static_replicas, &Rendezvous::devices);
    require_world<static_replicas>(WorldSize{replicas}, Rank{0});
    return replicas;
  }

  /// `first`, the model of replica 0, is made before the others.
  template <class Source>
  static Model model_of(std::remove_reference_t<Source>& source, std::size_t i,
                        const std::optional<Model>& first, Seed seed) {
    constexpr bool by_default = std::same_as<std::remove_cvref_t<Source>, DefaultModel>;
    constexpr bool is_made = ModelMaking<Source, Model, std::size_t>;
    constexpr bool replicates = requires { first->replicate(); };
    if constexpr (by_default ? replicates : !is_made && !traits::alone) {
      if (i != 0) return replicate(*first);
    }
    if constexpr (by_default || is_made) {
      return make_seeded<Model, typename traits::device>(seed, Rank{i}, [&] {
        if constexpr (by_default) {
          return default_model<Model>();
        } else if constexpr (std::invocable<Source&, std::size_t&>) {
          return source(i);
        } else {
          return source();
        }
      });
    } else {
      return std::forward<Source>(source);
    }
  }

  /// The only replica of a world of one, which is plain DDP.
  auto& alone() { return replicas_[0]->ddp(); }

  /// Worker threads have their devices selected; the calling thread may have another one.
  template <class... Phases>
  void run(const Phases&... phases) {
    [[maybe_unused]] const auto on = this->on_device();
    workers_.run([&](std::size_t i) { phases(*replicas_[i]); }...);
  }

  template <class Batch>
  void scatter(const Batch& batch) {
    static_assert(require_scattering<Batch>());
    shares_.count(batch);
    if constexpr (traits::gathers_outputs) make_room(batch);
  }
  void make_room(const auto& batch) {
    const std::size_t all = shares_.samples();
    if (all != samples_of(batch, BatchCut{}, 0)) {
      fail("DP", {"parts of the batch differ in size, and some samples would be left out"},
           "give all parts the same size, or use LossOnReplica");
    }
    if (all <= replicas_[0]->outputs().capacity()) return;
    synchronize();  // the memory may be in use
    run([&](LedReplica& replica) { replica.outputs().reserve(replica.replica().model(), all); });
  }

  template <bool Trains, class Batch>
  void take(LedReplica& replica, const Batch& batch) {
    replica.follow(*replicas_[0]);
    replica.template take<Trains>(batch);
  }

  template <bool Trains, class Batch, class... Then>
  void run_to_loss(const Batch& batch, const Then&... then) {
    const auto share = [&](LedReplica& replica) { take<Trains>(replica, batch); };
    if constexpr (traits::gathers_outputs) {
      try {
        run(
            share, [](LedReplica& replica) { replica.template predict<Trains, Batch>(); },
            [](LedReplica& replica) { replica.template take_loss<Trains, Batch>(); }, then...);
      } catch (...) {
        // Enqueued work of the failed batch may still use the rows that the next batch writes.
        run([](LedReplica& replica) { replica.synchronize_quietly(); });
        throw;
      }
    } else {
      run(
          share, [](LedReplica& replica) { replica.template take_own_loss<Trains, Batch>(); },
          then...);
    }
  }

  template <class Batch>
  void run_phases(const Batch& batch) {
    const Sync sync = first().completes_step() ? Sync::yes : Sync::no;
    bool backward_began = false;
    try {
      run_to_loss<true>(
          batch,
          [&](LedReplica& replica) {
            if (replica.number() == 0) backward_began = true;
            replica.template backward<Batch>(sync);
          },
          [&](LedReplica& replica) {
            if (sync == Sync::yes) replica.update();
          });
    } catch (...) {
      if (backward_began) drop_tail();
      throw;
    }
  }

  /// The graph depends on the shares of all replicas.
  template <class Batch>
  void run_captured(const Batch& batch) {
    std::vector<std::uint64_t> digests(replicas());
    run(
        [&](LedReplica& replica) {
          take<true>(replica, batch);
          digests[replica.number()] = replica.template digest<Batch>();
        },
        [&](LedReplica& replica) {
          Hash variant;
          for (const std::uint64_t digest : digests) variant.number(digest);
          if constexpr (traits::has_subgraphs) variant.number(replica.replica().graph_variant());
          if constexpr (traits::gathers_outputs) variant.number(replicas_[0]->outputs().capacity());
          replica.template run_captured<Batch>(variant.value());
        });
  }

  Loss whole_loss() const {
    if constexpr (traits::gathers_outputs || LedReplica::defers_loss) {
      return replicas_[root_]->loss();
    } else {
      double loss = 0;
      for (const auto& replica : replicas_) loss += replica->loss_part();
      return loss;
    }
  }

  Rendezvous rendezvous_;
  std::size_t root_;  // the replica of the output device
  BatchShares shares_;
  ReplicaWorkers workers_;
  std::vector<std::unique_ptr<LedReplica>> replicas_;
};

}  // namespace lockstep::detail
