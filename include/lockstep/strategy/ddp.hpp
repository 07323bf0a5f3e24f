// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DDP>`: a model wrapped so that ranks train it together.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/checkpoint/state.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/progress.hpp"
#include "lockstep/strategy/members.hpp"
#include "lockstep/strategy/phases.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/strategy/step_graphs.hpp"

namespace lockstep::detail {

/// Says that the model is constructed by default, once its device is selected. `{}` means this
/// rather than a model, because it converts to an enumeration without a constructor:
/// `Job job(session, {}, options)`.
enum class DefaultModel : std::uint8_t {};

/// A function that makes a `Model`, from `Arguments` or from nothing.
template <class F, class Model, class... Arguments>
concept ModelMaking = requires(F& make, Arguments&... arguments) {
  { make(arguments...) } -> std::same_as<Model>;
} || requires(F& make) {
  { make() } -> std::same_as<Model>;
};

/// Calls such a function.
template <class Model, class F, class... Arguments>
Model made_by(F& make, Arguments&... arguments) {
  if constexpr (std::invocable<F&, Arguments&...>) {
    return make(arguments...);
  } else {
    return make();
  }
}

/// A model from its default constructor.
template <class Model>
Model default_model() {
  static_assert(std::is_default_constructible_v<Model>,
                "lockstep: this model has no default constructor; give the job a function that "
                "makes one, [] { return Model(...); }, or a model");
  if constexpr (std::is_default_constructible_v<Model>) {
    return Model{};
  } else {
    std::terminate();  // never reached: the assertion above fails
  }
}

/// Calls a function that makes a `Model`. A model whose initial values come from the random numbers
/// of another library has `static Model make_seeded(Seed, Rank, on_gpu, make)`, in which that
/// library draws from the job's seed.
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
  } else {
    std::terminate();  // never reached: the assertion above fails
  }
}

/// Nothing is called after an update.
struct NoUpdateCall {
  constexpr void operator()() const {}
};

/// Ends with `finish`, or with its scope: this rank then answers the others until no rank has a
/// batch. An exception that ends the scope is a failure of this rank, which answers nobody.
/// `after_update()` is called after each step that is made here.
template <class Ddp, class AfterUpdate = NoUpdateCall>
class [[nodiscard(
    "the scope ends at once unless it has a name: auto joined = ddp.join();")]] JoinScope {
 public:
  explicit JoinScope(Ddp& ddp, AfterUpdate after_update = {})
      : ddp_(ddp), after_update_(std::move(after_update)) {
    ddp.begin_join();
  }
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// A destructor cannot throw: what fails here is printed, and the next call of the wrapper fails
  /// with the same words.
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

  /// This rank has no more batches. **Ranks** all, each when it is through. **Host** blocks until
  /// all are.
  void finish() { ddp_.finish_join(after_update_); }
  /// The same with another function that is called after each step.
  template <class F>
    requires std::is_same_v<AfterUpdate, NoUpdateCall>
  void finish(const F& after_update) {
    ddp_.finish_join(after_update);
  }

 private:
  Ddp& ddp_;
  [[no_unique_address]] AfterUpdate after_update_;
  EndOfScope scope_;
};

