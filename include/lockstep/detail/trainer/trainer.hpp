// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Trainer<Model, Policies...>`: a model and an order-free pack of policies as one job.

#include "lockstep/detail/observe/stragglers.hpp"
#include "lockstep/detail/trainer/epochs.hpp"
#include "lockstep/detail/trainer/predictions.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

namespace lockstep {

/// How `job.fit` trains.
struct FitOptions {
  std::uint64_t epochs = 1;
  std::size_t batch_size = 1;       ///< of one rank
  std::size_t test_batch_size = 0;  ///< 0: as `batch_size`
};

namespace detail {

/// A model under canonical policies, one per axis.
template <class Model, class Policies>
struct ComposedJob {
  using model_type = Model;
  using policies = Policies;

  /// The policy of an axis: `Job::policy<axes::Backend>`.
  template <class Axis>
  using policy = Pick<Axis, Policies>;

  using memory = typename policy<axes::Device>::choice::memory;
  using plan_rules = typename ShardingTraits<Policies>::plan_rules;
  using layout = Layout<Model, plan_rules>;
  using buffer_layout = BufferLayout<Model>;

  /// The step that a model gets in a world of one.
  using bare_step = BareStep<Model, plan_rules, memory>;

  /// The same on all ranks; a constant if the model's shapes are static.
  static constexpr std::uint64_t fingerprint()
    requires(!is_dynamic_model<Model>)
  {
    return fingerprint_of<Policies>(layout{}, buffer_layout{});
  }
  static std::uint64_t fingerprint(const Model& model) {
    return fingerprint_of<Policies>(layout(model), buffer_layout(model));
  }
};

/// Without `Feed`: every rank reads its own batches.
template <class Policies, class Wrapper>
class JobFeed {
 public:
  static constexpr bool sends = false;
  template <class Source, class Sampler>
  using loader = DataLoader<Source, Sampler>;

  constexpr JobFeed(Session&, const Wrapper&) {}

  /// `source` and `sampler` must outlive the loader.
  template <class Source, class Sampler>
  loader<Source, Sampler> make(const Source& source, Sampler& sampler,
                               const LoaderOptions& options) {
    return {source, sampler, options};
  }
  /// With `Feed`: calls `f()`; if it throws, ranks that wait for a batch abort as well.
  auto run_guarded(const auto& f) { return f(); }
};

/// Some ranks read for others, through a second communicator of the job's kind, with its own
/// threads, connections and stream, so that batches arrive while ranks compute.
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

 public:
  static constexpr bool sends = true;
  template <class Source, class Sampler>
  using loader = DataLoader<Source, Sampler, FedBatches<Source, Sampler, Line>>;

  /// **Ranks** all. **Host** blocks until all have come.
  JobFeed(Session& session, const Wrapper& wrapped)
      : line_(ConnectionOf<Joined>::template make<Joined>(session, "feed"),
              feed_route<typename Pick<axes::Feed, Policies>::choice>(
                  topology_for<Topo>(session.world()), session.rank()),
              Select{&wrapped}) {}

  template <class Source, class Sampler>
  loader<Source, Sampler> make(const Source& source, Sampler& sampler,
                               const LoaderOptions& options) {
    static_assert(
        std::is_same_v<typename BatchesOf<Source, Sampler>::type, LocalBatches<Source, Sampler>>,
        "lockstep: this data set has a loader of its own, because every rank has its "
        "samples where it needs them; leave Feed out, or give the job a plain data set");
    return {source, sampler, options, line_};
  }
  auto run_guarded(const auto& f) { return abort_on_exception_of<false>(line_, f); }
  Line& line() { return line_; }

 private:
  Line line_;
};

/// Stands for a function that `fit` is not given.
inline constexpr auto no_function = [](const auto&...) {};

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
  using observers = typename Composition::template policy<axes::Observers>;
  using span = typename observers::Span;

