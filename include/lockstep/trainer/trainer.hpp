// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one job.

#include <exception>

#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/step.hpp"
#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/feed.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/observe/summary.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/agreement.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/strategy/members.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/epochs.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/predictions.hpp"
#include "lockstep/trainer/rejected.hpp"
#include "lockstep/trainer/wrappers.hpp"

namespace lockstep {

/// How `job.fit` trains.
struct FitOptions {
  std::uint64_t epochs = 1;
  std::size_t batch_size = 1;       ///< of one rank, as in `epoch.batches`
  std::size_t test_batch_size = 0;  ///< of the evaluation; 0: as `batch_size`
};

namespace detail {

/// A model under canonical policies, one per axis.
template <class Model, class Policies>
struct ComposedJob {
  using model_type = Model;
  using policies = Policies;

  /// The policy that answers an axis: `Job::policy<axes::Backend>`.
  template <class Axis>
  using policy = Pick<Axis, Policies>;

  using memory = typename policy<axes::Device>::choice::memory;
  using plan_rules = typename ShardingTraits<Policies>::plan_rules;
  using layout = Layout<Model, plan_rules>;
  using buffer_layout = BufferLayout<Model>;

  /// The step a model sees in a world of one.
  using bare_step = BareStep<Model, plan_rules, memory>;

  /// The fingerprint, the same on all ranks. It is a constant for a model of static shapes.
  static constexpr std::uint64_t fingerprint()
    requires(!is_dynamic_model<Model>)
  {
    return fingerprint_of<Policies>(layout{}, buffer_layout{});
  }
  static std::uint64_t fingerprint(const Model& model) {
    return fingerprint_of<Policies>(layout(model), buffer_layout(model));
  }
};

/// Feeding, where every rank reads its own batches.
template <class Policies, class Wrapper>
class JobFeed {
 public:
  static constexpr bool sends = false;
  template <class Source, class Sampler>
  using loader = DataLoader<Source, Sampler>;

  constexpr JobFeed(Session&, const Wrapper&) {}

  /// The loader of a loop over data, which `source` and `sampler` outlive.
  template <class Source, class Sampler>
  loader<Source, Sampler> make(const Source& source, Sampler& sampler,
                               const LoaderOptions& options) {
    return {source, sampler, options};
  }
  /// `f()`. Where it throws, ranks that wait for a batch hear the same words as those that wait for
  /// a gradient.
  auto tell(const auto& f) { return f(); }
};

/// Some ranks read for others, through a communicator beside the job's: of the same kind, with
/// threads, connections and on GPUs a stream of its own, so that batches come while ranks compute.
template <class Policies, class Wrapper>
  requires(Pick<axes::Feed, Policies>::sends)
class JobFeed<Policies, Wrapper> {
  using Joined = CanonicalPolicies<Pick<axes::Device, Policies>, Pick<axes::Backend, Policies>,
                                   Pick<axes::World, Policies>>;
  using Topo = typename Pick<axes::Groups,
                             Policies>::template in_world<Pick<axes::World, Policies>::static_size>;
  struct Select {
    const Wrapper* wrapped;
    auto operator()() const { return wrapped->on_device(); }
  };
  using Line = FeedLine<CommunicatorOf<Joined>, Select>;
  template <class Source, class Sampler>
  struct Fed : std::type_identity<DataLoader<Source, Sampler, FedBatches<Source, Sampler, Line>>> {
    static_assert(
        std::is_same_v<typename BatchesOf<Source, Sampler>::type, LocalBatches<Source, Sampler>>,
        "lockstep: this data set has a loader of its own, because every rank has its "
        "samples where it needs them; leave Feed out, or give the job a plain data set");
  };

 public:
  static constexpr bool sends = true;
  template <class Source, class Sampler>
  using loader = typename Fed<Source, Sampler>::type;

  /// **Ranks** all. **Host** blocks until all have come.
  JobFeed(Session& session, const Wrapper& wrapped)
      : line_(ConnectionOf<Joined>::template make<Joined>(session, "feed"),
              feed_route<typename Pick<axes::Feed, Policies>::choice>(
                  topology_for<Topo>(session.world()), session.rank()),
              Select{&wrapped}) {}

  template <class Source, class Sampler>
  loader<Source, Sampler> make(const Source& source, Sampler& sampler,
                               const LoaderOptions& options) {
    return {source, sampler, options, line_};
  }
  auto tell(const auto& f) { return tell_others_of<false>(line_, f); }
  Line& line() { return line_; }

