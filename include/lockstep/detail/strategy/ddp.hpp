// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DDP>`: a wrapped model, trained by whole steps or phase by phase.

#include "lockstep/detail/strategy/members.hpp"
#include "lockstep/detail/strategy/replica.hpp"
#include "lockstep/detail/strategy/step_graphs.hpp"

namespace lockstep::detail {

/// Requests a default model. An enumeration: in `Job job(session, {}, options)` `{}` means this.
enum class DefaultModel : std::uint8_t {};

/// A function that makes a `Model`, from `Arguments` or from nothing.
template <class F, class Model, class... Arguments>
concept ModelMaking = requires(F& make, Arguments&... arguments) {
  { make(arguments...) } -> std::same_as<Model>;
} || requires(F& make) {
  { make() } -> std::same_as<Model>;
};

/// The source of a job's model: `DefaultModel`, a `ModelMaking` function, or a model.
template <class Source, class Model, class... Arguments>
concept ModelSource =
    std::same_as<std::remove_cvref_t<Source>, DefaultModel> || std::convertible_to<Source, Model> ||
    ModelMaking<Source, Model, Arguments...>;

template <class Model>
Model default_model() {
  static_assert(std::is_default_constructible_v<Model>,
                "lockstep: this model has no default constructor; give the job a function that "
                "makes one, [] { return Model(...); }, or a model");
  if constexpr (std::is_default_constructible_v<Model>) return Model{};
  std::terminate();  // never reached: the assertion above fails
}

/// A model whose initial values another library draws has
/// `static Model make_seeded(Seed, Rank, on_gpu, make)`, which seeds that library and calls `make`.
template <class Model, class Device, class F>
Model make_seeded(Seed seed, Rank rank, const F& make) {
  constexpr bool on_gpu = std::is_same_v<Device, Cuda>;
  if constexpr (requires { Model::make_seeded(seed, rank, on_gpu, make); }) {
    return Model::make_seeded(seed, rank, on_gpu, make);
  } else {
    return make();
  }
}

/// A model for another replica: a copy, or the result of `replicate()`.
template <class Model>
Model replicate(const Model& model) {
  constexpr bool replicates = requires { model.replicate(); };
  static_assert(
      replicates || std::copy_constructible<Model>,
      "lockstep: ParallelStrategy<DP> gives every replica a model of its own, and this one "
      "cannot be copied; let it be, or give it Model replicate() const");
  if constexpr (replicates) {
    return model.replicate();
  } else if constexpr (std::copy_constructible<Model>) {
    return model;
  }
  std::terminate();  // never reached: the assertion above fails
}

/// Aborts the calls of all ranks with the current exception's message, and rethrows the exception.
[[noreturn, gnu::noinline]] void abort_and_rethrow(auto& comm) {
  try {
    throw;
  } catch (const Error& error) {
    const Error named = error.rank() ? error : error.on(comm.rank());
    comm.abort(named.what());
    throw named;
  } catch (const std::exception& error) {
    comm.abort(error.what());
    throw;
  } catch (...) {
    comm.abort("an exception that is no std::exception");
    throw;
  }
}

/// Calls `f()`; an exception aborts all other ranks with its message. `Alone`: for `World<1>`.
template <bool Alone>
decltype(auto) abort_on_exception_of(auto& comm, const auto& f) {
  if constexpr (Alone) {
    return f();
  } else {
    try {
      return f();
    } catch (...) {
      abort_and_rethrow(comm);
    }
  }
}

/// The same for a replica's communicator and the communicators of the job's groups.
template <class Replica>
decltype(auto) abort_on_exception(Replica& replica, const auto& f) {
  if constexpr (Replica::traits::has_job_groups) {
    return abort_on_exception_of<Replica::traits::alone>(replica.groups(), f);
  } else {
    return abort_on_exception_of<Replica::traits::alone>(replica.communicator(), f);
  }
}

/// Runs one micro-batch with a sub-graph, each of which has its own graphs. Returns the loss.
template <class Replica, class Runner, class Batch>
typename Replica::Loss run_step(Replica& replica, [[maybe_unused]] Runner& runner,
                                const Batch& on_device, std::size_t subgraph = whole_model) {
  replica.choose_subgraph(subgraph);
  [[maybe_unused]] const auto in = replica.in_step();
  replica.draw_anew();
  if constexpr (std::is_same_v<Runner, CapturedSteps>) {
    replica.note_subgraph();
    if (replica.completes_step()) replica.begin_update();
    return runner.run(
        replica, on_device, [&] { return replica.run_micro_batch(on_device); },
        replica.graph_variant());
  } else {
    return replica.run_micro_batch(on_device);
  }
}

/// Compile errors for phases out of order. A phase overloads the member that may come next for
/// temporaries only: a named object could be used twice.
template <class Phase>
class OutOfOrder {
 public:
  void backward() const& { reject(); }
  void reduce() const& { reject(); }
  void update() const& { reject(); }
  void reduce_and_update() const& { reject(); }