 public:
  using remainder = typename Composition::template policy<axes::Sampler>::remainder;
  using sampler =
      DistributedSampler<remainder, typename Composition::template policy<axes::Sampler>::order>;
  using wrapper = std::conditional_t<is_dp<Policies>, DpOf<Model, Policies>,
                                     BasicDdp<Model, Policies, CommunicatorOf<Policies>>>;
  using subgraphs = typename traits::subgraphs;
  using feed = JobFeed<Policies, wrapper>;
  /// The loader for a type of data set.
  template <class Source, class Sampler>
  using loader = typename feed::template loader<Source, Sampler>;
  static constexpr bool is_one_process = is_dp<Policies>;
  static constexpr bool on_gpus =
      !std::is_same_v<typename Composition::template policy<axes::Device>, Device<Cpu>>;
  static constexpr bool gathers_parameters = traits::gathers_parameters;
  static constexpr bool frees_gradients = traits::frees_gradients;
  /// May ranks have different numbers of batches?
  static constexpr bool joins = traits::joins;
  static constexpr bool ranks_are_threads = requires { ConnectionOf<Policies>::ranks_are_threads; };
  static constexpr bool spans_processes = requires { ConnectionOf<Policies>::spans_processes; };

  /// Joins the other ranks and broadcasts rank 0's values. A model by default or by a function,
  /// `[](Session&) { return Model(...); }`, is made on its GPU. **Ranks** all. **Host** blocks.
  template <ModelSource<Model, Session> Source = DefaultModel>
  explicit BasicTrainer(Session& session, Source&& source = {})
      : BasicTrainer(session, std::forward<Source>(source), take_trainer_options(session)) {}
  /// With the program's options instead of those of the command line.
  template <ModelSource<Model, Session> Source = DefaultModel>
  BasicTrainer(Session& session, Source&& source, TrainerOptions options)
      : session_(session),
        options_(std::move(options)),
        watch_(session, observed()),
        comm_(connect(session)),
        wrapped_(wrap(session, comm_, std::forward<Source>(source), options_)),
        feed_(session, wrapped_),
        progress_(session.rank(), options_),
        stragglers_(session) {
    static_cast<void>(&program_has_job<void>);  // instantiates its initializer
    sampler_options_.seed = options_.seed;
    // If ranks use all cores, a loading thread would only take time from the model.
    std::size_t busy = session.membership().local_world;
    if constexpr (is_one_process) busy = wrapped_.replicas();
    loader_options_.workers = has_free_core(busy) ? 1 : 0;
    loader_options_.timed = !options_.log.empty() && session.rank() == Rank{0};
    std::size_t devices = world_size().value();
    if constexpr (is_one_process) devices = wrapped_.replicas();
    progress_.display.set_peak_flops(options_.peak_flops * static_cast<double>(devices));
    if (progress_.log) log_run(typename Policies::pack{});
    watch_.after_begin(*this);
  }
  BasicTrainer(const BasicTrainer&) = delete;
  BasicTrainer& operator=(const BasicTrainer&) = delete;
  /// Reports a failure that no call has thrown, unless an exception ends the job anyway.
  ~BasicTrainer() {
    watch_.before_end();
    if (failure_ && std::uncaught_exceptions() == 0) report_late_failure(failure_, rank());
  }

  Rank rank() const { return session_.rank(); }
  WorldSize world_size() const { return session_.world(); }
  const Membership& membership() const { return session_.membership(); }
  /// The rank's GPU. What a program enqueues on its `stream()` is ordered with steps.
  const auto& gpu() const
    requires requires(const Comm& comm) { comm.gpu(); }
  {
    return comm_.gpu();
  }
  /// `job.option("epochs", 8)` is 8, or the value of `--epochs`: see `ProgramOptions::option`. The
  /// job's first operation throws for given options that the program has not asked for.
  auto option(std::string_view name, auto otherwise, std::string_view help = {}) {
    return session_.options().option(name, otherwise, help);
  }
  /// Arguments that neither launcher, trainer nor `option` has taken, the program's name first.
  const std::vector<std::string>& arguments() const { return session_.arguments(); }
  /// The value of `--data`: `fashion_mnist("train", job.data())`.
  const std::string& data() const { return options_.data; }

  /// Writes this rank's last collectives to `folder/rank_N.json`, for `lockstep-trace flight`.
  /// **Ranks** this one, on any thread.
  void dump(const std::string& folder) const { dump_flight_recorder(folder, rank()); }