 private:
  Line line_;
};

/// Stands for a function of the program, or for data to evaluate on, that `fit` is not given.
struct NotGiven {};

/// A job that trains: one object on every rank.
template <class Model, class Policies>
class BasicTrainer : public ComposedJob<Model, Policies>,
                     public JobMembers<BasicTrainer<Model, Policies>> {
  using Composition = ComposedJob<Model, Policies>;
  /// Replicas of DP together are one rank, in a world of one.
  using Comm = std::conditional_t<is_dp<Policies>, LoopbackCommunicator, CommunicatorOf<Policies>>;
  using traits = ReplicaTraits<Model, Policies>;
  using Accumulation = Pick<axes::Accumulate, Policies>;
  using Members = JobMembers<BasicTrainer>;

 public:
  using remainder = typename Composition::template policy<axes::Sampler>::remainder;
  using sampler =
      DistributedSampler<remainder, typename Composition::template policy<axes::Sampler>::order>;
  /// Runs the steps.
  using wrapper = std::conditional_t<is_dp<Policies>, DpOf<Model, Policies>,
                                     BasicDdp<Model, Policies, CommunicatorOf<Policies>>>;
  using subgraphs = typename traits::subgraphs;
  using feed = JobFeed<Policies, wrapper>;
  /// What loads the batches of a kind of data set in this job.
  template <class Source, class Sampler>
  using loader = typename feed::template loader<Source, Sampler>;
  static constexpr bool is_one_process = is_dp<Policies>;
  /// May ranks have different numbers of batches?
  static constexpr bool joins = traits::joins;
  static constexpr bool ranks_are_threads = requires { ConnectionOf<Policies>::ranks_are_threads; };
  static constexpr bool spans_processes = requires { ConnectionOf<Policies>::spans_processes; };

  /// Meets the other ranks and gives all of them rank 0's initial parameters. The model is
  /// constructed when they have met, by default or by a function, `[](Session&) { return
  /// Model(...); }`: on a GPU job with this rank's GPU selected. One that is given was constructed
  /// before. With `ParallelStrategy<DP>` every replica's is constructed on its own thread and
  /// device. Seed, log, data and checkpoints are as the session's command line says. **Ranks** all.
  /// **Host** blocks.
  template <ModelSource<Model, Session> Source = DefaultModel>
  explicit BasicTrainer(Session& session, Source&& source = {})
      : BasicTrainer(session, std::forward<Source>(source), take_trainer_options(session)) {}
  /// The same with options that the program gives, instead of those of the command line.
  template <ModelSource<Model, Session> Source = DefaultModel>
  BasicTrainer(Session& session, Source&& source, TrainerOptions options)
      : session_(session),
        options_(std::move(options)),
        comm_(meet(session)),
        wrapped_(wrap(session, comm_, std::forward<Source>(source), options_)),
        feed_(session, wrapped_),
        progress_(session.rank(), options_) {
    static_cast<void>(&program_has_job<void>);  // its initialiser is needed
    sampler_options_.seed = options_.seed;
    // Where ranks fill all cores, a loading thread would only take time from the model.
    std::size_t busy = session.membership().local_world;
    if constexpr (is_one_process) busy = wrapped_.replicas();
    loader_options_.workers = has_free_core(busy) ? 1 : 0;
    loader_options_.timed = !options_.log.empty() && session.rank() == Rank{0};
    if (progress_.log) log_run(typename Policies::pack{});
  }
  BasicTrainer(const BasicTrainer&) = delete;
  BasicTrainer& operator=(const BasicTrainer&) = delete;
  /// A failure that nobody has seen is told as a late one, unless an exception ends the job anyway.
  ~BasicTrainer() {
    if (failure_ && std::uncaught_exceptions() == 0) tell_late_failure({failure_, rank()});
  }

  Rank rank() const { return session_.rank(); }
  WorldSize world_size() const { return session_.world(); }
  const Membership& membership() const { return session_.membership(); }
  /// An option of the program's own: `job.option("epochs", 8)` is 8, or what follows `--epochs`.
  /// See `ProgramOptions::option`. All options are asked for before the job's first operation,
  /// which is an error where the command line has one that nobody has asked for.
  template <class T>
  auto option(std::string_view name, T otherwise, std::string_view help = {}) {
    return session_.options().option(name, otherwise, help);
  }
  /// The program's words that are neither the launcher's nor the trainer's and that no option has
  /// taken, its name first.
  const std::vector<std::string>& arguments() const { return session_.arguments(); }
  /// The value of `--data`, for the program's data sets: `fashion_mnist("train", job.data())`.
  const std::string& data() const { return options_.data; }

  /// Writes parameters and buffers anew: `f(initial)` on rank 0, whose values all ranks get.
  /// `initial.random()` starts from the job's seed. **Ranks** all. **Host** blocks.
  template <class F>
  void initialize(F&& f) {
    [[maybe_unused]] const auto on = enter("initialize");
    wrapped_.initialize(f, options_.seed);
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

  /// This rank's own seed and random numbers, different on every rank.
  Seed seed() const { return rank_seed(options_.seed, rank()); }
  RandomStream random() const { return RandomStream(seed()); }

  /// How samplers and loaders of this job are made; batch sizes come with `batches`.
  SamplerOptions& sampler_options() { return sampler_options_; }
  LoaderOptions& loader_options() { return loader_options_; }

  /// `for (auto epoch : job.epochs(10))`. After `--resume`, or a restart, the first call goes on
  /// from the newest checkpoint. **Ranks** all.
  EpochRange<BasicTrainer> epochs(std::uint64_t count) {
    end_asking();
    if (count >> 63 != 0) fail("epochs", {"their number is negative"}, "give it 0 or more", rank());
    // The program has set its numbers and kept its values by now.
    if (!has_begun_) begin_checkpoints(SaveMoment::first_epochs);
    return {*this, progress_.begin_epochs(count), count};
  }

  /// One batch of this rank: forward, backward, reduce, update (the last two once per
  /// `Accumulate<N>`). Returns this rank's loss. With `ParallelStrategy<DP>` there is one rank, and
  /// its replicas share the batch. **Ranks** all. **Host** blocks.
  using Members::step;
  template <class Set, class Batch>
  typename wrapper::Loss step(const Set& set, const Batch& batch) {
    require_all_ranks("step");
    [[maybe_unused]] const auto on = wrapped_.first().on_device();
    const auto loss = feed_.tell([&] { return wrapped_.step(set, batch); });
    std::size_t samples = 1;
    if constexpr (requires { batch.size(); }) {
      samples = batch.size();
    } else if constexpr (is_cut<Batch>) {
      samples = row_count(batch);
    }
    losses_.add(loss, samples);
    if constexpr (joins) own_samples_ += samples;
    const std::size_t ranks = comm_.world_size().value();
    if (progress_.display.step(samples * ranks, losses_.latest())) [[unlikely]]
      after_step();
    return loss;
  }

  /// Evaluates the model on all samples of a data set, each counted once in any world, by
  /// `model.evaluate(step, batch, tally)` or, without that, by its mean loss. The epoch's summary
  /// shows the scores under `name`. **Ranks** all. **Host** blocks.
  template <Dataset Source>
  Scores evaluate(const Source& source, std::size_t batch_size, std::string_view name = "test") {
    [[maybe_unused]] const auto on = enter("evaluate");
    const InJobCall in(JobCall::evaluate);
    const PhaseTimes::Evaluation evaluation(progress_.times, progress_.is_in_data());
    LoaderOptions options = loader_options_;
    options.batch_size = batch_size;
    require_same_batches(source.size(), batch_size);
    wrapped_.require_finite();
    if constexpr (traits::unites_buffers) wrapped_.synchronize_buffers();
    DistributedSampler<Exact, InOrder> shares(source.size(), world_size(), rank());
    Tally tally;
    fetch([&] {
      for (const auto& batch : feed_.make(source, shares, options)) wrapped_.evaluate(batch, tally);
    });
    const Scores scores = lockstep::reduce(comm_, tally);
    progress_.show(scores, name);
    return scores;
  }

  using Members::evaluate;

  /// The usual loop in one call: every epoch trains on `train` and, where there is one, evaluates
  /// on `test`. Then `on_epoch(epoch)` or `on_epoch(epoch, scores)` is called, which ends the
  /// training where it returns false; `on_step(batch, loss)` comes after every step. Returns the
  /// figures of the last epoch. **Ranks** all. **Host** blocks.
  template <Dataset Train, class OnEpoch = NotGiven, class OnStep = NotGiven>
  EpochSummary fit(const Train& train, const FitOptions& options, OnEpoch on_epoch = {},
                   OnStep on_step = {}) {
    return fit_both(train, NotGiven{}, options, on_epoch, on_step);
  }
  template <Dataset Train, Dataset Test, class OnEpoch = NotGiven, class OnStep = NotGiven>
  EpochSummary fit(const Train& train, const Test& test, const FitOptions& options,
                   OnEpoch on_epoch = {}, OnStep on_step = {}) {
    return fit_both(train, test, options, on_epoch, on_step);
  }

  /// The model's outputs for all samples of a data set, each predicted once in any world, in the
  /// order of the data: on rank 0, on all ranks, or each on the rank that predicted it. **Ranks**
  /// all. **Host** blocks.
  template <Dataset Source>
  auto predict(const Source& source, const PredictOptions& options) {
    if constexpr (require_output<Model>()) {
      [[maybe_unused]] const auto on = enter("predict");
      const InJobCall in(JobCall::predict);
      require_same_batches(source.size(), options.batch_size);
      if constexpr (traits::unites_buffers) wrapped_.synchronize_buffers();
      LoaderOptions loading = loader_options_;
      loading.batch_size = options.batch_size;
      loading.drop_last = false;
      BlockSampler block(source.size(), world_size(), rank());
      return fetch([&] {
        return predict_all<typename Model::Output>(
            comm_, wrapped_, block, feed_.make(source, block, loading), options.gather);
      });
    }
  }
  template <Dataset Source>
  auto predict(const Source& source, std::size_t batch_size) {
    return predict(source, PredictOptions{.batch_size = batch_size});
  }
  using Members::predict;

  /// The data set that `make()` opens, where it is read: on all ranks, or with `Feed` on those that
  /// read for others, which then need not have it:
  /// `auto train = job.open([&] { return npy_dataset<float, int>(images, labels); });`
  /// What goes wrong there ends all ranks, with its words. **Ranks** all. **Host** blocks.
  template <class Make>
  auto open(Make&& make) {
    [[maybe_unused]] const auto on = enter("open");
    const InJobCall in(JobCall::open);
    if constexpr (feed::sends) {
      using Source = std::remove_cvref_t<decltype(make())>;
      static_assert(Dataset<Source>,
                    "lockstep: job.open takes a function that returns a data set: size(), "
                    "batch_type and load(indices, out)");
      return tell_others_of<false>(
          comm_, [&] { return Opened<Source>(comm_, feed_.line().reads(), make); });
    } else {
      return tell_others_of<traits::alone>(comm_, make);
    }
  }

  /// Calls `f(log)` on rank 0. A collective of this job inside `f` would wait for ranks that never
  /// come, so it is an error at once.
  template <class F>
  void on_rank0(F&& f) {
    end_asking();
    if (rank() != Rank{0}) return;
    const ValueWhile only(is_held_up_, true);
    std::forward<F>(f)(RunLog(progress_));
  }

  /// Adds a field to the epoch's record in the file of `--log`: `job.log_field("reward", 3.5)`. The
  /// last value counts; rank 0's is written. Between epochs it is the next epoch's.
  template <JsonScalar T>
  void log_field(std::string_view name, const T& value) {
    if (progress_.log) progress_.set_field(name, JsonLine().add(name, value));
  }

  /// The position of the job in its data: after the last batch that was stepped. To go on from
  /// there, with this number of ranks or another, call `resume` before `epochs`.
  SamplerState position() const { return progress_.position(); }
  void resume(const SamplerState& position) { progress_.resume(position); }

  /// Checkpoints have the value of this variable of the program, each rank's own, and `resume`
  /// gives it back: a number, a bool, a text, a vector of numbers, a `RandomStream`. The variable
  /// must outlive the job's last step. To be called before anything is resumed.
  template <class T>
  void keep(std::string_view name, T& value) {
    saving().keep(name, value);
  }
  /// Saves the job as it is: between two batches of a loop, it goes on with the second. Between the
  /// micro-batches of a step the save is carried out after its update, when the loop's body has
  /// ended; the values of the options must live until then. **Ranks** all, with the same path.
  /// **Host** blocks until the file is written, or with `.asynchronous` until all that is saved was
  /// copied.
  void save(const std::string& path, SaveOptions options = {}) {
    saving().save(path, std::move(options));
  }
  /// Loads parameters, buffers and the optimizer with its numbers, schedule and loss scale. The
  /// epochs of this job begin as they would have. **Ranks** all. **Host** blocks.
  LoadReport load(const std::string& path, const LoadOptions& options = {}) {
    return saving().load(path, options);
  }
  /// Loads parameters and buffers from any safetensors file. **Ranks** all. **Host** blocks.
  LoadReport load_parameters(const std::string& path, const LoadOptions& options = {}) {
    return saving().load_parameters(path, options);
  }
  /// Goes on where a checkpoint was saved, or the newest valid one of a folder: loads all that
  /// `load` does and the values that are kept; the next calls of `epochs` go on with the first
  /// batch that was not stepped. **Ranks** all. **Host** blocks.
  Resumed resume(const std::string& where, const LoadOptions& options = {}) {
    return saving().resume(where, options);
  }
  /// The same from the job's own folder, now and not in the first call of `epochs`, if the job is
  /// to go on: after `--resume`, or when its launcher has started it again. Nothing where it is
  /// not, or where there is no checkpoint; an error where all are damaged. **Ranks** all. **Host**
  /// blocks.
  std::optional<Resumed> resume() { return saving().resume(); }
  /// Saves into a folder from now on, now and then; the options of the command line
  /// (`--checkpoint`, `--checkpoint-every`, `--keep`, `--best`, `--resume`) have precedence over
  /// these. **Ranks** all, before `epochs`. **Host** blocks.
  void checkpoints(const CheckpointOptions& options) { saving().checkpoints(options); }
  /// The folder: `latest()`, `best()`. Null where the job saves into none.
  Checkpoints* checkpoints() { return saving().checkpoints(); }
  /// Waits until all checkpoints are written, and throws what went wrong; `launch` calls it when
  /// the program is done. **Ranks** all. **Host** blocks.
  void finish_saves() {
    [[maybe_unused]] const auto on = enter("save");
    if (saves_) checkpoint_hook<BasicTrainer>(*this, SaveMoment::finish);
  }

  /// The epoch that is under way, or the last.
  EpochSummary summary() const { return progress_.summary(); }

  /// The means over the tallies of all ranks. **Ranks** all. **Host** blocks.
  Scores reduce_metrics(const Tally& tally) {
    [[maybe_unused]] const auto on = enter("reduce_metrics");
    const InJobCall in(JobCall::reduce_metrics);
    return lockstep::reduce(comm_, tally);
  }

  /// Through which the ranks of this job communicate: all collectives, and groups of ranks
  /// (`new_group`, `join_groups`). With `ParallelStrategy<DP>` it is a world of one.
  auto& communicator() { return comm_; }

  /// The communicator of this rank's group, with `Groups<Grid<W, G>>`, and that of the ranks which
  /// have its place in the other groups: `job.group().all_reduce(sum)`. **Ranks** the group's.
  template <class W = wrapper>
  decltype(auto) group() {
    return static_cast<W&>(wrapped_).group();
  }
  template <class W = wrapper>
  decltype(auto) across() {
    return static_cast<W&>(wrapped_).across();
  }

  // Collectives over ranks: those of `communicator()`, of one number, which is given and returned
  // by value, or of memory: a span, a vector, an array or a view. On GPUs too, memory may be the
  // host's; it is then staged and the host waits for the result. Device memory is reduced where it
  // is. **Ranks** all. **Host** blocks, with device memory not.

  /// `const double mean = job.all_reduce(loss, Average{});`, or data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto all_reduce(Data&& data, Op op = {}) {
    [[maybe_unused]] const auto on = enter("all_reduce");
    return comm_.all_reduce(std::forward<Data>(data), op);
  }
  /// On root, the number or data = op over ranks; elsewhere what it was.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto reduce(Data&& data, Rank root = Rank{0},
                                                      Op op = {}) {
    [[maybe_unused]] const auto on = enter("reduce");
    return comm_.reduce(std::forward<Data>(data), root, op);
  }
  /// Root's number, or data = root's data.
  template <class Data>
  [[nodiscard("the result is returned")]] auto broadcast(Data&& data, Rank root = Rank{0}) {
    [[maybe_unused]] const auto on = enter("broadcast");
    return comm_.broadcast(std::forward<Data>(data), root);
  }
  /// Every rank's number as a vector, by rank, or out = every rank's in.
  template <class In, class... Out>
  [[nodiscard("the result is returned")]] auto all_gather(const In& in, Out&&... out) {
    [[maybe_unused]] const auto on = enter("all_gather");
    return comm_.all_gather(in, out...);
  }
  /// Every rank's elements, where ranks bring different numbers of them: a `Gathered`, on all ranks
  /// or on `root`; or into `out`, with the counts as `GatheredPieces`. **Host** blocks.
  template <class In, class... Out>
  auto all_gather_variable(const In& in, Out&&... out) {
    [[maybe_unused]] const auto on = enter("all_gather_variable");
    return comm_.all_gather_variable(in, out...);
  }
  template <class In, class... Where>
  auto gather_variable(const In& in, Where&&... out_and_root) {
    [[maybe_unused]] const auto on = enter("gather_variable");
    return comm_.gather_variable(in, out_and_root...);
  }