 private:
  static void reject() {
    static_assert(sizeof(Phase) == 0,
                  "lockstep: the phases of a step come in the order ddp.forward(batch)"
                  ".backward().reduce().update(), each once; use std::move for a phase that has "
                  "a name, and write reduce_and_update() to fuse the last two");
  }
};

/// The last phase that a hand-written step has completed.
enum class Stage : std::uint8_t { forwarded, backwarded, averaged };

/// A hand-written step after one of its phases. In a `no_sync` scope, backward is the last one.
template <class Replica, Stage At, Sync S = Sync::yes, class Batch = void>
class [[nodiscard("the next phase of the step is missing")]] StepPhase
    : public OutOfOrder<StepPhase<Replica, At, S, Batch>> {
  using Order = OutOfOrder<StepPhase>;

 public:
  using Order::backward;
  using Order::reduce;
  using Order::reduce_and_update;
  using Order::update;

  /// `rows`: the number of samples, if outputs are kept.
  StepPhase(Replica& replica, typename Replica::Loss loss, const Batch* on_device = nullptr,
            std::size_t rows = 0)
      : replica_(replica), loss_(loss), on_device_(on_device), rows_(rows) {}
  StepPhase(const StepPhase&) = delete;
  StepPhase& operator=(const StepPhase&) = delete;

  /// The loss of this rank's batch.
  auto loss() const { return loss_; }

  /// The outputs of which the loss was taken, a row for each sample of this rank, valid until the
  /// next forward pass. **Host** on a GPU, blocks until they are computed.
  template <class R = Replica>
  auto outputs() const
    requires(At == Stage::forwarded)
  {
    static_assert(R::template keeps_outputs<Batch>(),
                  "lockstep: this model's forward keeps no outputs; give it using Output = "
                  "OutputOf<float, 10> and its parts predict, loss and backward, and leave "
                  "LossOnReplica out");
    if constexpr (R::template keeps_outputs<Batch>()) return replica_.outputs(rows_);
  }

  /// Gradients are then this rank's own; reductions of complete buckets may be in flight. In
  /// `no_sync` returns the loss. **Ranks** all; in `no_sync` this one. **Host** runs the model.
  template <Stage Now = At>
    requires(Now == Stage::forwarded)
  auto backward() && {
    run([&] {
      if constexpr (Replica::template keeps_outputs<Batch>()) {
        replica_.backward(*on_device_, S, replica_.output_gradients(rows_));
      } else {
        replica_.backward(*on_device_, S);
      }
    });
    if constexpr (S == Sync::yes) {
      return StepPhase<Replica, Stage::backwarded>(replica_, loss_);
    } else {
      return loss_;
    }
  }

  /// Averages gradients, with the same result on all ranks. **Ranks** all. **Host** blocks.
  template <Stage Now = At>
    requires(Now == Stage::backwarded)
  auto reduce() && {
    run([&] { replica_.reduce(); });
    return StepPhase<Replica, Stage::averaged>(replica_, loss_);
  }
  /// Reduces and updates in one pass over memory where possible; gradients are not averaged in
  /// place. Returns the loss. **Ranks** all. **Host** blocks.
  template <Stage Now = At>
    requires(Now == Stage::backwarded)
  auto reduce_and_update() && {
    run([&] {
      replica_.begin_update();
      replica_.reduce_and_update();
    });
    return loss_;
  }

  /// An averaged gradient; `for_each_gradient` calls `f(name, view)` for each.
  auto grad(auto key) const
    requires(At == Stage::averaged)
  {
    return replica_.grad(key);
  }
  void for_each_gradient(auto&& f) const
    requires(At == Stage::averaged)
  {
    replica_.for_each_gradient(f);
  }
  /// Returns the loss. **Ranks** all. **Host** blocks until the parameters are new on all ranks.
  template <Stage Now = At>
    requires(Now == Stage::averaged)
  auto update() && {
    run([&] { replica_.update(); });
    return loss_;
  }

 private:
  void run(const auto& f) {
    [[maybe_unused]] const auto on = replica_.on_device();
    abort_on_exception(replica_, f);
  }

  Replica& replica_;
  typename Replica::Loss loss_;
  const Batch* on_device_;
  std::size_t rows_;
};

/// `forward` of a hand-written step, also with one of `Subgraphs`: `ddp.forward<"a"_s>(batch)`, or
/// with a choice at run time. With `Sync::no`, the result of `no_sync`.
template <class Replica, Sync S>
class ForwardCalls {
 public:
  explicit ForwardCalls(Replica& replica) : replica_(replica) {}

