// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one job.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/distributed_sampler.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/terminal.hpp"
#include "lockstep/observe/epoch_summary.hpp"
#include "lockstep/observe/log_file.hpp"
#include "lockstep/observe/phase_times.hpp"
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/observe/tally.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/model_source.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/fit.hpp"
#include "lockstep/trainer/job.hpp"
#include "lockstep/trainer/job_collectives.hpp"
#include "lockstep/trainer/log_fields.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/predictions.hpp"
#include "lockstep/trainer/rejected_trainer.hpp"
#include "lockstep/trainer/run_log.hpp"
#include "lockstep/trainer/training.hpp"

namespace lockstep {

namespace detail {

/// A job that trains: one object on every rank.
template <class Model, class Policies>
class BasicTrainer : public ComposedJob<Model, Policies>,
                     public JobCollectives<BasicTrainer<Model, Policies>> {
  using Base = ComposedJob<Model, Policies>;
  using Training = TrainingOf<Model, Policies>;
  using Comm = typename Training::communicator;
  using traits = ReplicaTraits<Model, Policies>;
  using Accumulation = Pick<axes::Accumulate, Policies>;

 public:
  using typename Base::layout;
  using remainder = typename Base::template policy<axes::Sampler>::remainder;
  using sampler =
      DistributedSampler<remainder, typename Base::template policy<axes::Sampler>::order>;
  using wrapper = typename Training::wrapper;
  static constexpr bool is_one_process = is_dp<Policies>;
  static constexpr bool ranks_are_threads = ConnectionOf<Policies>::ranks_are_threads;
  static constexpr bool spans_processes = requires { ConnectionOf<Policies>::spans_processes; };

  /// Meets the other ranks and gives all of them rank 0's initial parameters. The model is
  /// constructed when they have met, by default or by a function, `[](Session&) { return
  /// Model(...); }`: on a GPU job with this rank's GPU selected. One that is given was constructed
  /// before. With `ParallelStrategy<DP>` every replica's is constructed on its own thread and
  /// device. **Ranks** all. **Host** blocks.
  template <class M = Model>
  explicit BasicTrainer(Session& session, DefaultModel = {}, TrainerOptions options = {})
      : BasicTrainer(session, DefaultModel{}, std::move(options), Meet{}) {}
  template <ModelMaking<Model, Session> Make>
  BasicTrainer(Session& session, Make&& make, TrainerOptions options = {})
      : BasicTrainer(
            session, [&] { return made_by<Model>(make, session); }, std::move(options), Meet{}) {}
  BasicTrainer(Session& session, Model model, TrainerOptions options = {})
      : BasicTrainer(session, std::move(model), std::move(options), Meet{}) {}

  Rank rank() const { return session_.rank(); }
  WorldSize world_size() const { return session_.world(); }
  const Membership& membership() const { return session_.membership(); }
  /// The program's arguments that are neither the launcher's nor the trainer's, its name first.
  const std::vector<std::string>& arguments() const { return options_.arguments; }
  /// The value of `--data`, for the program's data sets: `fashion_mnist("train", job.data())`.
  const std::string& data() const { return options_.data; }

  /// The calling thread works on this rank's GPU while the result lives, whatever its current one
  /// is: for kernels of the program's own. The members of a job do so by themselves.
  [[nodiscard]] auto on_device() const { return wrapped_.on_device(); }

  Model& model() { return wrapped_.model(); }
  /// A parameter, to look at.
  auto param(auto key) const { return wrapped_.param(key); }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// `initial.random()` starts from the job's seed. **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f) {
    [[maybe_unused]] const auto on = enter("initialize");
    wrapped_.initialize(f, options_.seed);
  }

  /// Calls `f(name, view)` for every parameter, in the order of declaration, with the view that
  /// `param` gives, and likewise for gradients and buffers; `f(parameter, state, view)` for the
  /// states of the optimizer that this rank keeps (see `Replica::for_each_state`).
  template <class F>
  void for_each_parameter(F&& f) const {
    wrapped_.for_each_parameter(f);
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    wrapped_.for_each_gradient(f);
  }
  template <class F>
  void for_each_buffer(F&& f) const {
    wrapped_.for_each_buffer(f);
  }
  template <class F>
  void for_each_state(F&& f) const {
    wrapped_.for_each_state(f);
  }

  wrapper& ddp()
    requires(!is_one_process)
  {
    return wrapped_;
  }
  wrapper& dp()
    requires(is_one_process)
  {
    return wrapped_;
  }