  /// **Ranks** all. **Host** blocks.
  void barrier() {
    [[maybe_unused]] const auto on = enter("barrier");
    if constexpr (is_one_process) wrapped_.synchronize();
    comm_.barrier();
  }

 private:
  friend struct JobSaving<BasicTrainer>;
  friend Members;
  template <class, Dataset>
  friend class EpochBatches;
  template <class>
  friend class TrainingEpoch;
  template <class>
  friend class EpochRange;

  wrapper& first() { return wrapped_; }
  const wrapper& first() const { return wrapped_; }

  /// **Ranks** all. **Host** blocks until all have come.
  static Comm meet(Session& session) {
    session.options().leave_to_job();  // which ends the asking at its first operation
    if constexpr (is_one_process) {
      if (session.world() > WorldSize{1}) {
        fail("ParallelStrategy<DP>",
             {"the job has ", session.world(), " ranks, and DP is for the devices of one process"},
             "start it once, with --replicas, or use ParallelStrategy<DDP>", session.rank());
      }
      return Comm();
    } else {
      return make_communicator<Policies>(session);
    }
  }
  template <class Source>
  static wrapper wrap(Session& session, Comm& comm, Source&& source,
                      const TrainerOptions& options) {
    if constexpr (std::invocable<Source&, Session&>) {
      const auto make = [&] { return source(session); };
      return wrap(session, comm, make, options);
    } else if constexpr (is_one_process) {
      DpOptions wanted;
      if (options.replicas) wanted.replicas = *options.replicas;
      wanted.seed = options.seed;
      wanted.timeout = session.membership().timeout;
      return wrapper(wanted, std::forward<Source>(source));
    } else {
      if (options.replicas) {
        fail("launch", {"--replicas was given to a job of ParallelStrategy<DDP>"},
             "give it --ranks, or use ParallelStrategy<DP>", session.rank());
      }
      return wrapper(comm, std::forward<Source>(source), options.seed);
    }
  }
  template <class... Ps>
  void log_run(PolicyPack<Ps...>) {
    progress_.log_run(world_size(), options_.seed, Composition::fingerprint(wrapped_.model()),
                      {{Ps::axis::name, spelling<Ps>()}...});
  }

