// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one job.

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/fed_batches.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/phase_times.hpp"
#include "lockstep/observe/tally.hpp"
#include "lockstep/strategy/model_source.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/strategy/subgraph_step.hpp"
#include "lockstep/strategy/tell_others.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/fit.hpp"
#include "lockstep/trainer/job_agreement.hpp"
#include "lockstep/trainer/job_checkpoints.hpp"
#include "lockstep/trainer/job_collectives.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/predictions.hpp"
#include "lockstep/trainer/rejected_trainer.hpp"
#include "lockstep/trainer/run_log.hpp"

namespace lockstep {

namespace detail {

/// A job that trains: one object on every rank.
template <class Model, class Policies>
class BasicTrainer : public JobCheckpoints<Model, Policies>,
                     public JobCollectives<BasicTrainer<Model, Policies>> {
  using Base = JobCheckpoints<Model, Policies>;
  using typename Base::traits;

 public:
  using Base::rank;
  using Base::world_size;
  using typename Base::layout;
  using typename Base::wrapper;

  /// Meets the other ranks and gives all of them rank 0's initial parameters. The model is
  /// constructed when they have met, by default or by a function, `[](Session&) { return
  /// Model(...); }`: on a GPU job with this rank's GPU selected. One that is given was constructed
  /// before. With `ParallelStrategy<DP>` every replica's is constructed on its own thread and
  /// device. Seed, log, data and checkpoints are as the session's command line says. **Ranks** all.
  /// **Host** blocks.
  template <class M = Model>
  explicit BasicTrainer(Session& session, DefaultModel = {})
      : BasicTrainer(session, DefaultModel{}, take_trainer_options(session)) {}
  template <ModelMaking<Model, Session> Make>
  BasicTrainer(Session& session, Make&& make)
      : BasicTrainer(session, make, take_trainer_options(session)) {}
  BasicTrainer(Session& session, Model model)
      : BasicTrainer(session, std::move(model), take_trainer_options(session)) {}
  /// The same with options that the program gives, instead of those of the command line.
  template <class M = Model>
  BasicTrainer(Session& session, DefaultModel, TrainerOptions options)
      : Base(session, DefaultModel{}, std::move(options)) {}
  template <ModelMaking<Model, Session> Make>
  BasicTrainer(Session& session, Make&& make, TrainerOptions options)
      : Base(session, [&] { return made_by<Model>(make, session); }, std::move(options)) {}
  BasicTrainer(Session& session, Model model, TrainerOptions options)
      : Base(session, std::move(model), std::move(options)) {}

  /// `for (auto epoch : job.epochs(10))`. After `--resume`, or a restart, the first call goes on
  /// from the newest checkpoint. **Ranks** all.
  EpochRange<BasicTrainer> epochs(std::uint64_t count) {
    this->end_asking();
    if (count >> 63 != 0) [[unlikely]] {
      detail::fail("epochs", {"their number is negative"}, "give it 0 or more", this->rank());
    }
    this->resume_if_wanted();
    return {*this, this->begin_epochs(count), count};
  }

  /// One batch of this rank: forward, backward, reduce, update (the last two once per
  /// `Accumulate<N>`). Returns this rank's loss. With `ParallelStrategy<DP>` there is one rank, and
  /// its replicas share the batch. **Ranks** all. **Host** blocks.
  template <class Batch>
  typename wrapper::Loss step(const Batch& batch) {
    return run_step(batch, [&] { return wrapped_.step(batch); });
  }
  /// The same with one of the job's `Subgraphs`: `job.step<"with_adapter"_s>(batch)`, or with a
  /// choice at run time, `job.step(job.subgraph("with_adapter"), batch)`. Micro-batches of one step
  /// may use different ones. **Ranks** all. **Host** blocks.
  template <auto Set, class Batch>
  typename wrapper::Loss step(const Batch& batch) {
    return step(Set, batch);
  }
  template <class Set, class Batch>
  typename wrapper::Loss step(const Set& set, const Batch& batch) {
    return run_step(batch, [&] { return wrapped_.step(set, batch); });
  }
  /// A sub-graph by a name that is known at run time; another name is an error.
  static SubgraphChoice subgraph(std::string_view name) { return wrapper::subgraph(name); }

  /// Evaluates the model on all samples of a data set, each counted once in any world, by
  /// `model.evaluate(step, batch, tally)` or, without that, by its mean loss. The epoch's summary
  /// shows the scores under `name`. **Ranks** all. **Host** blocks.
  template <Dataset Source>
  Scores evaluate(const Source& source, std::size_t batch_size, std::string_view name = "test") {
    [[maybe_unused]] const auto on = this->enter("evaluate");
    const InJobCall in(JobCall::evaluate);
    const PhaseTimes::Evaluation evaluation(this->times_, this->is_in_data());
    require_same_data(source, batch_size);
    wrapped_.require_finite();
    if constexpr (traits::unites_buffers) wrapped_.synchronize_buffers();
    DistributedSampler<Exact, InOrder> shares(source.size(), world_size(), rank());
    LoaderOptions options = this->loader_options();
    options.batch_size = batch_size;
    Tally tally;
    this->fetch([&] {
      for (const auto& batch : this->make_loader(source, shares, options))
        wrapped_.evaluate(batch, tally);
    });
    const Scores scores = lockstep::reduce(comm_, tally);
    this->show(scores, name);
    return scores;
  }

  /// The same with one of the job's `Subgraphs`: `job.evaluate<"with_adapter"_s>(test, 500)`, and
  /// `job.predict<"with_adapter"_s>(test, 500)`. **Ranks** all, with one set. **Host** blocks.
  template <auto Set, class... Arguments>
  auto evaluate(Arguments&&... arguments) {
    const EvaluatedSubgraph<wrapper> in(wrapped_, Set);
    return evaluate(std::forward<Arguments>(arguments)...);
  }
  template <auto Set, class... Arguments>
  auto predict(Arguments&&... arguments) {
    const EvaluatedSubgraph<wrapper> in(wrapped_, Set);
    return predict(std::forward<Arguments>(arguments)...);
  }

  /// The usual loop in one call: every epoch trains on `train` and, where there is one, evaluates
  /// on `test`. Then `on_epoch(epoch)` or `on_epoch(epoch, scores)` is called, which ends the
  /// training where it returns false; `on_step(batch, loss)` comes after every step. Returns the
  /// figures of the last epoch. **Ranks** all. **Host** blocks.
  template <Dataset Train, class OnEpoch = NoCallback, class OnStep = NoCallback>
  EpochSummary fit(const Train& train, const FitOptions& options, OnEpoch on_epoch = {},
                   OnStep on_step = {}) {
    return detail::fit(*this, comm_, train, NoData{}, options, on_epoch, on_step);
  }
  template <Dataset Train, Dataset Test, class OnEpoch = NoCallback, class OnStep = NoCallback>
  EpochSummary fit(const Train& train, const Test& test, const FitOptions& options,
                   OnEpoch on_epoch = {}, OnStep on_step = {}) {
    return detail::fit(*this, comm_, train, test, options, on_epoch, on_step);
  }

  /// The model's outputs for all samples of a data set, each predicted once in any world, in the
  /// order of the data: on rank 0, on all ranks, or each on the rank that predicted it. **Ranks**
  /// all. **Host** blocks.
  template <Dataset Source>
  auto predict(const Source& source, const PredictOptions& options) {
    if constexpr (require_output<Model>()) {
      [[maybe_unused]] const auto on = this->enter("predict");
      const InJobCall in(JobCall::predict);
      require_same_data(source, options.batch_size);
      if constexpr (traits::unites_buffers) wrapped_.synchronize_buffers();
      LoaderOptions loading = this->loader_options();
      loading.batch_size = options.batch_size;
      loading.drop_last = false;
      BlockSampler block(source.size(), world_size(), rank());
      return this->fetch([&] {
        return predict_all<typename Model::Output>(
            comm_, wrapped_, block, this->make_loader(source, block, loading), options.gather);
      });
    }
  }
  template <Dataset Source>
  auto predict(const Source& source, std::size_t batch_size) {
    return predict(source, PredictOptions{.batch_size = batch_size});
  }

  /// The data set that `make()` opens, where it is read: on all ranks, or with `Feed` on those that
  /// read for others, which then need not have it:
  /// `auto train = job.open([&] { return npy_dataset<float, int>(images, labels); });`
  /// What goes wrong there ends all ranks, with its words. **Ranks** all. **Host** blocks.
  template <class Make>
  auto open(Make&& make) {
    [[maybe_unused]] const auto on = this->enter("open");
    const InJobCall in(JobCall::open);
    if constexpr (Base::feed::sends) {
      using Source = std::remove_cvref_t<decltype(make())>;
      static_assert(Dataset<Source>,
                    "lockstep: job.open takes a function that returns a data set: size(), "
                    "batch_type and load(indices, out)");
      return tell_others_of<false>(
          comm_, [&] { return Opened<Source>(comm_, this->feed_.line().reads(), make); });
    } else {
      return tell_others_of<traits::alone>(comm_, make);
    }
  }

  /// Calls `f(log)` on rank 0. A collective of this job inside `f` would wait for ranks that never
  /// come, so it is an error at once.
  template <class F>
  void on_rank0(F&& f) {
    this->end_asking();
    if (rank() != Rank{0}) return;
    const typename Base::Rank0Only only(this->is_held_up_);
    std::forward<F>(f)(RunLog(this->display_, this->log_));
  }

 private:
  using Base::comm_;
  using Base::wrapped_;

  template <class Batch, class Step>
  typename wrapper::Loss run_step(const Batch& batch, const Step& run) {
    [[maybe_unused]] const auto on = this->enter_step();
    const auto loss = this->feed_.tell_others(run);
    std::size_t samples = 1;
    if constexpr (requires { batch.size(); } || is_cut<Batch>) samples = row_count(batch);
    if (this->count_step(loss, samples)) [[unlikely]]
      this->after_step();
    return loss;
  }

  template <class, Dataset>
  friend class EpochBatches;
  friend class JobCollectives<BasicTrainer>;

  template <Dataset Source>
  void require_same_data(const Source& source, std::size_t batch_size) {
    LoaderOptions options;
    options.batch_size = batch_size;
    detail::require_same_data(comm_, source.size(), options, this->sampler_options().seed);
  }
};

}  // namespace detail

/// The job of a model under policies in any order: `Trainer<M, A, B>` and `Trainer<M, B, A>` are
/// one type. A composition with a fault gives one compile error.
template <class Model, class... Ps>
using Trainer = detail::Compose<detail::BasicTrainer, detail::RejectedTrainer, Model, Ps...>;

namespace detail {

/// The compile-time part of such a job, for tools and tests. It needs no CUDA, even if the job
/// does.
template <class Model, class... Ps>
using Composed = ComposedJob<Model, CanonicalPolicies<Ps...>>;

}  // namespace detail

}  // namespace lockstep