  /// The numbers of optimizer and schedule: `job.optimizer().lr = 0.01`. They must be the same on
  /// all ranks, which is checked at the begin of every epoch.
  auto& optimizer() { return wrapped_.optimizer(); }
  /// The numbers of one of `ParameterGroups`: `job.optimizer(NoDecay<>{}).lr = 0.02`. The first
  /// call copies those of `optimizer()`, so set what they have in common before.
  template <class Set>
  auto& optimizer(Set set) {
    return wrapped_.optimizer(set);
  }
  auto& schedule() { return wrapped_.schedule(); }

  /// This rank's own seed and random numbers, different on every rank.
  Seed seed() const { return rank_seed(options_.seed, rank()); }
  RandomStream random() const { return RandomStream(seed()); }

  /// How samplers and loaders of this job are made; batch sizes come with `batches`.
  SamplerOptions& sampler_options() { return sampler_options_; }
  LoaderOptions& loader_options() { return loader_options_; }

  /// `for (auto epoch : job.epochs(10))`. **Ranks** all.
  EpochRange<BasicTrainer> epochs(std::uint64_t count) {
    return {*this, resume_ ? resume_->epoch.value() : 0, count};
  }

  /// One batch of this rank: forward, backward, reduce, update (the last two once per
  /// `Accumulate<N>`). Returns this rank's loss. With `ParallelStrategy<DP>` there is one rank, and
  /// its replicas share the batch. **Ranks** all. **Host** blocks.
  template <class Batch>
  typename wrapper::Loss step(const Batch& batch) {
    [[maybe_unused]] const auto on = enter("step");
    const auto loss = wrapped_.step(batch);
    std::size_t samples = 1;
    if constexpr (requires { batch.size(); }) samples = batch.size();
    losses_.add(loss, samples);
    display_.step(samples * world_size().value(), losses_.latest());
    return loss;
  }

  /// Evaluates the model on all samples of a data set, each counted once in any world, by
  /// `model.evaluate(step, batch, tally)` or, without that, by its mean loss. The epoch's summary
  /// shows the scores under `name`. **Ranks** all. **Host** blocks.
  template <Dataset Source>
  Scores evaluate(const Source& source, std::size_t batch_size, std::string_view name = "test") {
    [[maybe_unused]] const auto on = enter("evaluate");
    const InJobCall in(JobCall::evaluate);
    const PhaseTimes::Evaluation evaluation(times_, opened_ && !closed_);
    require_same_data(source.size(), {.batch_size = batch_size});
    wrapped_.require_finite();
    if constexpr (traits::broadcasts_buffers) wrapped_.synchronize_buffers();
    DistributedSampler<Exact, InOrder> shares(source.size(), world_size(), rank());
    LoaderOptions options = loader_options_;
    options.batch_size = batch_size;
    Tally tally;
    for (const auto& batch : DataLoader(source, shares, options)) wrapped_.evaluate(batch, tally);
    const Scores scores = reduce(comm_, tally);
    for (Score score : scores) {
      score.name.insert(0, std::string(name) + "_");
      shown_scores_.push_back(std::move(score));
    }
    return scores;
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
      [[maybe_unused]] const auto on = enter("predict");
      const InJobCall in(JobCall::predict);
      require_same_data(source.size(), {.batch_size = options.batch_size});
      if constexpr (traits::broadcasts_buffers) wrapped_.synchronize_buffers();
      LoaderOptions loading = loader_options_;
      loading.batch_size = options.batch_size;
      loading.drop_last = false;
      return predict_all<typename Model::Output>(comm_, wrapped_, source, loading, options.gather);
    }
  }
  template <Dataset Source>
  auto predict(const Source& source, std::size_t batch_size) {
    return predict(source, PredictOptions{.batch_size = batch_size});
  }

  /// Calls `f(log)` on rank 0. A collective of this job inside `f` would wait for ranks that never
  /// come, so it is an error at once.
  template <class F>
  void on_rank0(F&& f) {
    if (rank() != Rank{0}) return;
    const Rank0Only only(is_held_up_);
    std::forward<F>(f)(RunLog(display_, log_));
  }

  /// Adds a field to the epoch's record in the file of `--log`: `job.log_field("reward", 3.5)`. The
  /// last value counts; rank 0's is written. Between epochs it is the next epoch's.
  template <JsonScalar T>
  void log_field(std::string_view name, const T& value) {
    if (log_) fields_.set(name, value);
  }

  /// The position of the job in its data. To go on from there, call `resume` before `epochs`.
  SamplerState position() const { return position_; }
  void resume(const SamplerState& position) { resume_ = position; }