  // Which calls are refused.

  void require_all_ranks(const char* operation) {
    if (is_held_up_) [[unlikely]]
      refuse(operation);
  }
  /// The begin of a call that all ranks make.
  [[nodiscard]] auto enter(const char* operation) {
    require_all_ranks(operation);
    if constexpr (joins) wrapped_.require_joined(operation);
    return wrapped_.on_device();
  }
  /// The program has asked for all of its options.
  void end_asking() {
    if (!is_asking_) return;
    is_asking_ = is_held_up_ = false;
    session_.options().close();
  }
  [[gnu::cold, gnu::noinline]] void refuse(const char* operation) {
    if (is_asking_) return end_asking();
    if (failure_) {
      is_held_up_ = false;
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
    fail(operation, {"rank 0 alone has come here, inside on_rank0"},
         "call it outside, on all ranks", rank());
  }
  /// Calls `f` in the destructor of a loop that a `break` has left. A destructor cannot throw: a
  /// failure is thrown by this trainer's next call or, where there is none, told at its end.
  template <class F>
  void after_break(const F& f) noexcept {
    try {
      f();
    } catch (const std::exception&) {
      if (!failure_) failure_ = std::current_exception();
      is_held_up_ = true;
    }
  }

  // Steps and batches.

  /// `f()`, which takes batches from a loader. A reader's failure ends the ranks that it feeds; the
  /// others are told of it.
  template <class F>
  auto fetch(const F& f) -> decltype(f()) {
    return tell_others_of<!feed::sends>(comm_, f);
  }

  /// The loop of `fit`.
  template <class Train, class Test, class OnEpoch, class OnStep>
  EpochSummary fit_both(const Train& train, const Test& test, const FitOptions& options,
                        OnEpoch& on_epoch, OnStep& on_step) {
    for (auto epoch : epochs(options.epochs)) {
      for (const auto& batch : epoch.batches(train, options.batch_size)) {
        const auto loss = step(batch);
        if constexpr (!std::same_as<OnStep, NotGiven>) on_step(batch, loss);
      }
      Scores scores;
      if constexpr (!std::same_as<Test, NotGiven>) {
        scores = evaluate(
            test, options.test_batch_size == 0 ? options.batch_size : options.test_batch_size);
      }
      if constexpr (!std::same_as<OnEpoch, NotGiven>) {
        if (!goes_on_after(on_epoch, epoch, scores)) break;
      }
    }
    return summary();
  }
  /// Calls `f(epoch, scores)` or `f(epoch)`, whichever it takes. A function that returns false on
  /// any rank ends the training on all of them, so that ranks cannot part. **Ranks** all.
  template <class F, class Epoch>
  bool goes_on_after(F& f, Epoch& epoch, const Scores& scores) {
    constexpr bool takes_scores = std::invocable<F&, Epoch&, const Scores&>;
    constexpr bool is_callback = takes_scores || std::invocable<F&, Epoch&>;
    static_assert(is_callback,
                  "lockstep: fit calls its function after every epoch, as on_epoch(epoch) or "
                  "on_epoch(epoch, scores)");
    if constexpr (is_callback) {
      const auto call = [&]() -> decltype(auto) {
        if constexpr (takes_scores) {
          return f(epoch, scores);
        } else {
          return f(epoch);
        }
      };
      if constexpr (std::is_void_v<decltype(call())>) {
        call();
      } else {
        std::uint8_t stops[] = {static_cast<bool>(call()) ? std::uint8_t{0} : std::uint8_t{1}};
        comm_.all_reduce(stops, Max{});
        return stops[0] == 0;
      }
    }
    return true;
  }

  // What ranks compare before they train. **Ranks** all. **Host** blocks.

  void require_same(const std::string& description) {
    require_agreement(comm_, hash_of(description), [&] { return description; });
  }
  /// A different learning rate on one rank would be a silent error.
  void require_same_options() {
    std::string all;
    const auto add = [&all](const std::string& whose, const auto& options) {
      options.for_each([&](std::string_view name, double value) {
        all += text({whose, " ", name, " ", number_text(value), "\n"});
      });
    };
    for (std::size_t group = 0; group != traits::groups::count; ++group) {
      add(group == 0 ? "optimizer" : text({"optimizer of group ", group, ":"}),
          wrapped_.group_options().of(group));
    }
    add("schedule", wrapped_.schedule());
    require_same(all);
  }
  std::string sampler_seed() const {
    return text({"a sampler with seed ", sampler_options_.seed, "\n"});
  }
  /// Other sizes or seeds on a rank would leave samples out or take them twice. Ranks that are fed
  /// must also be fed as far ahead.
  void require_same_data(std::size_t samples, const LoaderOptions& options, bool is_fed) {
    if (world_size() == WorldSize{1}) return;
    require_same(text({"data of ", samples, " samples\nbatches of ", options.batch_size, " samples",
                       options.drop_last ? ", full ones only\n" : "\n", sampler_seed(),
                       "batches sent ", is_fed ? options.prefetch : 0, " ahead\n"}));
  }
  void require_same_batches(std::size_t samples, std::size_t batch_size) {
    LoaderOptions options;
    options.batch_size = batch_size;
    require_same_data(samples, options, false);
  }
  /// The most batches of any rank, where ranks have data of their own.
  std::size_t most_batches(std::size_t batches) {
    require_same(sampler_seed());
    std::uint64_t most[] = {batches};
    comm_.all_reduce(most, Max{});
    return most[0];
  }

  // The loops of `epochs` and `batches` begin and end.

  void begin_epoch(std::uint64_t number, std::uint64_t last) {
    [[maybe_unused]] const auto on = enter("epochs");
    const InJobCall in(JobCall::epochs);
    require_same_options();
    wrapped_.set_epoch(number);
    progress_.begin_epoch(number, last);
  }

  /// An epoch's next loop over data begins; of a resumed epoch that one which was under way, at its
  /// place.
  void begin_data(sampler& fresh) {
    fresh.start();
    if (auto at = progress_.begin_loop(fresh.state(), fresh.size())) {
      if constexpr (joins) {
        // Ranks draw in step as long as they have something to draw; this one may have no more.
        if (!progress_.loop_is_over() && at->world == fresh.world() && at->first == 0) {
          at->samples = fresh.samples();
          at->position = std::min(at->position, fresh.size());
        }
      }
      fresh.resume(*at);
    }
    progress_.place_loop(fresh.state());
  }
  void open_data(std::size_t batches) {
    if (progress_.loop_is_over()) return;
    const std::uint64_t updates = Accumulation::updates_of(batches);
    if (updates == 0) {
      fail("epoch",
           {"it has ", batches, " batches, and Accumulate<", Accumulation::micro_batches,
            ", Tail::drop> drops what is less than a step"},
           "accumulate less, make batches smaller, or choose Tail::step", rank());
    }
    progress_.place_schedule(wrapped_, updates);
    const auto [sum, samples] = progress_.open_loop(batches, rank(), world_size());
    losses_.reset();
    if (samples != 0) losses_.set_totals({sum, samples});
    own_samples_ = static_cast<std::uint64_t>(samples);
    if constexpr (joins) wrapped_.begin_join();
  }

  /// The loop is done with its batch.
  void end_batch() {
    progress_.end_batch();
    if (saves_) [[unlikely]]
      save_if_due();
  }
  /// The loop has no more batches, or a `break` has ended it. Where some ranks are through before
  /// others, all of them save after the same update.
  void leave_data(std::chrono::duration<double> waits) {
    if constexpr (joins) {
      if (wrapped_.is_joining()) save_if_due();  // the batch that a `break` has ended
      wrapped_.finish_join([this] { save_if_due(); });
    }
    // A loop that was over when the job was saved has its averages already.
    if (!progress_.end_loop()) average_buffers(JobCall::batches);
    close_data(waits);
    if (saves_ && saves_->is_waiting) run_due();  // the last update may be that of its tail
  }
  void leave_data_after_break(std::chrono::duration<double> waits) noexcept {
    after_break([&] { leave_data(waits); });
    if (is_held_up_) progress_.abort_epoch();
  }

  /// Adds up the losses of all ranks, once an epoch. `waits` is how long the loop waited for data.
  void close_data(std::chrono::duration<double> waits = {}) {
    if (!progress_.is_in_data()) return;
    const InJobCall in(JobCall::batches);
    [[maybe_unused]] const auto on = wrapped_.on_device();
    end_accumulation();
    wrapped_.require_finite();
    EpochSummary now = progress_.display.summary();
    progress_.times.set_waits(waits);
    const auto [sum, samples] = losses_.totals();
    double totals[] = {sum, samples};
    comm_.all_reduce(totals, Sum{});
    if (totals[1] > 0) now.loss = totals[0] / totals[1];
    if constexpr (joins) count_all_ranks(now);
    progress_.close(now);
  }

  void end_epoch() { end_epoch(progress_.is_last_epoch()); }
  void end_epoch(bool is_last) {
    progress_.leave_epoch();
    close_data();
    average_buffers(JobCall::epochs);  // of steps outside of loops over data
    if (rank() == Rank{0}) progress_.report_epoch(wrapped_.learning_rate());
    if (saves_) {
      checkpoint_hook<BasicTrainer>(
          *this, is_last ? SaveMoment::end_of_last_epoch : SaveMoment::end_of_epoch);
    }
  }
  void end_epoch_after_break() noexcept {
    after_break([this] {
      if (progress_.is_in_epoch()) end_epoch(true);
    });
  }

  /// Ranks have different numbers of steps and samples. **Ranks** all. **Host** blocks.
  void count_all_ranks(EpochSummary& summary) {
    std::uint64_t samples[] = {own_samples_};
    comm_.all_reduce(samples, Sum{});
    std::uint64_t steps[] = {summary.steps};
    comm_.all_reduce(steps, Max{});
    summary.samples = samples[0];
    summary.steps = steps[0];
  }

  /// With `Buffers<Synced>`. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void average_buffers([[maybe_unused]] JobCall call) {
    if constexpr (traits::averages_buffers) {
      const InJobCall in(call);
      wrapped_.synchronize_buffers();
    }
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
    if constexpr (traits::skips_anomalies) progress_.show_skipped(wrapped_.skipped_steps());
  }