  /// Broadcasts the parameters and buffers that `f(initial)` writes on rank 0; `initial.random()`
  /// starts from the job's seed. **Ranks** all. **Host** blocks.
  void initialize(auto&& f) {
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

  /// The options of this job's samplers and loaders; `batches` sets the batch size.
  SamplerOptions& sampler_options() { return sampler_options_; }
  LoaderOptions& loader_options() { return loader_options_; }

  /// After `--resume`, or a restart, the first call resumes the newest checkpoint. **Ranks** all.
  EpochRange<BasicTrainer> epochs(std::uint64_t count) {
    end_asking();
    if (count >> 63 != 0) fail("epochs", {"their number is negative"}, "give it 0 or more", rank());
    // By now the program has set its options and registered its values with `keep`.
    if (!has_begun_) begin_checkpoints(SaveMoment::first_epochs);
    return {*this, progress_.begin_epochs(count), count};
  }

  /// One batch of this rank: forward, backward, and once per `Accumulate<N>` reduce and update.
  /// Returns the loss of this batch, which replicas of DP share. **Ranks** all. **Host** blocks.
  using Members::step;
  template <class Set, class Batch>
  typename wrapper::Loss step(const Set& set, const Batch& batch) {
    require_all_ranks("step");
    [[maybe_unused]] const auto on = wrapped_.first().on_device();
    [[maybe_unused]] const span span_of_step({"ProfilerStep", wrapped_.updates()});
    const auto loss = feed_.run_guarded([&] { return wrapped_.step(set, batch); });
    std::size_t samples = 1;
    if constexpr (requires { batch.size(); }) {
      samples = batch.size();
    } else if constexpr (is_cut<Batch>) {
      samples = row_count(batch);
    }
    losses_.add(loss, samples);
    count_work(batch, samples);
    if constexpr (joins) own_samples_ += samples;
    const std::size_t ranks = comm_.world_size().value();
    const bool looks = progress_.display.step(samples * ranks, losses_.latest());
    if (looks) [[unlikely]]
      after_step();
    if constexpr (observers::any) {
      if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(loss)>>)
        watch_.count("loss", static_cast<double>(loss));
      watch_.count("learning_rate", wrapped_.learning_rate());
      watch_.after_step();
      if (looks) watch_.at_interval(*this);
    }
    return loss;
  }

  /// Evaluates each sample once, in any world, by `model.evaluate(step, batch, tally)` or the mean
  /// loss. The epoch's summary shows the scores under `name`. **Ranks** all. **Host** blocks.
  template <Dataset Source>
  Scores evaluate(const Source& source, std::size_t batch_size, std::string_view name = "test") {
    [[maybe_unused]] const auto on = enter("evaluate");
    const InJobCall in(JobCall::evaluate);
    [[maybe_unused]] const span span_of_call({"evaluate"});
    const auto begin = std::chrono::steady_clock::now();
    LoaderOptions options = loader_options_;
    options.batch_size = batch_size;
    require_same_batches(source.size(), batch_size);
    wrapped_.require_finite();
    if constexpr (traits::unites_buffers) wrapped_.synchronize_buffers();
    DistributedSampler<Exact, InOrder> shares(source.size(), world_size(), rank());
    Tally tally;
    fetch([&] {
      std::size_t batches = 0;
      for (const auto& batch : feed_.make(source, shares, options)) {
        [[maybe_unused]] const span span_of_forward({"forward"});
        wrapped_.evaluate(batch, tally);
        ++batches;
      }
      follow_evaluations(wrapped_, batches, source.size(), batch_size);
    });
    const Scores scores = lockstep::reduce(comm_, tally);
    progress_.show(scores, name);
    progress_.times.add_evaluation(begin, progress_.is_in_data());
    return scores;
  }

  using Members::evaluate;