  /// The epoch that is under way, or the last.
  EpochSummary summary() const {
    EpochSummary now = closed_ ? *closed_ : display_.summary();
    now.scores = Scores(shown_scores_);
    return now;
  }

 private:
  template <class, Dataset>
  friend class EpochBatches;
  template <class>
  friend class TrainingEpoch;
  template <class>
  friend class EpochRange;
  friend class JobCollectives<BasicTrainer>;

  struct Meet {};

  /// `source` is the model, what makes it, or `DefaultModel`.
  template <class Source>
  BasicTrainer(Session& session, Source&& source, TrainerOptions&& options, Meet)
      : session_(session),
        options_(std::move(options)),
        comm_(Training::communicate(session)),
        wrapped_(Training::make(session, comm_, std::forward<Source>(source), options_)),
        display_(session.rank() == Rank{0}
                     ? detect_terminal(stdout, options_.progress.value_or(progress_style()))
                     : Terminal{}),
        log_(options_.log.empty() ? LogFile() : LogFile(options_.log, session.rank())) {
    if (log_) {
      log_.write(run_header(world_size(), options_.seed, Base::fingerprint(wrapped_.model()),
                            policy_fields(Policies{})));
    }
    sampler_options_.seed = options_.seed;
    // Where ranks fill all cores, a loading thread would only take time from the model.
    std::size_t busy = session.membership().local_world;
    if constexpr (is_one_process) busy = wrapped_.replicas();
    loader_options_.workers = has_free_core(busy) ? 1 : 0;
    loader_options_.timed = static_cast<bool>(log_);
  }

  struct Rank0Only {
    explicit Rank0Only(bool& flag) : flag(flag), before(std::exchange(flag, true)) {}
    ~Rank0Only() { flag = before; }
    Rank0Only(const Rank0Only&) = delete;
    Rank0Only& operator=(const Rank0Only&) = delete;
    bool& flag;
    bool before;
  };