  auto forward(const auto& batch) { return forward(SubgraphChoice{}, batch); }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward reads the batch again
  template <auto Set, class Batch>
  auto forward(const Batch& batch) {
    return forward(Set, batch);
  }
  /// A model that declares outputs runs `predict`, then `loss`, so that the program can read them.
  auto forward(const auto& set, const auto& batch) {
    [[maybe_unused]] const auto on = replica_.on_device();
    const auto& on_device = replica_.to_device(batch);
    using OnDevice = std::remove_cvref_t<decltype(on_device)>;
    constexpr bool keeps_outputs = Replica::template keeps_outputs<OnDevice>();
    std::size_t rows = 0;
    if constexpr (keeps_outputs) rows = row_count(batch);
    const auto forward = [&] {
      replica_.choose_subgraph(subgraph_number<typename Replica::subgraphs>(set));
      replica_.draw_anew();
      if constexpr (keeps_outputs) {
        return replica_.forward_with_outputs(on_device, rows, S);
      } else {
        return replica_.forward(on_device, S);
      }
    };
    return StepPhase<Replica, Stage::forwarded, S, OnDevice>(
        replica_, abort_on_exception(replica_, forward), &on_device, rows);
  }

 private:
  Replica& replica_;
};

/// RAII: `finish` or the destructor answers the other ranks' collectives until no rank has a batch,
/// and calls `after_update()` after each update. After an exception, this rank does not answer.
template <class Ddp, class AfterUpdate>
class [[nodiscard(
    "the scope ends at once unless it has a name: auto joined = ddp.join();")]] JoinScope {
 public:
  JoinScope(Ddp& ddp, AfterUpdate after_update)
      : ddp_(ddp), after_update_(std::move(after_update)) {
    ddp.begin_join();
  }
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// An error is printed, since a destructor cannot throw; the wrapper's next call fails with it.
  ~JoinScope() {
    if (!ddp_.is_joining()) return;
    if (scope_.is_exception()) {
      ddp_.leave_join();
      return;
    }
    try {
      finish();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
  }

  /// This rank has no more batches. **Ranks** all. **Host** blocks until no rank has any.
  void finish() { ddp_.finish_join(after_update_); }

 private:
  Ddp& ddp_;
  [[no_unique_address]] AfterUpdate after_update_;
  EndOfScope scope_;
};

/// The wrapper of this rank's replica. An exception aborts all other ranks with its message.
template <class Model, class Policies, class Comm>
class BasicDdp : public JobMembers<BasicDdp<Model, Policies, Comm>>,
                 public OutOfOrder<BasicDdp<Model, Policies, Comm>> {
  using Members = JobMembers<BasicDdp>;
  using ThisReplica = Replica<Model, Policies, Comm>;
  using OnDevice = typename ThisReplica::execution_type::OnDevice;

 public:
  using traits = typename ThisReplica::traits;
  static constexpr bool is_one_process = false;
  using model_type = Model;
  using Loss = typename ThisReplica::Loss;
  using bare_step = typename ThisReplica::bare_step;
  using evaluation_step = typename ThisReplica::evaluation_step;
  using step_type = typename ThisReplica::step_type;
  using subgraphs = typename ThisReplica::subgraphs;

  /// Compares the job over ranks, then broadcasts rank 0's initial values. A model by default or by
  /// a function is constructed on the communicator's GPU. **Ranks** all. **Host** blocks.
  template <class M = Model>
  explicit BasicDdp(Comm& comm, DefaultModel = {}, Seed seed = {})
      : BasicDdp(comm, &default_model<M>, seed) {}
  template <ModelMaking<Model> Make>
  BasicDdp(Comm& comm, Make&& make, Seed seed = {})
      : BasicDdp(comm,
                 abort_on_exception_of<traits::alone>(
                     comm,
                     [&] {
                       [[maybe_unused]] const OnDevice on(comm);
                       return make_seeded<Model, typename traits::device>(seed, comm.rank(), make);
                     }),
                 seed) {}
  BasicDdp(Comm& comm, Model model, Seed seed = {})
      : replica_(comm,
                 abort_on_exception_of<traits::alone>(
                     comm, [&] { return typename ThisReplica::layouts_type(model); }),
                 std::move(model)) {
    run_guarded([&] { replica_.initialize_from_model(seed); });
  }

  /// The replica, for callers that run a step by parts.
  ThisReplica& first() { return replica_; }
  const ThisReplica& first() const { return replica_; }
  Comm& communicator() { return replica_.communicator(); }

  void set_epoch(std::uint64_t epoch) { replica_.set_epoch(epoch); }
  void begin_schedule(std::uint64_t step) { replica_.begin_schedule(step); }
  /// Broadcasts rank 0's buffers; `Buffers<Synced>` averages. **Ranks** all. **Host** as `step`.
  void synchronize_buffers() { replica_.synchronize_buffers(); }
  /// Compares the parameters of all ranks by their hashes, and throws an error that names the first
  /// rank and parameter that differ: after a fault of memory, or where a program has changed
  /// parameters on some ranks only. **Ranks** all, between steps. **Host** blocks.
  void check_replicas() {
    static_assert(!traits::averages_parameters,
                  "lockstep: with LocalSGD ranks have different parameters inside of a period; "
                  "leave check_replicas out");
    run_guarded([&] { replica_.check_replicas(); });
  }
  /// The bytes that this rank has sent for gradients, with `Hooks<...>`.
  auto bytes_sent()
    requires(traits::is_hooked)
  {
    return replica_.bytes_sent();
  }

  /// The communicator of this rank's group, with `Groups<Grid<W, G>>`. A failure of any rank of the
  /// job aborts its calls too. **Host** and **Stream** as the job's communicator.
  template <class T = traits>
  auto& group() {
    return group_of<T>([](auto& groups) -> auto& { return groups.group(); });
  }
  /// The communicator of the ranks that have this rank's index in the other groups.
  template <class T = traits>
  auto& across() {
    return group_of<T>([](auto& groups) -> auto& { return groups.across(); });
  }

  /// Broadcasts the values that `f(initial)` writes on rank 0. **Ranks** all. **Host** blocks.
  void initialize(auto&& f, Seed seed = {}) {
    run_guarded([&] { replica_.initialize(f, seed); });
  }

  /// One micro-batch; the last of `Accumulate<N>`, `no_sync` included, reduces and updates. Returns
  /// its loss. **Ranks** all. **Host** blocks, or on a GPU enqueues. **Stream** the step's own.
  using Members::step;
  Loss step(const auto& set, const auto& batch) {
    [[maybe_unused]] const auto on = replica_.on_device();
    const auto& on_device = replica_.to_device(batch);
    const std::size_t number = subgraph_number<subgraphs>(set);
    return abort_on_exception(replica_,
                              [&] { return run_step(replica_, runner_, on_device, number); });
  }

  /// Steps the micro-batches that are too few for `Accumulate<N>`, if any; their gradients are
  /// divided by their own number. **Ranks** all, after as many batches. **Host** as `step`.
  void step_tail() {
    run_guarded([&] { replica_.step_tail(); });
  }
  /// Discards the gradients of such micro-batches. **Ranks** all.
  void drop_tail() { replica_.discard_gradients(); }

  /// With `LocalSGD`: averages parameters inside of a period. **Ranks** all. **Host** as `step`.
  void average_parameters()
    requires(traits::averages_parameters)
  {
    run_guarded([&] { replica_.average_parameters(); });
  }

  /// With `UnevenInputs<Join>`: ranks may step different numbers of batches until the result's
  /// `finish()` or the end of its scope. **Ranks** all. **Host** does not block here.
  ///
  ///     auto joined = ddp.join();
  ///     for (const auto& batch : loader) ddp.step(batch);
  ///     joined.finish();
  template <class T = traits>
  auto join() {
    static_assert(T::may_join,
                  "lockstep: ranks of this job have the same number of batches; add "
                  "UnevenInputs<Join> to let some run out of batches before others");
    return JoinScope(*this, [] {});
  }

  // `join` in parts, for loops that are no scope.

  void begin_join() {
    require_joined("join");
    is_joining_ = true;
  }
  /// For a loop that an exception has ended.
  void leave_join() { is_joining_ = false; }
  bool is_joining() const { return is_joining_; }
  /// Steps or drops an incomplete accumulation, then answers the others until no rank has a batch;
  /// `after_update()` follows each update and may communicate. **Ranks** all. **Host** blocks.
  void finish_join(const auto& after_update) {
    if (!is_joining_) return;
    is_joining_ = false;
    const std::uint64_t before = this->updates();
    run_guarded([&] {
      if constexpr (traits::template policy<axes::Accumulate>::tail == Tail::step) {
        replica_.step_tail();
      } else {
        replica_.discard_gradients();
      }
    });
    if (this->updates() != before) after_update();
    if constexpr (traits::joins) {
      const auto answer = [&] {
        bool goes_on = false;
        run_guarded([&] { goes_on = replica_.answer_others(); });
        return goes_on;
      };
      while (answer()) after_update();
    }
  }
  void finish_join() {
    finish_join([] {});
  }
  /// While the result lives, collectives are allowed: all ranks call them after the same update.
  ValueWhile<bool> suspend_join() { return {is_joining_, false}; }
  /// Throws in a loop whose batches other ranks may have exhausted: they would not join the call.
  void require_joined(const char* operation) const {
    if (!is_joining_) [[likely]]
      return;
    throw Error(operation,
                "it is called inside of a loop whose batches may have ended on other ranks, which "
                "will not make this call (UnevenInputs<Join>)",
                "call it after the loop, or after joined.finish()",
                const_cast<BasicDdp&>(*this).communicator().rank());
  }

  /// Throws if a loss or gradient of a past step was not finite (`Anomaly<Stop>`). **Host** blocks.
  void require_finite() {
    run_guarded([&] { replica_.require_finite(); });
  }

  /// `ddp.forward(batch).backward().reduce().update()`, in order. **Ranks** all. **Host** blocks.
  template <auto... Set, class... Arguments>
  auto forward(Arguments&&... arguments) {
    ForwardCalls<ThisReplica, Sync::yes> calls(replica_);
    return calls.template forward<Set...>(std::forward<Arguments>(arguments)...);
  }

  /// Accumulates gradients for a later batch to reduce, undivided as in PyTorch:
  /// `ddp.no_sync().forward(batch).backward()`. **Ranks** this one; all with `Norms<Synced>`.
  auto no_sync() {
    static_assert(traits::tracks,
                  "lockstep: with World<1> and Accumulate<1> a step is the bare model and cannot "
                  "add up gradients; add Accumulate<N>, or use World<dynamic>");
    static_assert(!traits::frees_gradients,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> "
                  "every batch's gradients are "
                  "scattered at once, which no_sync would put off; use Accumulate<N>, or "
                  "ZeroRedundancy alone");
    return ForwardCalls<ThisReplica, Sync::no>(replica_);
  }

  /// The loss of a batch, with nothing kept for backward and no communication.
  Loss evaluate(const auto& batch) {
    [[maybe_unused]] const auto on = replica_.on_device();
    return replica_.evaluate(replica_.to_device(batch));
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss.
  void evaluate(const auto& batch, auto& tally) {
    [[maybe_unused]] const auto on = replica_.on_device();
    replica_.evaluate(replica_.to_device(batch), tally, [&] { return row_count(batch); });
  }

  using Members::evaluate;
  /// A rank without a batch takes part in an evaluation or prediction of others, with
  /// `Sharding<FullyShard>`, whose evaluations gather parameters. **Ranks** all others have one.
  void evaluate_nothing()
    requires(traits::gathers_parameters)
  {
    [[maybe_unused]] const auto on = replica_.on_device();
    replica_.evaluate_nothing();
  }

  /// The outputs of this rank's batch in evaluation, a row for each sample, on a GPU in its memory,
  /// valid until the next prediction or forward pass. **Ranks** this one. **Host** blocks.
  auto predict(const auto& batch) {
    if constexpr (require_output<Model>()) {
      [[maybe_unused]] const auto on = replica_.on_device();
      return replica_.predict(replica_.to_device(batch), row_count(batch));
    }
  }
  using Members::predict;

  /// How many graphs `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(traits::captures)
  {
    using OnDevice =
        std::remove_cvref_t<decltype(replica_.to_device(std::declval<const Batch&>()))>;
    return runner_.template graphs<ThisReplica, OnDevice>();
  }

 private:
  template <class T, class F>
  auto& group_of(const F& which) {
    static_assert(T::has_job_groups,
                  "lockstep: this job has no groups; add a policy such as Groups<Grid<8, 4>>");
    if constexpr (T::has_job_groups) {
      return which(replica_.groups());
    } else {
      return communicator();  // never reached: the missing policy has been reported
    }
  }

  /// Calls `f()` on the replica's device; an exception aborts the communicator.
  void run_guarded(const auto& f) {
    [[maybe_unused]] const auto on = replica_.on_device();
    abort_on_exception(replica_, f);
  }

  ThisReplica replica_;
  [[no_unique_address]] StepRunner<traits> runner_;
  bool is_joining_ = false;
};

}  // namespace lockstep::detail