  // For checkpoints. **Ranks** all. **Host** blocks.

  /// What does the work of the public members. A program that calls one, wherever, has the hook
  /// through which the job's loops come back to it.
  auto saving() {
    constexpr bool is_included = requires { sizeof(JobSaving<BasicTrainer>); };
    static_assert(is_included,
                  "lockstep: a job that saves or resumes needs #include <lockstep/checkpoint.hpp>, "
                  "or <lockstep/lockstep.hpp>, which has everything");
    if constexpr (is_included) {
      return JobSaving<BasicTrainer>{*this};
    } else {
      return RejectedTrainer<Model>(session_);
    }
  }
  [[gnu::cold, gnu::noinline]] void begin_checkpoints(SaveMoment moment) {
    has_begun_ = true;
    if (checkpoint_hook<BasicTrainer> != nullptr) {
      checkpoint_hook<BasicTrainer>(*this, moment);
    } else if (options_.checkpoint.any()) {
      fail("launch",
           {"the command line asks for checkpoints, and this program never mentions them: it was "
            "compiled without"},
           "add the line job.checkpoints(); before job.fit or job.epochs", rank());
    }
  }
  /// Comes after every step of jobs that save. In a loop over data it is not yet time to: the
  /// loop's body may have more to do with its batch.
  [[gnu::cold, gnu::noinline]] void after_step() {
    if (!has_begun_) begin_checkpoints(SaveMoment::first_step);
    if (!progress_.is_in_loop()) save_if_due();
  }
  /// Comes between two batches of a loop, and after each update of a rank that is through. Nothing
  /// is called through a pointer until something may be due.
  void save_if_due() {
    if (saves_ && (*saves_)(wrapped_.updates())) [[unlikely]]
      run_due();
  }
  [[gnu::cold, gnu::noinline]] void run_due() {
    checkpoint_hook<BasicTrainer>(*this, SaveMoment::due);
  }