  void require_all_ranks(const char* operation) {
    if (is_held_up_) [[unlikely]]
      refuse(operation);
  }
  /// The begin of a call that all ranks make.
  [[nodiscard]] auto enter(const char* operation) {
    require_all_ranks(operation);
    return wrapped_.on_device();
  }
  Comm& own_communicator() { return comm_; }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse(const char* operation) {
    if (failure_) {
      is_held_up_ = false;
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
    throw Error(operation, "rank 0 alone has come here, inside on_rank0",
                "call it outside, on all ranks", rank());
  }

  // For the epochs and batches of this trainer.

  void begin_run() { run_begins_ = true; }

  void begin_epoch(std::uint64_t number, std::uint64_t last) {
    [[maybe_unused]] const auto on = enter("epochs");
    const InJobCall in(JobCall::epochs);
    require_same_numbers();
    epoch_ = number;
    epochs_ = last;
    wrapped_.set_epoch(number);
    times_.begin_epoch();
    shown_scores_.clear();
    closed_.reset();
    opened_ = printed_ = false;
    under_way_ = true;
    display_.begin_epoch(number + 1, last, 0);
  }

  void open_data(std::size_t batches) {
    if (Accumulation::updates_of(batches) == 0) {
      throw Error("epoch",
                  "it has " + std::to_string(batches) + " batches, and Accumulate<" +
                      std::to_string(Accumulation::micro_batches) +
                      ", Tail::drop> drops what is less than a step",
                  "accumulate less, make batches smaller, or choose Tail::step", rank());
    }
    if constexpr (requires { schedule().steps = 0; }) {
      // A curve without a length is as long as the epochs of one `epochs` call, and begins with
      // each such call anew.
      if (run_begins_ && (schedule().steps == 0 || schedule().steps == run_steps_)) {
        const std::uint64_t updates = Accumulation::updates_of(batches);
        run_steps_ = schedule().steps = epochs_ * updates;
        wrapped_.begin_schedule(epoch_ * updates);
      }
      run_begins_ = false;
    }
    losses_.reset();
    opened_ = true;
    display_.begin_epoch(epoch_ + 1, epochs_, batches);
  }

  /// Adds up the losses of all ranks, once an epoch. `waits` is how long the loop waited for data.
  void close_data(std::chrono::duration<double> waits = {}) {
    if (!opened_ || closed_) return;
    const InJobCall in(JobCall::batches);
    [[maybe_unused]] const auto on = wrapped_.on_device();
    end_accumulation();
    wrapped_.require_finite();
    closed_ = display_.summary();
    times_.set_waits(waits);
    const auto [sum, samples] = losses_.totals();
    double totals[] = {sum, samples};
    comm_.all_reduce(totals, Sum{});
    if (totals[1] > 0) closed_->loss = totals[0] / totals[1];
    display_.clear();
  }

  /// What is too little for a step is no part of the next epoch's first one.
  void end_accumulation() {
    if constexpr (Accumulation::micro_batches > 1) {
      if constexpr (Accumulation::tail == Tail::step) {
        wrapped_.step_tail();
      } else {
        wrapped_.drop_tail();
      }
    }
    if constexpr (traits::skips_anomalies) {
      const std::uint64_t skipped = wrapped_.skipped_steps();
      if (skipped != skipped_)
        shown_scores_.push_back({"skipped", static_cast<double>(skipped - skipped_)});
      skipped_ = skipped;
    }
  }

  /// Calls `f` in the destructor of a loop that a `break` has left. A destructor cannot throw: a
  /// failure is printed, and thrown by this trainer's next call.
  template <class F>
  void after_break(F&& f) noexcept {
    try {
      f();
    } catch (const std::exception& error) {
      under_way_ = false;
      failure_ = std::current_exception();
      is_held_up_ = true;
      std::fprintf(stderr, "%s\n", error.what());
    }
  }
  void close_data_after_break(std::chrono::duration<double> waits) noexcept {
    after_break([&] { close_data(waits); });
  }
  void end_epoch_after_break() noexcept {
    after_break([this] {
      if (under_way_) end_epoch();
    });
  }

  void end_epoch() {
    under_way_ = false;
    close_data();
    if (rank() != Rank{0} || !closed_) return;
    if (!printed_ && !display_.is_quiet()) display_.print(summary().text());
    if (!log_) return;
    JsonLine record = summary().json().add("lr", wrapped_.learning_rate());
    record.add(times_.json(closed_->seconds));
    fields_.move_to(record);
    log_.write(record);
  }

  void mark_as_printed() { printed_ = true; }

  void note_position(const SamplerState& state) { position_ = state; }

  void resume_sampler(sampler& fresh) {
    if (!resume_) return;
    fresh.resume(*resume_);
    resume_.reset();
  }

  /// Compares the numbers of optimizer and schedule over ranks: a different learning rate on one
  /// rank would be a silent error.
  void require_same_numbers() {
    std::string numbers;
    const auto add = [&](const std::string& whose, const auto& options) {
      options.for_each([&](std::string_view name, double number) {
        char digits[32];
        std::snprintf(digits, sizeof digits, " %.17g\n", number);
        numbers.append(whose).append(name).append(digits);
      });
    };
    for (std::size_t group = 0; group != traits::groups::count; ++group)
      add(group == 0 ? "optimizer " : detail::text({"optimizer of group ", group, ": "}),
          wrapped_.group_options().of(group));
    add("schedule ", schedule());
    require_agreement(comm_, hash_of(numbers), [&] { return numbers; });
  }

  /// Compares data over ranks: with other sizes or seeds, samples would be left out or taken twice.
  void require_same_data(std::size_t samples, const LoaderOptions& options) {
    if (world_size() == WorldSize{1}) return;
    const std::string data =
        detail::text({"data of ", samples, " samples\nbatches of ", options.batch_size, " samples",
                      options.drop_last ? ", full ones only" : "", "\na sampler with seed ",
                      sampler_options_.seed.value(), "\n"});
    require_agreement(comm_, hash_of(data), [&] { return data; });
  }

  Session& session_;
  TrainerOptions options_;
  Comm comm_;
  wrapper wrapped_;
  ProgressDisplay display_;
  LogFile log_;
  LogFields fields_;
  PhaseTimes times_;
  SamplerOptions sampler_options_;
  LoaderOptions loader_options_;
  std::uint64_t epoch_ = 0;
  std::uint64_t epochs_ = 0;
  std::uint64_t skipped_ = 0;    // steps that `Anomaly<Skip>` has left out so far
  std::uint64_t run_steps_ = 0;  // the length that this trainer has given its curve
  bool run_begins_ = false;
  decltype(std::declval<wrapper&>().loss_meter()) losses_ = wrapped_.loss_meter();
  std::vector<Score> shown_scores_;
  std::optional<EpochSummary> closed_;
  std::optional<SamplerState> resume_;
  SamplerState position_;
  std::exception_ptr failure_;  // of an epoch that a `break` has ended
  bool under_way_ = false;      // an epoch that has not ended
  bool opened_ = false;
  bool printed_ = false;
  bool is_held_up_ = false;  // by a failure, or because rank 0 alone is in `on_rank0`
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