  /// The usual loop: every epoch trains on `train`, evaluates on `test` if given, and calls
  /// `on_epoch` with the epoch, or also the scores; it returns false to stop. After each step calls
  /// `on_step(batch, loss)`. Returns the last summary. **Ranks** all. **Host** blocks.
  template <Dataset Train, class OnEpoch = decltype(no_function),
            class OnStep = decltype(no_function)>
  EpochSummary fit(const Train& train, const FitOptions& options, OnEpoch on_epoch = {},
                   OnStep on_step = {}) {
    return fit_both(train, nullptr, options, on_epoch, on_step);
  }
  template <Dataset Train, Dataset Test, class OnEpoch = decltype(no_function),
            class OnStep = decltype(no_function)>
  EpochSummary fit(const Train& train, const Test& test, const FitOptions& options,
                   OnEpoch on_epoch = {}, OnStep on_step = {}) {
    return fit_both(train, test, options, on_epoch, on_step);
  }

  /// The model's outputs for all samples of a data set, each predicted once, in the order of the
  /// data, on the ranks that `options.gather` says. **Ranks** all. **Host** blocks.
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
        return predict_all<typename Model::Output>(comm_, wrapped_, block,
                                                   feed_.make(source, block, loading), options);
      });
    }
  }
  template <Dataset Source>
  auto predict(const Source& source, std::size_t batch_size) {
    return predict(source, PredictOptions{.batch_size = batch_size});
  }
  using Members::predict;

  /// Opens a data set on all ranks, or with `Feed` on those that read for others, the only ones to
  /// need the files: `job.open([&] { return npy_dataset<float, int>(images, labels); })`. An
  /// exception aborts all ranks with its message. **Ranks** all. **Host** blocks.
  auto open(auto&& make) {
    [[maybe_unused]] const auto on = enter("open");
    const InJobCall in(JobCall::open);
    if constexpr (feed::sends) {
      using Source = std::remove_cvref_t<decltype(make())>;
      static_assert(Dataset<Source>,
                    "lockstep: job.open takes a function that returns a data set: size(), "
                    "batch_type and load(indices, out)");
      return abort_on_exception_of<false>(
          comm_, [&] { return Opened<Source>(comm_, feed_.line().reads(), make); });
    } else {
      return abort_on_exception_of<traits::alone>(comm_, make);
    }
  }

  /// Calls `f(log)` on rank 0. A collective of this job inside `f` throws: it would deadlock.
  template <class F>
  void on_rank0(F&& f) {
    end_asking();
    if (rank() != Rank{0}) return;
    const ValueWhile only(is_held_up_, true);
    std::forward<F>(f)(RunLog(progress_));
  }

  /// Adds a field to the epoch's record in the `--log` file: `job.log_field("reward", 3.5)`. Rank
  /// 0's last value is written; between epochs the field is the next epoch's.
  template <JsonScalar T>
  void log_field(std::string_view name, const T& value) {
    if (progress_.log) progress_.set_field(name, JsonLine().add(name, value));
  }

  /// The position after the last stepped batch. `resume`, before `epochs`, continues in any world.
  SamplerState position() const { return progress_.position(); }
  void resume(const SamplerState& position) { progress_.resume(position); }

  /// Adds a variable, each rank's own, to checkpoints; `resume`, called later, restores it. A
  /// number, bool, string, vector of numbers or `RandomStream` that outlives the last step.
  void keep(std::string_view name, auto& value) { saving().keep(name, value); }
  /// Saves the job, to be resumed with the next batch of the loop. Between the micro-batches of a
  /// step the save waits for the step's update and the end of the loop's body; values that the
  /// options refer to must live until then. **Ranks** all, with the same path. **Host** blocks
  /// until the file is written, or with `.asynchronous` until the state is copied.
  void save(const std::string& path, SaveOptions options = {}) {
    saving().save(path, std::move(options));
  }
  /// Loads parameters, buffers and the optimizer with its options, schedule and loss scale; the
  /// job's epochs start as without it. **Ranks** all. **Host** blocks.
  LoadReport load(const std::string& path, const LoadOptions& options = {}) {
    return saving().load(path, options);
  }
  /// Loads parameters and buffers from any safetensors file. **Ranks** all. **Host** blocks.
  LoadReport load_parameters(const std::string& path, const LoadOptions& options = {}) {
    return saving().load_parameters(path, options);
  }
  /// Resumes from a checkpoint, or the newest valid one of a folder: also restores the values of
  /// `keep`; `epochs` continues with the first batch not stepped. **Ranks** all. **Host** blocks.
  Resumed resume(const std::string& where, const LoadOptions& options = {}) {
    return saving().resume(where, options);
  }
  /// Resumes from the job's folder, as the first `epochs` does after `--resume` or a restart.
  /// Returns nothing to start anew; throws if all are damaged. **Ranks** all. **Host** blocks.
  std::optional<Resumed> resume() { return saving().resume(); }
  /// Saves into a folder regularly from now on. The command line's options (`--checkpoint` and
  /// others) take precedence. **Ranks** all, before `epochs`. **Host** blocks.
  void checkpoints(const CheckpointOptions& options) { saving().checkpoints(options); }
  /// The folder: `latest()`, `best()`. Null if the job has none.
  Checkpoints* checkpoints() { return saving().checkpoints(); }
  /// Waits until all checkpoints are written, and rethrows their errors; `launch` calls it after
  /// the program's function. **Ranks** all. **Host** blocks.
  void finish_saves() {
    [[maybe_unused]] const auto on = enter("save");
    if (saves_) checkpoint_hook<BasicTrainer>(*this, SaveMoment::finish);
  }

  EpochSummary summary() const { return progress_.summary(); }

  /// The means over the tallies of all ranks. **Ranks** all. **Host** blocks.
  Scores reduce_metrics(const Tally& tally) {
    [[maybe_unused]] const auto on = enter("reduce_metrics");
    const InJobCall in(JobCall::reduce_metrics);
    return lockstep::reduce(comm_, tally);
  }

  /// For collectives and groups of ranks (`new_group`, `join_groups`). With DP, a world of one.
  auto& communicator() { return comm_; }

  /// With `Groups<Grid<W, G>>`, the communicators of this rank's group and of the ranks with its
  /// index in the other groups: `job.group().all_reduce(sum)`. **Ranks** the group's.
  template <class W = wrapper>
  decltype(auto) group() {
    return static_cast<W&>(wrapped_).group();
  }
  template <class W = wrapper>
  decltype(auto) across() {
    return static_cast<W&>(wrapped_).across();
  }

  // Collectives of `communicator()`, of a number by value or of memory: a span, vector, array or
  // view. GPU jobs stage host memory. **Ranks** all. **Host** blocks, but not with device memory.

  /// `const double mean = job.all_reduce(loss, Average{});`, or data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto all_reduce(Data&& data, Op op = {}) {
    [[maybe_unused]] const auto on = enter("all_reduce");
    return comm_.all_reduce(std::forward<Data>(data), op);
  }
  /// The result on `root`; other ranks keep their number or data.
  template <class Data, class Op = Sum>
  [[nodiscard("the result is returned")]] auto reduce(Data&& data, Rank root = Rank{0},
                                                      Op op = {}) {
    [[maybe_unused]] const auto on = enter("reduce");
    return comm_.reduce(std::forward<Data>(data), root, op);
  }
  /// Root's number or data, on all ranks.
  template <class Data>
  [[nodiscard("the result is returned")]] auto broadcast(Data&& data, Rank root = Rank{0}) {
    [[maybe_unused]] const auto on = enter("broadcast");
    return comm_.broadcast(std::forward<Data>(data), root);
  }
  /// Every rank's number in a vector by rank, or every rank's `in` in `out`.
  template <class In, class... Out>
  [[nodiscard("the result is returned")]] auto all_gather(const In& in, Out&&... out) {
    [[maybe_unused]] const auto on = enter("all_gather");
    return comm_.all_gather(in, out...);
  }
  /// Every rank's elements, where their numbers differ: a `Gathered`, on all ranks or on `root`; or
  /// into `out`, with the counts as `GatheredPieces`. **Host** blocks.
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
  static Comm connect(Session& session) {
    session.options().leave_to_job();  // which closes them at its first operation
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
      wanted.devices = session.membership().devices;
      wanted.seed = options.seed;
      wanted.timeout = session.membership().timeout;
      return wrapper(wanted, std::forward<Source>(source));
    } else {
      if (options.replicas)
        fail("launch", {"--replicas was given to a job of ParallelStrategy<DDP>"},
             "give it --ranks, or use ParallelStrategy<DP>", session.rank());
      return wrapper(comm, std::forward<Source>(source), options.seed);
    }
  }
  template <class... Ps>
  void log_run(PolicyPack<Ps...>) {
    progress_.log_run(world_size(), options_.seed, Composition::fingerprint(wrapped_.model()),
                      {{Ps::axis::name, spelling<Ps>()}...});
  }

  /// Where observers write. What nobody would write is an error.
  const ObserverPaths& observed() const {
    using Path = std::string ObserverPaths::*;
    constexpr std::tuple<Path, const char*, const char*, const char*> all[] = {
        {&ObserverPaths::trace, "--trace", "Trace", "trace"},
        {&ObserverPaths::tensorboard, "--tensorboard", "TensorBoard", "metrics"},
        {&ObserverPaths::prometheus, "--prometheus", "Prometheus", "metrics"}};
    for (const auto& [path, option, observer, header] : all) {
      if (observers::has(path) || (options_.observers.*path).empty()) continue;
      fail("launch", {option, " was given, and this program's job has no such observer"},
           text({"add Observers<", observer, "> to its policies, and #include <lockstep/", header,
                 ".hpp>"}),
           rank());
    }
    return options_.observers;
  }
  void require_all_ranks(const char* operation) {
    if (is_held_up_) [[unlikely]]
      reject(operation);
  }
  /// Begins a call that all ranks make.
  [[nodiscard]] auto enter(const char* operation) {
    require_all_ranks(operation);
    if constexpr (joins) wrapped_.require_joined(operation);
    return wrapped_.on_device();
  }
  /// Ends the time in which the program may ask for options.
  void end_asking() {
    if (!is_asking_) return;
    is_asking_ = is_held_up_ = false;
    session_.options().close();
  }
  [[gnu::cold, gnu::noinline]] void reject(const char* operation) {
    if (is_asking_) return end_asking();
    if (failure_) {
      is_held_up_ = false;
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
    fail(operation, {"rank 0 alone has come here, inside on_rank0"},
         "call it outside, on all ranks", rank());
  }
  /// For the destructor of a loop that a `break` has ended. Destructors cannot throw: the trainer's
  /// next call throws the failure, or its destructor reports it.
  void after_break(const auto& f) noexcept {
    try {
      f();
    } catch (const std::exception&) {
      if (!failure_) failure_ = std::current_exception();
      is_held_up_ = true;
    }
  }

  /// `f()` takes batches from a loader. With `Feed`, a reader's failure aborts all ranks.
  auto fetch(const auto& f) -> decltype(f()) {
    return abort_on_exception_of<!feed::sends>(comm_, f);
  }

  /// A loop waits for its next batch.
  auto fetch_batch(const auto& f) -> decltype(f()) {
    [[maybe_unused]] const span span_of_data({"DataLoader"});
    return fetch(f);
  }

  template <class Train, class Test, class OnEpoch, class OnStep>
  EpochSummary fit_both(const Train& train, const Test& test, const FitOptions& options,
                        OnEpoch& on_epoch, OnStep& on_step) {
    for (auto epoch : epochs(options.epochs)) {
      for (const auto& batch : epoch.batches(train, options.batch_size)) {
        const auto loss = step(batch);
        on_step(batch, loss);
      }
      Scores scores;
      if constexpr (!std::same_as<Test, std::nullptr_t>) {
        scores = evaluate(
            test, options.test_batch_size == 0 ? options.batch_size : options.test_batch_size);
      }
      if (!goes_on_after(on_epoch, epoch, scores)) break;
    }
    return summary();
  }
  /// A function that returns false on any rank ends the training on all ranks. **Ranks** all.
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
        return comm_.all_reduce(std::uint8_t{!call()}, Max{}) == 0;
      }
    }
    return true;
  }

  // What ranks compare before they train. **Ranks** all. **Host** blocks.

  void require_same(const std::string& description) {
    require_agreement(comm_, "jobs", hash_of(description), [&] { return description; });
  }
  std::string sampler_seed() const {
    return text({"a sampler with seed ", sampler_options_.seed, "\n"});
  }
  /// Different sizes or seeds would skip or repeat samples. Fed ranks need the same `prefetch`.
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

  void begin_epoch(std::uint64_t number, std::uint64_t last) {
    [[maybe_unused]] const auto on = enter("epochs");
    const InJobCall in(JobCall::epochs);
    // A different learning rate on one rank would be a silent error.
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
    wrapped_.set_epoch(number);
    progress_.begin_epoch(number, last);
  }

  /// Begins an epoch's next loop over data; a resumed epoch continues the loop that was saved.
  void begin_data(sampler& fresh) {
    fresh.start();
    if (auto at = progress_.begin_loop(fresh.state(), fresh.size())) {
      if constexpr (joins) {
        // Ranks draw in step while they have samples; this rank may have none left.
        if (!progress_.now().loop_is_over && at->world == fresh.world() && at->first == 0) {
          at->samples = fresh.samples();
          at->position = std::min(at->position, fresh.size());
        }
      }
      fresh.resume(*at);
    }
    progress_.set_position(fresh.state());
  }
  void open_data(std::size_t batches) {
    if (progress_.now().loop_is_over) return;
    const std::uint64_t updates = Accumulation::updates_of(batches);
    if (updates == 0) {
      fail("epoch",
           {"it has ", batches, " batches, and Accumulate<", Accumulation::micro_batches,
            ", Tail::drop> drops what is less than a step"},
           "accumulate less, make batches smaller, or choose Tail::step", rank());
    }
    progress_.set_schedule_position(wrapped_, updates);
    const auto [sum, samples] = progress_.open_loop(batches, rank(), world_size());
    losses_.reset();
    if (samples != 0) losses_.set_totals({sum, samples});
    own_samples_ = static_cast<std::uint64_t>(samples);
    if constexpr (joins) wrapped_.begin_join();
  }

  void end_batch() {
    progress_.end_batch();
    if (saves_) [[unlikely]]
      save_if_due();
  }
  /// The loop has ended, by a `break` too. Exhausted ranks save after the same update as others.
  void leave_data(std::chrono::duration<double> waits) {
    if constexpr (joins) {
      if (wrapped_.is_joining()) save_if_due();  // for the batch of a `break`
      wrapped_.finish_join([this] { save_if_due(); });
    }
    // A loop that had ended when the job was saved has averaged buffers already.
    if (!progress_.end_loop()) average_buffers(JobCall::batches);
    close_data(waits);
    save_if_due();  // the tail may have made the last update
  }
  void leave_data_after_break(std::chrono::duration<double> waits) noexcept {
    after_break([&] { leave_data(waits); });
    if (is_held_up_) progress_.abort_epoch();
  }

  /// Reduces the losses of all ranks, once an epoch. `waits`: how long the loop waited for data.
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
    watch_.after_epoch(*this);
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

  /// For ranks with different numbers of steps and samples. **Ranks** all. **Host** blocks.
  void count_all_ranks(EpochSummary& summary) {
    summary.samples = comm_.all_reduce(own_samples_, Sum{});
    summary.steps = comm_.all_reduce(summary.steps, Max{});
  }

  /// With `Buffers<Synced>`. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void average_buffers([[maybe_unused]] JobCall call) {
    if constexpr (traits::averages_buffers) {
      const InJobCall in(call);
      wrapped_.synchronize_buffers();
    }
  }

  /// Micro-batches that are too few for a step must not count in the next epoch.
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

  /// Implements the public members. A program that calls one sets `checkpoint_hook` for the loops.
  auto saving() {
    constexpr bool is_included = requires { sizeof(JobSaving<BasicTrainer>); };
    static_assert(is_included,
                  "lockstep: a job that saves or resumes needs #include <lockstep/checkpoint.hpp>, "
                  "or <lockstep/lockstep.hpp>, which has everything");
    if constexpr (is_included) {
      return JobSaving<BasicTrainer>{*this};
    } else {
      return RejectedJob<Model>(session_);
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
  /// For throughput, where the model says its arithmetic or the batch its tokens.
  template <class Batch>
  void count_work([[maybe_unused]] const Batch& batch, [[maybe_unused]] std::size_t samples) {
    constexpr bool has_flops =
        requires(const Model& model) { static_cast<double>(model.flops(batch)); };
    constexpr bool has_tokens = requires { static_cast<double>(batch.token_count()); };
    if constexpr (has_flops || has_tokens) {
      double flops = 0, tokens = 0;
      if constexpr (has_flops) flops = static_cast<double>(wrapped_.model().flops(batch));
      if constexpr (has_tokens) tokens = static_cast<double>(batch.token_count());
      progress_.display.count_work(samples, flops, tokens);
    }
  }
  /// Follows every step of jobs that save. A loop over data saves later, when its body has ended.
  [[gnu::cold, gnu::noinline]] void after_step() {
    if (!has_begun_) begin_checkpoints(SaveMoment::first_step);
    if (progress_.now().loop == 0 || progress_.now().loop_is_over) save_if_due();
    const std::string straggler = stragglers_.look(session_);
    if (!straggler.empty() && !progress_.display.is_quiet()) progress_.display.print(straggler);
  }
  /// Runs between two batches of a loop, and after each update of an exhausted rank.
  void save_if_due() {
    if (saves_ && (*saves_)(wrapped_.updates())) [[unlikely]]
      run_due();
  }
  [[gnu::cold, gnu::noinline]] void run_due() {
    [[maybe_unused]] const span span_of_save({"checkpoint"});
    checkpoint_hook<BasicTrainer>(*this, SaveMoment::due);
  }

  TrainingProgress training_progress() {
    EpochSummary now = progress_.metrics();
    if constexpr (joins) {
      if (!progress_.now().is_closed) count_all_ranks(now);
    }
    TrainingProgress state = progress_.training_progress(now);
    if (!progress_.is_in_epoch()) return state;
    const auto [sum, samples] = losses_.totals();
    const double own[] = {sum, samples};
    state.losses.resize(2 * world_size().value());
    comm_.all_gather(own, state.losses);
    return state;
  }
  /// The position in the current epoch's data. Exhausted ranks have drawn less than others.
  std::optional<SamplerState> data_position() {
    if (progress_.now().loop == 0) return std::nullopt;
    SamplerState at = position();
    if constexpr (joins) at.position = comm_.all_reduce(at.position, Max{});
    return at;
  }

  Session& session_;
  TrainerOptions options_;
  [[no_unique_address]] typename observers::Watch watch_;  // ends when all else has
  Comm comm_;
  wrapper wrapped_;
  [[no_unique_address]] feed feed_;
  SamplerOptions sampler_options_;
  LoaderOptions loader_options_;
  EpochProgress progress_;
  StragglerWatch stragglers_;
  decltype(std::declval<wrapper&>().loss_meter()) losses_ = wrapped_.loss_meter();
  std::uint64_t own_samples_ = 0;  // of this rank in this loop, if `joins`
  std::exception_ptr failure_;     // in a loop that a `break` has ended
  bool has_begun_ = false;         // `epochs`, `step` or `resume` was called
  bool is_asking_ = true;          // the program may ask for options
  // Calls must look why they may fail: `is_asking_`, `failure_`, or rank 0 alone in `on_rank0`.
  bool is_held_up_ = true;
  std::shared_ptr<SaveDue> saves_;  // destroyed before the model: threads may be writing
};

}  // namespace detail

/// The job of a model under policies in any order: `Trainer<M, A, B>` and `Trainer<M, B, A>` are
/// one type. An invalid composition gives one compile error.
template <class Model, class... Ps>
using Trainer = detail::Compose<detail::BasicTrainer, Model, Ps...>;

namespace detail {

/// The compile-time part of a job, for tools and tests. It needs no CUDA, even if the job does.
template <class Model, class... Ps>
using Composed = ComposedJob<Model, CanonicalPolicies<Ps...>>;

}  // namespace detail

}  // namespace lockstep
