// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `ParallelStrategy<DDP>`: a model wrapped so that ranks train it together.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/join_scope.hpp"
#include "lockstep/strategy/model_source.hpp"
#include "lockstep/strategy/phases.hpp"
#include "lockstep/strategy/replica.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/strategy/step_graphs.hpp"
#include "lockstep/strategy/tell_others.hpp"

namespace lockstep::detail {

/// The replica of this rank. It tells all other ranks of an exception before it throws it, so that
/// every rank ends with the words of the first failure.
template <class Model, class Policies, class Comm>
class BasicDdp : private Replica<Model, Policies, Comm>,
                 public OutOfOrder<BasicDdp<Model, Policies, Comm>> {
  using Base = Replica<Model, Policies, Comm>;
  using Phases = OutOfOrder<BasicDdp>;
  using typename Base::traits;
  using OnDevice = typename Base::execution_type::OnDevice;

 public:
  using model_type = Model;
  using typename Base::bare_step;
  using typename Base::evaluation_step;
  using typename Base::Loss;
  using typename Base::step_type;
  using typename Base::subgraphs;

  using Base::await_copies;
  using Base::begin_schedule;
  using Base::buffer;
  using Base::bytes_sent;
  using Base::communicator;
  using Base::copy_in;
  using Base::copy_out;
  using Base::copy_outputs;
  using Base::evaluate_subgraph;
  using Base::for_each_buffer;
  using Base::for_each_gradient;
  using Base::for_each_kept;
  using Base::for_each_parameter;
  using Base::for_each_state;
  using Base::grad;
  using Base::gradient_bytes;
  using Base::group_options;
  using Base::learning_rate;
  using Base::loss_meter;
  using Base::make_kept_memory;
  using Base::micro_batches;
  using Base::model;
  using Base::on_device;
  using Base::optimizer;
  using Base::param;
  using Base::progress;
  using Base::schedule;
  using Base::set_epoch;
  using Base::set_progress;
  using Base::skipped_steps;
  using Base::state_bytes;
  using Base::synchronize_buffers;
  using Base::updates;
  using Phases::backward;
  using Phases::reduce;
  using Phases::reduce_and_update;
  using Phases::update;

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
      : Base(
            comm,
            tell_others_of<traits::alone>(comm, [&] { return typename Base::layouts_type(model); }),
            std::move(model)) {
    tell([&] { this->initialize_from_model(seed); });
  }

  /// The communicator of this rank's group, with `Groups<Grid<W, G>>`: its world is G. A failure of
  /// any rank ends its calls too. **Host** and **Stream** as the job's communicator.
  template <class T = traits>
  decltype(auto) group() {
    if constexpr (require_groups<T>()) {
      return (this->groups().group());
    } else {
      return (this->communicator());  // never reached: the missing policy has been reported
    }
  }
  /// The communicator of the ranks that have this rank's place in the other groups.
  template <class T = traits>
  decltype(auto) across() {
    if constexpr (require_groups<T>()) {
      return (this->groups().across());
    } else {
      return (this->communicator());  // never reached: the missing policy has been reported
    }
  }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f, Seed seed = {}) {
    tell([&] { Base::initialize(f, seed); });
  }

  /// One micro-batch: forward, backward and, with the last of `Accumulate<N>`, reduce and update.
  /// Batches of `no_sync` count among the N. Returns the loss of this rank's batch. **Ranks** all.
  /// **Host** blocks, or on a GPU enqueues. **Stream** the step's own.
  template <class Batch>
  Loss step(const Batch& batch) {
    [[maybe_unused]] const auto on = on_device();
    const auto& placed = this->place(batch);
    return tell_others(replica(), [&] { return run_step(replica(), runner_, placed); });
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
    [[maybe_unused]] const auto on = on_device();
    const auto& placed = this->place(batch);
    const std::size_t number = subgraph_number<typename Base::subgraphs>(set);
    return tell_others(replica(), [&] { return run_step(replica(), runner_, placed, number); });
  }
  /// A sub-graph by a name that is known at run time; another name is an error.
  static SubgraphChoice subgraph(std::string_view name) {
    return find_subgraph<typename Base::subgraphs>(name);
  }

  /// With `Accumulate<N>`, at the end of an epoch: a step of the batches that were too few for one,
  /// if there are any; their gradients are divided by their own number. **Ranks** all, after as
  /// many batches. **Host** as `step`.
  void step_tail() {
    tell([&] { Base::step_tail(); });
  }
  /// Forgets the gradients of such batches. **Ranks** all.
  void drop_tail() { this->discard_gradients(); }

  /// With `LocalSGD`: all ranks' parameters become their average, before the model is used
  /// elsewhere in the middle of a period. **Ranks** all. **Host** as `step`.
  void average_parameters()
    requires(traits::averages_parameters)
  {
    tell([&] { Base::average_parameters(); });
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
    const std::uint64_t before = updates();
    tell([&] {
      if constexpr (traits::template policy<axes::Accumulate>::tail == Tail::step) {
        Base::step_tail();
      } else {
        this->discard_gradients();
      }
    });
    if (updates() != before) after_update();
    if constexpr (traits::joins) {
      const auto answer = [&] {
        bool goes_on = false;
        tell([&] { goes_on = this->answer_others(); });
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
    tell([&] { Base::require_finite(); });
  }

  /// A hand-written loop: `ddp.forward(batch).backward().reduce().update()`. Each phase is a type
  /// that has only the next one as a member; another order does not compile. **Ranks** all.
  /// **Host** blocks.
  template <class Batch>
  auto forward(const Batch& batch) {
    return forward_phase<detail::Sync::yes>(replica(), batch);
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
    return forward_phase<detail::Sync::yes>(replica(), batch,
                                            subgraph_number<typename Base::subgraphs>(set));
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
    return LocalScope<Base>(*this);
  }

  /// The loss of a batch, with nothing kept for backward and no communication.
  template <class Batch>
  Loss evaluate(const Batch& batch) {
    [[maybe_unused]] const auto on = on_device();
    return Base::evaluate(this->place(batch));
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    [[maybe_unused]] const auto on = on_device();
    Base::evaluate(this->place(batch), tally, [&] { return row_count(batch); });
  }

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
      [[maybe_unused]] const auto on = on_device();
      return Base::predict(this->place(batch), row_count(batch));
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
    using Placed = std::remove_cvref_t<decltype(this->place(std::declval<const Batch&>()))>;
    return runner_.template graphs<Base, Placed>();
  }

 private:
  Base& replica() { return *this; }

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
    [[maybe_unused]] const auto on = on_device();
    tell_others(replica(), f);
  }

  [[no_unique_address]] StepRunner<traits> runner_;
  bool is_joining_ = false;
};

}  // namespace lockstep::detail
