// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one job.

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
#include "lockstep/observe/progress_display.hpp"
#include "lockstep/observe/tally.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/job.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/rejected_trainer.hpp"
#include "lockstep/trainer/run_log.hpp"
#include "lockstep/trainer/training.hpp"

namespace lockstep {

namespace detail {

/// A job that trains: one object on every rank.
template <class Model, class Policies>
class BasicTrainer : public ComposedJob<Model, Policies> {
  using Base = ComposedJob<Model, Policies>;
  using Training = TrainingOf<Model, Policies>;
  using Comm = typename Training::communicator;
  using traits = ReplicaTraits<Model, Policies>;

 public:
  using typename Base::layout;
  using remainder = typename Base::template policy<axes::Sampler>::remainder;
  using sampler =
      DistributedSampler<remainder, typename Base::template policy<axes::Sampler>::order>;
  using wrapper = typename Training::wrapper;
  static constexpr bool is_one_process = is_dp<Policies>;
  static constexpr bool ranks_are_threads = ConnectionOf<Policies>::ranks_are_threads;
  static constexpr bool spans_processes = requires { ConnectionOf<Policies>::spans_processes; };

  /// Meets the other ranks and gives all of them rank 0's initial parameters. **Ranks** all.
  /// **Host** blocks.
  explicit BasicTrainer(Session& session, Model model = {}, TrainerOptions options = {})
      : session_(session),
        options_(std::move(options)),
        comm_(Training::communicate(session)),
        wrapped_(Training::make(session, comm_, std::move(model), options_)),
        display_(session.rank() == Rank{0} ? detect_terminal(stdout) : Terminal{}),
        log_(options_.log.empty() ? LogFile() : LogFile(options_.log, session.rank())) {
    sampler_options_.seed = options_.seed;
    // Where ranks fill all cores, a loading thread would only take time from the model.
    std::size_t busy = session.membership().local_world;
    if constexpr (is_one_process) busy = wrapped_.replicas();
    const bool has_free_cores = core_count() > busy;
    loader_options_.workers = has_free_cores ? 1 : 0;
  }

  Rank rank() const { return session_.rank(); }
  WorldSize world_size() const { return session_.world(); }
  const Membership& membership() const { return session_.membership(); }
  /// The program's arguments that are neither the launcher's nor the trainer's, its name first.
  const std::vector<std::string>& arguments() const { return options_.arguments; }
  /// The value of `--data`, for the program's data sets: `fashion_mnist("train", job.data())`.
  const std::string& data() const { return options_.data; }

  Model& model() { return wrapped_.model(); }
  /// A parameter, to look at.
  auto param(auto key) const { return wrapped_.param(key); }
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
    require_all_ranks("step");
    const auto loss = wrapped_.step(batch);
    std::size_t samples = 1;
    if constexpr (requires { batch.size(); }) samples = batch.size();
    losses_.add(loss, samples);
    loss_samples_ += static_cast<double>(samples);
    display_.step(samples * world_size().value(), losses_.latest());
    return loss;
  }

  /// Evaluates the model on all samples of a data set, each counted once in any world, by
  /// `model.evaluate(step, batch, tally)` or, without that, by its mean loss. The epoch's summary
  /// shows the scores under `name`. **Ranks** all. **Host** blocks.
  template <Dataset Source>
  Scores evaluate(const Source& source, std::size_t batch_size, std::string_view name = "test") {
    require_all_ranks("evaluate");
    require_same_data(source.size(), {.batch_size = batch_size});
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

  /// The means over the tallies of all ranks. **Ranks** all. **Host** blocks.
  Scores reduce_metrics(const Tally& tally) {
    require_all_ranks("reduce_metrics");
    return reduce(comm_, tally);
  }

  /// **Ranks** all. **Host** blocks.
  void barrier() {
    require_all_ranks("barrier");
    if constexpr (is_one_process) wrapped_.synchronize();
    comm_.barrier();
  }

  /// Calls `f(log)` on rank 0. A collective of this job inside `f` would wait for ranks that never
  /// come, so it is an error at once.
  template <class F>
  void on_rank0(F&& f) {
    if (rank() != Rank{0}) return;
    const Rank0Only only(is_held_up_);
    std::forward<F>(f)(RunLog(display_, log_));
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
    require_all_ranks("epochs");
    require_same_numbers();
    epoch_ = number;
    epochs_ = last;
    wrapped_.set_epoch(number);
    shown_scores_.clear();
    closed_.reset();
    opened_ = printed_ = false;
    under_way_ = true;
    display_.begin_epoch(number + 1, last, 0);
  }

  void open_data(std::size_t batches) {
    if constexpr (requires { schedule().steps = 0; }) {
      // A curve without a length is as long as the epochs of one `epochs` call, and begins with
      // each such call anew.
      if (run_begins_ && (schedule().steps == 0 || schedule().steps == run_steps_)) {
        run_steps_ = schedule().steps = epochs_ * batches / traits::micro_batches;
        wrapped_.begin_schedule(epoch_ * batches / traits::micro_batches);
      }
      run_begins_ = false;
    }
    losses_.reset();
    loss_samples_ = 0;
    opened_ = true;
    display_.begin_epoch(epoch_ + 1, epochs_, batches);
  }

  /// Adds up the losses of all ranks, once an epoch.
  void close_data() {
    if (!opened_ || closed_) return;
    closed_ = display_.summary();
    double totals[] = {losses_.sum(), loss_samples_};
    comm_.all_reduce(totals, Sum{});
    if (totals[1] > 0) closed_->loss = totals[0] / totals[1];
    display_.clear();
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
  void close_data_after_break() noexcept {
    after_break([this] { close_data(); });
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
    if (!printed_) display_.print(summary().text());
    if (log_) log_.write(summary().json().add("lr", wrapped_.learning_rate()));
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
    add("optimizer ", optimizer());
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
  SamplerOptions sampler_options_;
  LoaderOptions loader_options_;
  std::uint64_t epoch_ = 0;
  std::uint64_t epochs_ = 0;
  std::uint64_t run_steps_ = 0;  // the length that this trainer has given its curve
  bool run_begins_ = false;
  decltype(std::declval<wrapper&>().loss_meter()) losses_ = wrapped_.loss_meter();
  double loss_samples_ = 0;
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