  /// How far the loops are.
  CourseState course() {
    EpochSummary now = progress_.figures();
    if constexpr (joins) {
      if (!progress_.is_closed()) count_all_ranks(now);
    }
    CourseState state = progress_.course(now);
    if (!progress_.is_in_epoch()) return state;
    const auto [sum, samples] = losses_.totals();
    const double own[] = {sum, samples};
    state.losses.resize(2 * world_size().value());
    comm_.all_gather(own, state.losses);
    return state;
  }
  /// The position in the data of the epoch that is under way. Ranks that are through have made
  /// fewer draws than others.
  std::optional<SamplerState> data_position() {
    if (!progress_.has_loop()) return std::nullopt;
    SamplerState at = position();
    if constexpr (joins) {
      std::uint64_t most[] = {at.position};
      comm_.all_reduce(most, Max{});
      at.position = most[0];
    }
    return at;
  }

  Session& session_;
  TrainerOptions options_;
  Comm comm_;
  wrapper wrapped_;
  [[no_unique_address]] feed feed_;
  SamplerOptions sampler_options_;
  LoaderOptions loader_options_;
  EpochProgress progress_;
  decltype(std::declval<wrapper&>().loss_meter()) losses_ = wrapped_.loss_meter();
  std::uint64_t own_samples_ = 0;  // of this rank in this loop, where ranks have different numbers
  std::exception_ptr failure_;     // of an epoch that a `break` has ended
  bool has_begun_ = false;         // the first epochs or step have come
  bool is_asking_ = true;          // the program, for its options
  // Because the program asks for its options, by a failure, or because rank 0 alone is in
  // `on_rank0`.
  bool is_held_up_ = true;
  std::shared_ptr<SaveDue> saves_;  // ends before the model does: threads may still be writing
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