/// The replica of this rank. It tells all other ranks of an exception before it throws it, so that
/// every rank ends with the words of the first failure.
template <class Model, class Policies, class Comm>
class BasicDdp : public JobMembers<BasicDdp<Model, Policies, Comm>>,
                 public OutOfOrder<BasicDdp<Model, Policies, Comm>> {
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

  /// Compares the job over ranks, then gives all of them rank 0's initial values. The model is
  /// constructed here, by default or by a function, `[] { return Model(...); }`: on a GPU that is
  /// the communicator's then. One that is given was constructed before. **Ranks** all. **Host**
  /// blocks.
  template <class M = Model>
  explicit BasicDdp(Comm& comm, DefaultModel = {}, Seed seed = {})
      : BasicDdp(comm, &default_model<M>, seed) {}
  template <ModelMaking<Model> Make>
  BasicDdp(Comm& comm, Make&& make, Seed seed = {})
      : BasicDdp(comm,
                 tell_others_of<traits::alone>(comm,
                                               [&] {
                                                 [[maybe_unused]] const OnDevice on(comm);
                                                 return make_seeded<Model, typename traits::device>(
                                                     seed, comm.rank(), make);
                                               }),
                 seed) {}
  BasicDdp(Comm& comm, Model model, Seed seed = {})
      : replica_(comm,
                 tell_others_of<traits::alone>(
                     comm, [&] { return typename ThisReplica::layouts_type(model); }),
                 std::move(model)) {
    tell([&] { replica_.initialize_from_model(seed); });
  }

  /// The replica itself, for those who run a step by parts.
  ThisReplica& first() { return replica_; }
  const ThisReplica& first() const { return replica_; }
  Comm& communicator() { return replica_.communicator(); }

  void set_epoch(std::uint64_t epoch) { replica_.set_epoch(epoch); }
  void begin_schedule(std::uint64_t step) { replica_.begin_schedule(step); }
  /// Gives all ranks rank 0's buffers, or with `Buffers<Synced>` their average. **Ranks** all.
  /// **Host** blocks, or on a GPU enqueues.
  void synchronize_buffers() { replica_.synchronize_buffers(); }
  /// The bytes that this rank has sent for gradients, with `Hooks<...>`.
  auto bytes_sent()
    requires(traits::is_hooked)
  {
    return replica_.bytes_sent();
  }

  // For checkpoints: see `Replica`.

  void list_state(StateUse use, std::vector<StateEntry>& to) { replica_.list_state(use, to); }
  JobShape job_shape() const { return replica_.job_shape(); }
  auto progress() const { return replica_.progress(); }
  void set_progress(const ReplicaProgress& progress) { replica_.set_progress(progress); }
  void copy_out(std::span<const StateCopy> copies) { replica_.copy_out(copies); }
  void await_copies() { replica_.await_copies(); }
  void copy_in(const StateEntry& piece, const std::byte* from) { replica_.copy_in(piece, from); }
  auto make_kept_memory(std::size_t bytes) const { return replica_.make_kept_memory(bytes); }

  /// The communicator of this rank's group, with `Groups<Grid<W, G>>`: its world is G. A failure of
  /// any rank ends its calls too. **Host** and **Stream** as the job's communicator.
  template <class T = traits>
  decltype(auto) group() {
    if constexpr (require_groups<T>()) {
      return (replica_.groups().group());
    } else {
      return (communicator());  // never reached: the missing policy has been reported
    }
  }
  /// The communicator of the ranks that have this rank's place in the other groups.
  template <class T = traits>
  decltype(auto) across() {
    if constexpr (require_groups<T>()) {
      return (replica_.groups().across());
    } else {
      return (communicator());  // never reached: the missing policy has been reported
    }
  }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    tell([&] { replica_.initialize(f, seed); });
  }

  /// One micro-batch: forward, backward and, with the last of `Accumulate<N>`, reduce and update.
  /// Batches of `no_sync` count among the N. Returns the loss of this rank's batch. **Ranks** all.
  /// **Host** blocks, or on a GPU enqueues. **Stream** the step's own.
  template <class Batch>
  Loss step(const Batch& batch) {
    [[maybe_unused]] const auto on = this->on_device();
    const auto& placed = replica_.place(batch);
    return tell_others(replica_, [&] { return run_step(replica_, runner_, placed); });
  }
  /// The same with one of `Subgraphs`: `ddp.step<"with_adapter"_s>(batch)`, or with a choice at run
  /// time, `ddp.step(ddp.subgraph("with_adapter"), batch)`. Micro-batches of one step may use
  /// different ones. **Ranks** all.
  template <auto Set, class Batch>
  Loss step(const Batch& batch) {
    return step(Set, batch);
  }
  template <class Set, class Batch>
  Loss step(const Set& set, const Batch& batch) {
    [[maybe_unused]] const auto on = this->on_device();
    const auto& placed = replica_.place(batch);
    const std::size_t number = subgraph_number<subgraphs>(set);
    return tell_others(replica_, [&] { return run_step(replica_, runner_, placed, number); });
  }
  /// A sub-graph by a name that is known at run time; another name is an error.
  static SubgraphChoice subgraph(std::string_view name) { return find_subgraph<subgraphs>(name); }

  /// With `Accumulate<N>`, at the end of an epoch: a step of the batches that were too few for one,
  /// if there are any; their gradients are divided by their own number. **Ranks** all, after as
  /// many batches. **Host** as `step`.
  void step_tail() {
    tell([&] { replica_.step_tail(); });
  }
  /// Forgets the gradients of such batches. **Ranks** all.
  void drop_tail() { replica_.discard_gradients(); }

  /// With `LocalSGD`: all ranks' parameters become their average, before the model is used
  /// elsewhere in the middle of a period. **Ranks** all. **Host** as `step`.
  void average_parameters()
    requires(traits::averages_parameters)
  {
    tell([&] { replica_.average_parameters(); });
  }

  /// With `UnevenInputs<Join>`: ranks may step different numbers of batches until the result ends,
  /// by its `finish()` or with its scope. **Ranks** all. **Host** does not block here.
  ///
  ///     auto joined = ddp.join();
  ///     for (const auto& batch : loader) ddp.step(batch);
  ///     joined.finish();
  template <class T = traits>
  auto join() {
    static_assert(T::may_join,
                  "lockstep: ranks of this job have the same number of batches; add "
                  "UnevenInputs<Join> to let some be through before others");
    return JoinScope<BasicDdp>(*this);
  }

  // The same in parts, for loops that are no scope.

  void begin_join() {
    require_joined("join");
    is_joining_ = true;
  }
  /// Where the loop is left by an exception.
  void leave_join() { is_joining_ = false; }
  bool is_joining() const { return is_joining_; }
  /// This rank has no more batches: it makes a step of what is too little for one, or drops it, and
  /// then answers the others until no rank has a batch. `after_update()` is called after each
  /// update that is made here: all ranks meet there, if those that have batches do after each of
  /// theirs.
  /// **Ranks** all, each when it is through. **Host** blocks until all are.
  template <class F>
  void finish_join(const F& after_update) {
    if (!is_joining_) return;
    is_joining_ = false;
    const std::uint64_t before = this->updates();
    tell([&] {
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
        tell([&] { goes_on = replica_.answer_others(); });
        return goes_on;
      };
      while (answer()) after_update();
    }
  }
  void finish_join() {
    finish_join([] {});
  }
  /// All ranks make a call after the same update, whether they are through or not: the call is not
  /// refused while the result lives.
  [[nodiscard]] auto all_meet() { return Meeting(is_joining_); }
  /// Refuses a call of all ranks while some of them may be through.
  void require_joined(const char* operation) const {
    if (is_joining_) [[unlikely]]
      refuse_while_joining(operation);
  }

  /// Throws if a loss or gradient was not finite (`Anomaly<Stop>`), which on a GPU a later call
  /// does otherwise. **Host** blocks until all steps are done.
  void require_finite() {
    tell([&] { replica_.require_finite(); });
  }

  /// A hand-written loop: `ddp.forward(batch).backward().reduce().update()`. Each phase is a type
  /// that has only the next one as a member; another order does not compile. **Ranks** all.
  /// **Host** blocks.
  template <class Batch>
  auto forward(const Batch& batch) {
    return forward_phase<detail::Sync::yes>(replica_, batch);
  }
  template <class Batch>
  void forward(const Batch&& batch) = delete;  // backward needs it again
  /// The same with one of `Subgraphs`: `ddp.forward<"with_adapter"_s>(batch)`.
  template <auto Set, class Batch>
  auto forward(const Batch& batch) {
    return forward(Set, batch);
  }
  template <class Set, class Batch>
  auto forward(const Set& set, const Batch& batch) {
    return forward_phase<detail::Sync::yes>(replica_, batch, subgraph_number<subgraphs>(set));
  }

  /// Batches whose gradients are only added up on this rank, and are reduced together with those of
  /// a later batch: `ddp.no_sync().forward(batch).backward()`. As in PyTorch, the sum is not
  /// divided. With `Norms<Synced>` all ranks run such a batch together all the same.
  auto no_sync() {
    static_assert(traits::tracks,
                  "lockstep: with World<1> and Accumulate<1> a step is the bare model and cannot "
                  "add up gradients; add Accumulate<N>, or use World<dynamic>");
    static_assert(!traits::frees_gradients,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> every batch's gradients are "
                  "scattered at once, which no_sync would put off; use Accumulate<N>, or "
                  "ZeroRedundancy alone");
    return LocalScope<ThisReplica>(replica_);
  }

  /// The loss of a batch, with nothing kept for backward and no communication.
  template <class Batch>
  Loss evaluate(const Batch& batch) {
    [[maybe_unused]] const auto on = this->on_device();
    return replica_.evaluate(replica_.place(batch));
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    [[maybe_unused]] const auto on = this->on_device();
    replica_.evaluate(replica_.place(batch), tally, [&] { return row_count(batch); });
  }

  /// Evaluations and predictions use a sub-graph, by its number, from now on.
  void evaluate_subgraph(std::size_t set) { replica_.evaluate_subgraph(set); }
  /// The same with one of `Subgraphs`: `ddp.evaluate<"with_adapter"_s>(batch)`.
  template <auto Set, class... Arguments>
  auto evaluate(Arguments&&... arguments) {
    const EvaluatedSubgraph<BasicDdp> in(*this, Set);
    return evaluate(std::forward<Arguments>(arguments)...);
  }

  /// The outputs of this rank's batch in evaluation, a row for each sample, with no communication.
  /// They are valid until the next prediction or forward pass. **Host** blocks until they are
  /// there; on a GPU they are in its memory.
  template <class Batch>
  auto predict(const Batch& batch) {
    if constexpr (require_output<Model>()) {
      [[maybe_unused]] const auto on = this->on_device();
      return replica_.predict(replica_.place(batch), row_count(batch));
    }
  }
  template <auto Set, class Batch>
  auto predict(const Batch& batch) {
    const EvaluatedSubgraph<BasicDdp> in(*this, Set);
    return predict(batch);
  }

  /// How many graphs `CapturedStep` has made for batches of this type.
  template <class Batch>
  std::size_t captured_graphs()
    requires(traits::captures)
  {
    using Placed = std::remove_cvref_t<decltype(replica_.place(std::declval<const Batch&>()))>;
    return runner_.template graphs<ThisReplica, Placed>();
  }

 private:
  template <class T>
  static consteval bool require_groups() {
    static_assert(T::has_job_groups,
                  "lockstep: this job has no groups; add a policy such as Groups<Grid<8, 4>>");
    return T::has_job_groups;
  }

  class Meeting {
   public:
    explicit Meeting(bool& flag) : flag_(flag), before_(std::exchange(flag, false)) {}
    ~Meeting() { flag_ = before_; }
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;

   private:
    bool& flag_;
    bool before_;
  };

  [[noreturn, gnu::cold, gnu::noinline]] void refuse_while_joining(const char* operation) const {
    throw Error(operation,
                "it is called inside of a loop whose batches may have ended on other ranks, which "
                "will not make this call (UnevenInputs<Join>)",
                "call it after the loop, or after joined.finish()",
                const_cast<BasicDdp&>(*this).communicator().rank());
  }

  template <class F>
  void tell(const F& f) {
    [[maybe_unused]] const auto on = this->on_device();
    tell_others(replica_, f);
  }

  ThisReplica replica_;
  [[no_unique_address]] StepRunner<traits> runner_;
  bool is_joining_ = false;
};

}  // namespace lockstep::detail
