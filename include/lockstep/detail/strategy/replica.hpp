// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A replica: one model with its parameters, gradients and optimizer, on one rank.

#include "lockstep/detail/checkpoint/state.hpp"
#include "lockstep/detail/strategy/agreement.hpp"
#include "lockstep/detail/strategy/gathered_outputs.hpp"
#include "lockstep/detail/strategy/gradients.hpp"
#include "lockstep/detail/strategy/host_execution.hpp"
#include "lockstep/detail/strategy/updater.hpp"

namespace lockstep::detail {

/// The parts of a training step. W ranks, each with a replica and its share of a batch, train like
/// one process on the whole batch: parameters are bitwise equal on all ranks after every step (with
/// `LocalSGD`, after every average). A static world of one costs what the bare model costs.
///
/// A replica that throws does not abort other ranks: `DDP` does, `DP` once they communicate.
template <class Model, class Policies, class Comm>
class Replica {
 public:
  using model_type = Model;
  using traits = ReplicaTraits<Model, Policies>;
  using communicator_type = Comm;
  using span_type = typename traits::span;
  using execution_type = DeviceExecution<typename traits::device, traits, Comm>;
  using layouts_type = TensorLayouts<traits>;
  /// On a GPU the host waits for a loss only when it is converted to a number.
  using Loss = typename execution_type::Loss;

 private:
  using Gradients = GradientBuckets<traits, Comm, execution_type>;
  using Updating = Updater<traits, Comm, execution_type>;
  using Copies = StateCopies<typename traits::device, Comm>;
  using StateEntries = std::vector<StateEntry>;

 public:
  using bare_step = typename Gradients::Features::template View<typename execution_type::Step>;
  using step_type =
      std::conditional_t<traits::tracks,
                         TrackedStep<Model, bare_step, Gradients, typename Updating::Owned>,
                         bare_step>;
  /// An evaluation waits for no parameter, unless its step gathers them.
  using evaluated_step = std::conditional_t<traits::gathers_parameters, step_type, bare_step>;
  using evaluation_step = EvaluationStep<evaluated_step>;
  using subgraphs = typename traits::subgraphs;

  /// Compares the job over ranks; all get rank 0's initial values. **Ranks** all. **Host** blocks.
  explicit Replica(Comm& comm, Model model = {}, Seed seed = {})
      : Replica(comm, layouts_type(model), std::move(model)) {
    initialize_from_model(seed);
  }
  /// The same without initial values: parameters are zero until `initialize`.
  Replica(Comm& comm, layouts_type layouts, Model&& model)
      : built_(comm),
        comm_(comm),
        model_(std::move(model)),
        execution_(comm),
        layouts_(std::move(layouts)),
        parameters_(agree_and_allocate()),
        groups_(comm),
        buffers_(allocate(layouts_.buffers.plan().bytes)),
        gradients_(comm, execution_, layouts_.parameters, &groups_),
        updater_(comm, execution_, layouts_.parameters, parameters_, &groups_),
        step_(make_step(gradients_.arena())),
        copies_(comm) {
    built_.leave();
  }
  Replica(const Replica&) = delete;
  Replica& operator=(const Replica&) = delete;
  ~Replica() { built_.return_to(comm_); }

  /// RAII: makes the replica's GPU the thread's current device. Members that a program calls do so.
  [[nodiscard]] auto on_device() const { return typename execution_type::OnDevice(comm_); }
  /// Selects the GPU for good, on a library thread whose current device a model may have changed.
  void select_device() const { execution_type::OnDevice::select(comm_); }

  Model& model() { return model_; }
  const Model& model() const { return model_; }
  Comm& communicator() { return comm_; }
  auto& groups() { return groups_; }
  execution_type& execution() { return execution_; }

  auto param(auto key) const {
    static_assert(!traits::gathers_parameters || sizeof(key) == 0,
                  "lockstep: with Sharding<FullyShard> no rank has a whole parameter to look at; "
                  "let all ranks call for_each_parameter, or save a consolidated checkpoint");
    wait_for_host_access();
    return step_.param(key);
  }
  auto buffer(auto key) const { return step_.buffer(key); }
  /// This rank's gradient; after `reduce`, the average over ranks.
  auto grad(auto key) const {
    static_assert(!traits::frees_gradients || sizeof(key) == 0,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> no "
                  "rank has whole gradients to look at; use ZeroRedundancy alone");
    return step_.grad(key);
  }

  /// Calls `f(name, view)` for every parameter, in the order of declaration; likewise for gradients
  /// and buffers. **Host** on a GPU, blocks until all steps are done; views are of device memory.
  /// With `Sharding<FullyShard>` units of parameters are gathered, and a view is valid inside `f`
  /// only. **Ranks** with `FullyShard` all, else this one.
  void for_each_parameter(auto&& f) const {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (traits::gathers_parameters) {
      step_.owned().begin_forward();
      step_.for_each_parameter([&](auto name, auto view) {
        await_device();
        f(name, view);
      });
      return step_.owned().end_evaluation();
    }
    wait_for_host_access();
    await_device();
    step_.for_each_parameter(f);
  }
  void for_each_gradient(auto&& f) const {
    [[maybe_unused]] const auto on = on_device();
    await_device();
    step_.for_each_gradient(f);
  }
  void for_each_buffer(auto&& f) const {
    [[maybe_unused]] const auto on = on_device();
    await_device();
    step_.for_each_buffer(f);
  }
  /// Calls `f(parameter, state, view)` for every optimizer state that this rank keeps, as a view of
  /// one axis, and for master weights as "master". Where ranks divide states, views are of slices,
  /// and `f(parameter, state, view, first)` gets the slice's first index in the parameter.
  void for_each_state(auto&& f) const {
    [[maybe_unused]] const auto on = on_device();
    await_device();
    const auto& layout = layouts_.parameters;
    const auto give = [&](std::size_t p, std::string_view state, const auto& values,
                          std::size_t first) {
      using T = typename std::remove_cvref_t<decltype(values)>::element_type;
      const auto view = make_view<typename traits::memory, true, element_kind<T>(), dynamic>(
          reinterpret_cast<std::byte*>(values.data()), Extents<dynamic>{values.size()});
      if constexpr (requires { f(layout.name(p), state, view, first); }) {
        f(layout.name(p), state, view, first);
      } else {
        f(layout.name(p), state, view);
      }
    };
    if constexpr (traits::keeps_masters) {
      for (std::size_t p = 0; p != layout.infos().size(); ++p) {
        if (!layout.plan().is_trained(p)) continue;
        updater_.for_each_master(
            p, [&](auto values, std::size_t first) { give(p, "master", values, first); });
      }
    }
    updater_.for_each_state(give);
  }

  /// Calls `f(initial)` on rank 0, whose values all ranks get. **Ranks** all. **Host** blocks.
  void initialize(auto&& f, Seed seed = {}) {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (traits::gathers_parameters) return initialize_units(f, seed);
    const auto masters = updater_.allocate_masters();
    finish_allocations();
    await_parameters();
    if constexpr (traits::shares_parameters) comm_.barrier();  // no rank reads them any more
    if (comm_.rank() == Rank{0}) {
      const typename traits::declared_layout declared(model_);
      const auto write = [&]<class P, class B>(P&& parameters, B&& buffers) {
        write_initial<P, B>(f, declared, parameters, buffers, seed);
      };
      execution_.initialize(model_, {parameters_, nullptr, buffers_}, updater_.masters_in(masters),
                            write);
    }
    if constexpr (traits::shares_parameters) {
      comm_.barrier();
    } else {
      broadcast(parameters_, layouts_.parameters.plan().all_bytes);
      if constexpr (traits::keeps_masters) updater_.distribute_masters(masters);
    }
    if constexpr (traits::joins) gradients_.features().forget_live();
    broadcast(buffers_, layouts_.buffers.plan().bytes);
    await_device();  // callers may read the values without ordering streams
  }
  void initialize_from_model(Seed seed) {
    if constexpr (traits::draws) {
      // Random numbers of steps derive from rank 0's seed, the one that a checkpoint stores.
      [[maybe_unused]] const auto on = on_device();
      Seed common = seed;
      if constexpr (!traits::alone) {
        finish_allocations();
        common = Seed{comm_.broadcast(seed.value(), Rank{0})};
      }
      gradients_.features().start(common, comm_.rank());
    }
    initialize([&](auto& initial) { initialize_model(model_, initial); }, seed);
  }

  // Options of the optimizer, and counts. None of these communicates.

  /// The optimizer's options, which must be equal on all ranks: `replica.optimizer().lr = 0.01`.
  auto& optimizer() { return updater_.options(); }
  /// The options of a set of `ParameterGroups`: `replica.optimizer(NoDecay<>{})`.
  auto& optimizer(auto set) { return updater_.options(set); }
  auto& group_options() { return updater_.group_options(); }
  auto& schedule() { return updater_.schedule(); }
  void begin_schedule(std::uint64_t step) { updater_.begin_schedule(step); }
  void set_epoch(std::uint64_t epoch) { updater_.set_epoch(epoch); }
  double learning_rate() const { return updater_.learning_rate(); }
  std::uint64_t updates() const { return updater_.steps(); }
  /// The bytes of parameters, of optimizer states with master weights, and of gradients with what
  /// they are reduced in, that this rank keeps.
  std::size_t parameter_bytes() const {
    const auto& plan = layouts_.parameters.plan();
    if constexpr (traits::gathers_parameters)
      return plan.all_bytes - plan.bytes + step_.owned().bytes();
    return plan.all_bytes;
  }
  std::size_t state_bytes() const { return updater_.state_bytes(); }
  std::size_t gradient_bytes() const { return gradients_.bytes(); }
  /// The bytes that this rank has passed to collectives for gradients or parameters.
  std::uint64_t bytes_sent() { return gradients_.reductions().bytes_sent(); }

  /// A batch where the model can read it, valid until the next one of its type.
  const auto& to_device(const auto& batch) { return execution_.to_device(batch); }

  /// Advances random numbers, before `forward` and any capture. **Stream** on a GPU, in its order.
  void draw_anew() {
    gradients_.features().each([&](auto& feature) { feature.prepare(updates(), micro_batches_); });
  }

  std::size_t micro_batches() const { return micro_batches_; }

  /// Is the next micro-batch the last of `Accumulate<N>`?
  bool completes_step() const {
    if constexpr (!traits::tracks) return true;
    return micro_batches_ + 1 >= traits::micro_batches;
  }

  void choose_subgraph([[maybe_unused]] std::size_t set) {
    if constexpr (traits::has_subgraphs) gradients_.features().choose_subgraph(set);
  }

  /// RAII: this thread's collectives carry the sub-graphs since the last update, if compared.
  auto in_step() const {
    if constexpr (traits::compares_subgraphs) {
      return InJobCall(step_of_subgraphs(gradients_.features().chosen_subgraphs()));
    } else {
      return 0;
    }
  }

  /// Broadcasts the buffers of rank 0, or under `UnevenInputs<Join>` of the lowest rank that had a
  /// batch in the latest step; with `Buffers<Synced>` averages them, and takes the maximum of
  /// integers, such as counts of batches. **Ranks** all. **Host** blocks, or on a GPU enqueues.
  void synchronize_buffers(JobCall part_of = current_job_call()) {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (traits::averages_buffers) {
      for (const Bucket& bucket : layouts_.buffers.plan().buckets()) {
        with_element<Model, TensorRole::buffer, typename traits::buffer_types>(
            bucket.element, [&]<class T>(std::type_identity<T>) {
              using Op = std::conditional_t<FloatingElement<T>, Average, Max>;
              comm_.all_reduce(elements_at<T>(buffers_, bucket.offset, bucket.bytes), Op{},
                               part_of);
            });
      }
    } else {
      Rank root{0};
      if constexpr (traits::joins && traits::broadcasts_buffers)
        root = gradients_.features().newest();
      broadcast(buffers_, layouts_.buffers.plan().bytes, part_of, root);
    }
  }

  /// Throws on all ranks if parameters differ between them. **Ranks** all. **Host** blocks.
  void check_replicas() {
    [[maybe_unused]] const auto on = on_device();
    await_parameters();
    std::string found;
    for (std::size_t p = 0; p != layouts_.parameters.infos().size(); ++p) {
      // A slice that one rank owns has no copy to be compared with.
      if (traits::gathers_parameters && layouts_.parameters.plan().is_trained(p)) continue;
      const StateEntry parameter = entry_of(StateRole::parameter, p, layouts_.parameters,
                                            layouts_.parameters.infos()[p].element, parameters_);
      auto memory = make_state_memory(parameter.file_bytes());
      const StateCopy copy{memory.data(), parameter};
      copy_out({&copy, 1});
      await_copies();
      const std::string_view bytes(reinterpret_cast<const char*>(memory.data()),
                                   parameter.file_bytes());
      found += text({"parameter ", parameter.name, " with hash ", hash_of(bytes), "\n"});
    }
    require_agreement(comm_, "parameters", hash_of(found), [&] { return found; });
  }

  /// Calls `f(step)` with the step whose gradients the model writes next.
  auto with_step(const auto& f) {
    if constexpr (traits::has_subgraphs) {
      const bool adds = !traits::frees_gradients && micro_batches_ != 0;
      const auto& step = adds ? adding_step() : step_;
      return with_index<subgraphs::count>(gradients_.features().subgraph(), [&](auto set) {
        SubgraphStep<step_type, subgraphs, set> used(step);
        return f(used);
      });
    } else if constexpr (traits::tracks && !traits::frees_gradients) {
      return f(micro_batches_ == 0 ? step_ : adding_step());
    } else {
      return f(step_);
    }
  }

  /// The model's loss of a batch. `Sync::yes`: after `Buffers<Broadcast>`. **Ranks** all, or with
  /// `Sync::no` and without `Norms<Synced>` this one.
  template <class Batch>
  Loss forward(const Batch& on_device, Sync sync) {
    if constexpr (require_model<Model, step_type, Batch>()) {
      return run_forward(sync,
                         [&](auto& step) { return execution_.forward(model_, step, on_device); });
    }
    std::terminate();  // never reached: a clause is missing, and has been reported
  }

  /// With `Anomaly<Stop>`, throws if a loss that the host knows is not finite.
  void require_finite_loss(const Loss& loss) const {
    if constexpr (traits::stops_at_anomaly && std::is_same_v<Loss, double>) {
      if (!is_finite(loss)) [[unlikely]]
        reject_loss(loss);
    }
  }

  /// Adds the model's gradients of a batch to those of earlier micro-batches. `Sync::yes`: buckets
  /// are reduced as they complete. `output_gradients` belong to a loss that is not this rank's own.
  template <class Batch, class... OutputGradients>
  void backward(const Batch& on_device, Sync sync, const OutputGradients&... output_gradients) {
    [[maybe_unused]] const auto in = in_step();
    [[maybe_unused]] const span_type span({"backward"});
    begin_backward(sync);
    if constexpr (BackwardRunning<Model, step_type, Batch, OutputGradients...>)  // else reported
      with_step([&](auto& step) { model_.backward(step, on_device, output_gradients...); });
    end_backward();
  }

  /// For gradients that the caller writes to the step of `with_step`, between these two calls.
  void begin_backward(Sync sync) {
    if constexpr (traits::gathers_parameters) {
      updater_.owned().begin_backward();
    } else {
      await_parameters();
    }
    if constexpr (traits::tracks) gradients_.begin_backward(sync, micro_batches_ != 0);
  }
  void end_backward() {
    if constexpr (traits::gathers_parameters) updater_.owned().end_backward();
    if constexpr (traits::tracks) {
      gradients_.end_backward();
      ++micro_batches_;
    }
  }

  /// A backward pass without samples on this rank: zero gradients, and no parameter is used.
  void backward_without_samples(Sync sync) {
    [[maybe_unused]] const auto in = in_step();
    await_parameters();
    gradients_.pass_without_samples(sync, micro_batches_ != 0);
    ++micro_batches_;
  }

  /// Weights the gradients of this rank's later micro-batches; weights have a mean of 1 over ranks.
  void weigh(double weight)
    requires(traits::weighs_shares)
  {
    gradients_.weigh(weight);
  }

  /// Averages gradients in place. **Ranks** all. **Host** as `update`; with `DivideByLive` blocks.
  template <class T = traits>
  void reduce() {
    static_assert(!T::frees_gradients,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> a "
                  "rank gets the averages of its slices alone; write reduce_and_update() instead "
                  "of reduce().update()");
    [[maybe_unused]] const auto in = in_step();
    gradients_.average();
  }

  /// Ends a step whose update the program makes: averages gradients, then calls `f(is_used)`, where
  /// `is_used(parameter)` says whether any rank has used it. **Ranks** all. **Host** blocks.
  void reduce_and_publish(const auto& f) {
    reduce();
    if constexpr (traits::skips_unused) gradients_.features().agree_on_usage(gradients_);
    f([&]([[maybe_unused]] std::size_t parameter) {
      if constexpr (traits::notes_usage) return gradients_.features().used()[parameter] != 0;
      return true;  // usage is not tracked
    });
    end_update();
  }

  /// Begins an update from so many micro-batches, at the current rate, outside of a capture.
  void begin_update(std::size_t micro_batches = traits::micro_batches) {
    updater_.begin(micro_batches, gradients_.factor());
  }

  /// The optimizer's update, after `reduce`. **Ranks** all. **Host** blocks until all ranks have
  /// the new parameters (with ZeRO, until gathers have started), or on a GPU enqueues.
  void update() {
    [[maybe_unused]] const auto in = in_step();
    [[maybe_unused]] const span_type span({"optimizer.step"});
    updater_.begin(traits::micro_batches);
    updater_.update_averaged(gradients_);
    end_update();
  }

  /// Reduces and updates, in one pass where possible. **Ranks** all. **Host** as `update`.
  void reduce_and_update() {
    [[maybe_unused]] const auto in = in_step();
    [[maybe_unused]] const span_type span({"optimizer.step"});
    updater_.reduce_and_update(gradients_);
    end_update();
  }

  /// One micro-batch: forward, backward and, if it completes a step, reduce and update, before
  /// which a captured step needs `begin_update`. **Ranks** all. **Host** as `update`.
  Loss run_micro_batch(const auto& on_device) {
    const bool last = completes_step();
    const Sync sync = last ? Sync::yes : Sync::no;
    const Loss loss = forward(on_device, sync);
    backward(on_device, sync);
    if (last) {
      if constexpr (!traits::captures) begin_update();
      reduce_and_update();
    }
    return loss;
  }

  /// A step of the mean over accumulated micro-batches that do not complete one, if any. **Ranks**
  /// all, with equally many; under `UnevenInputs<Join>` those that have some. **Host** as `update`.
  void step_tail() {
    const std::size_t micro_batches = micro_batches_;
    if (micro_batches == 0) return;
    [[maybe_unused]] const auto in = in_step();
    if constexpr (traits::joins) {
      // Other ranks divide by the number of micro-batches of a whole step.
      before_forward(step_call<traits, JobCall::forward>());
      if (traits::micro_batches > 1 && micro_batches != traits::micro_batches)
        gradients_.scale_own(static_cast<double>(traits::micro_batches) /
                             static_cast<double>(micro_batches));
      begin_update();
    } else {
      begin_update(micro_batches);
    }
    gradients_.start_late();
    reduce_and_update();
  }

  /// A joined rank's part in a step of the others: zero gradients, and the same update. Returns
  /// false, without an update, if no rank had a batch. **Ranks** all. **Host** blocks.
  bool answer_others() {
    return answer_others([&] {
      begin_update();
      reduce_and_update();
    });
  }
  /// The same with `make_update()` in place of the update.
  bool answer_others(const auto& make_update) {
    before_forward(step_call<traits, JobCall::forward>());
    backward_without_samples(Sync::yes);
    const bool goes_on = gradients_.features().live(gradients_).count != 0;
    if (goes_on) {
      make_update();
    } else {
      gradients_.reduce();  // no bucket stays in flight
      discard_gradients();
      gradients_.features().forget_live();  // all ranks have the newest buffers
    }
    return goes_on;
  }

  /// Averages parameters over ranks that train alone (`LocalSGD`): at the end of a period, or
  /// before the model is used elsewhere. **Ranks** all. **Host** as `update`.
  void average_parameters() {
    [[maybe_unused]] const auto on = on_device();
    const auto average = [&](const auto& own) {
      gradients_.reductions().count_sent(own.size_bytes());
      comm_.all_reduce(own, Average{}, JobCall::step);
    };
    const auto average_bucket = [&]<class T>(std::type_identity<T>, const Bucket& bucket) {
      const auto values = elements_at<T>(parameters_, bucket.offset, bucket.bytes);
      if constexpr (traits::keeps_masters) {
        const auto masters = updater_.masters_of(bucket);
        average(masters);
        execution_.cast(values, masters);
      } else {
        average(values);
      }
    };
    traits::for_each_typed(layouts_.parameters.plan().buckets(), average_bucket);
  }

  /// Throws if a loss or gradient was not finite (`Anomaly<Stop>`). **Host** waits for all steps.
  void require_finite() { updater_.require_finite(); }
  /// The number of updates that `Anomaly<Skip>` left out. **Host** blocks until all steps are done.
  std::uint64_t skipped_steps() const {
    [[maybe_unused]] const auto on = on_device();
    return updater_.skipped();
  }

  void discard_gradients() {
    micro_batches_ = 0;
    gradients_.features().each([](auto& feature) { feature.after_update(); });
  }

  auto loss_meter() {
    [[maybe_unused]] const auto on = on_device();
    return execution_.meter();
  }

  // Evaluations, which keep nothing for backward and do not communicate.

  /// The sub-graph of later evaluations and predictions.
  void evaluate_subgraph(std::size_t set) { evaluated_ = set; }
  template <class Batch>
  Loss evaluate(const Batch& on_device) {
    if constexpr (require_forward<Model, evaluation_step, Batch>()) {
      return with_evaluation_step(
          [&](auto& step) { return execution_.forward(model_, step, on_device); });
    }
    std::terminate();  // never reached: the missing forward has been reported
  }
  /// The model's own evaluation, or its mean loss over `samples()`.
  template <class Batch, class Tally, class Samples>
  void evaluate(const Batch& on_device, Tally& tally, const Samples& samples) {
    if constexpr (EvaluationRunning<Model, evaluation_step, Batch, Tally>) {
      with_evaluation_step([&](auto& step) { model_.evaluate(step, on_device, tally); });
    } else {
      const auto count = static_cast<double>(samples());
      tally.add("loss", evaluate(on_device) * count, count);
    }
  }
  auto with_evaluation_step(const auto& f) {
    if constexpr (traits::gathers_parameters) {
      updater_.owned().begin_forward();
      if constexpr (std::is_void_v<decltype(with_step_of_evaluation(f))>) {
        with_step_of_evaluation(f);
        updater_.owned().end_evaluation();
      } else {
        auto result = with_step_of_evaluation(f);
        updater_.owned().end_evaluation();
        return result;
      }
    } else {
      await_parameters();
      return with_step_of_evaluation(f);
    }
  }
  /// Takes part in an evaluation of ranks that have a batch, where units are gathered.
  void evaluate_nothing() {
    if constexpr (traits::gathers_parameters) {
      updater_.owned().begin_forward();
      updater_.owned().end_evaluation();
    }
  }
  auto with_step_of_evaluation(const auto& f) {
    if constexpr (traits::has_subgraphs) {
      return with_index<subgraphs::count>(evaluated_, [&](auto set) {
        using Used = SubgraphStep<evaluated_step, subgraphs, set>;
        EvaluationStep<Used> step{Used(step_)};
        return f(step);
      });
    } else {
      evaluation_step step(step_);
      return f(step);
    }
  }

  /// Does the hand-written `forward` keep the outputs of such a batch?
  template <class Batch>
  static constexpr bool keeps_outputs() {
    if constexpr (declares_outputs && !traits::scatters && traits::takes_loss_of_outputs) {
      using Memory = typename traits::memory;
      return PartsRunning<Model, step_type, Batch, OutputRows<Model, Memory, false>,
                          OutputRows<Model, Memory, true>>;
    }
    return false;
  }
  /// The model's outputs in evaluation, valid until the next call. **Host** on a GPU, blocks.
  template <class Batch>
  auto predict(const Batch& on_device, std::size_t rows) {
    static_assert(require_prediction<Model, evaluation_step, Batch,
                                     OutputRows<Model, typename traits::memory, false>>());
    reserve_outputs(rows);
    with_evaluation_step(
        [&](auto& step) { model_.predict(step, on_device, outputs_.outputs({0, rows})); });
    await_device();
    return outputs_.all_outputs(rows);
  }
  /// `forward` in two parts: the outputs, which are kept, and their loss.
  Loss forward_with_outputs(const auto& on_device, std::size_t rows, Sync sync) {
    return run_forward(sync, [&](auto& step) {
      reserve_outputs(rows);
      model_.predict(step, on_device, outputs_.outputs({0, rows}));
      return execution_.loss(model_, step, on_device, outputs_.all_outputs(rows),
                             outputs_.all_gradients(rows));
    });
  }
  auto outputs(std::size_t rows) const {
    [[maybe_unused]] const auto on = on_device();
    await_device();
    return outputs_.all_outputs(rows);
  }
  auto output_gradients(std::size_t rows) const { return outputs_.gradients({0, rows}); }
  /// Copies rows of outputs to host memory. **Host** blocks.
  template <class OutputRows>
  void copy_outputs(const OutputRows& rows, void* to) {
    [[maybe_unused]] const auto on = on_device();
    execution_.copy(static_cast<std::byte*>(to),
                    reinterpret_cast<const std::byte*>(rows.data_handle()),
                    rows.size() * sizeof(typename OutputRows::value_type));
    await_device();
  }

  // Where micro-batches run as graphs (`StepGraphs`).

  /// The phase of hooks in a micro-batch that may be captured: equal where graphs are shared.
  std::uint64_t begin_graph() {
    if constexpr (traits::is_hooked) return gradients_.reductions().begin_graph(completes_step());
    return 0;
  }
  /// Marks a captured micro-batch's sub-graph as used, before its update begins.
  void note_subgraph() {
    if constexpr (traits::has_subgraphs) gradients_.features().note_subgraph();
  }
  /// A number that differs where the work of a micro-batch does, as between sub-graphs.
  std::uint64_t graph_variant() const { return gradients_.features().graph_key(); }
  /// Makes the changes on the host that a replayed micro-batch implies.
  void note_replay() {
    if (completes_step()) {
      if constexpr (traits::is_hooked) gradients_.reductions().replayed();
      discard_gradients();
    } else {
      ++micro_batches_;
    }
    execution_.note_forward();
  }
  /// Keeps the state on the host that a captured micro-batch may change.
  void before_capture() {
    micro_batches_before_ = micro_batches_;
    gradients_.features().each([](auto& feature) { feature.snapshot(); });
  }
  /// Restores the state of `before_capture` after a failed capture, of which nothing has run.
  void undo_capture() {
    gradients_.reductions().forget();
    updater_.owned().forget();
    micro_batches_ = micro_batches_before_;
    gradients_.features().each([](auto& feature) { feature.rollback(); });
  }

  // For checkpoints. None of these starts a collective.

  /// Ends the gathers of parameters, before any rank may write its slices. **Ranks** all.
  void release_units() {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (traits::gathers_parameters) await_parameters();
  }

  /// Lists parameters, buffers, and states of the optimizer and hooks; entries are valid as long as
  /// the replica. Where updates leave parameters out, the state "step" is a parameter's count.
  void list_state(StateUse use, StateEntries& to) {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (!traits::gathers_parameters) await_parameters();
    list_parameters(use, to);
    const BufferLayout<Model> buffers(model_);
    for (std::size_t b = 0; (keeps_own_buffers || is_listed(use)) && b != buffers.infos().size();
         ++b)
      to.push_back(
          entry_of(StateRole::buffer, b, layouts_.buffers, buffers.infos()[b].element, buffers_));
    list_optimizer(use, to);
    if constexpr (traits::is_hooked) list_hooks(use, to);
    if constexpr (traits::averages_parameters) list_own(to);
  }

  JobShape job_shape() const {
    JobShape shape;
    shape.world = shape.replicas = comm_.world_size().value();
    shape.gradient_divisor = traits::gathers_outputs ? 1 : static_cast<double>(shape.replicas);
    shape.keeps_own_buffers = keeps_own_buffers;
    shape.policies = policy_names(typename Policies::pack{});
    shape.fingerprint = fingerprint_of<Policies>(typename traits::declared_layout(model_),
                                                 BufferLayout<Model>(model_));
    return shape;
  }

  /// All progress beside tensors. **Host** on a GPU, blocks until all steps are done.
  ReplicaProgress progress() const {
    [[maybe_unused]] const auto on = on_device();
    ReplicaProgress progress;
    updater_.report_progress(progress);
    if constexpr (traits::draws) progress.random_seed = gradients_.features().seed().value();
    if constexpr (traits::joins && traits::broadcasts_buffers) {
      const Rank newest = gradients_.features().newest();
      if (newest != Rank{0}) progress.newest_buffers = newest.value();
    }
    return progress;
  }
  /// Resumes from a progress, before `copy_in`: values that it lacks stay as they are, accumulated
  /// micro-batches are discarded, parameters have the common count of updates. **Host** blocks.
  void set_progress(const ReplicaProgress& progress) {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (!traits::gathers_parameters) await_parameters();
    await_device();
    updater_.take_progress(progress);
    if constexpr (traits::tracks) discard_gradients();
    if constexpr (traits::draws) {
      if (progress.random_seed)
        gradients_.features().start(Seed{*progress.random_seed}, comm_.rank());
    }
    if constexpr (traits::joins) {
      // In another world any rank will do: all have the saved buffers.
      const std::uint64_t newest = progress.newest_buffers.value_or(0);
      gradients_.features().forget_live(
          Rank{newest < comm_.world_size().value() ? static_cast<std::size_t>(newest) : 0});
    }
    if constexpr (traits::is_hooked) gradients_.reductions().begin_anew(progress.updates);
    await_device();
  }

  /// Copies state in the types of a file. **Host** on a CPU, blocks; on a GPU returns, and `copies`
  /// must live until `await_copies`. **Stream** after all steps so far, before later ones.
  void copy_out(std::span<const StateCopy> copies) {
    [[maybe_unused]] const auto on = on_device();
    copies_.out(copies);
  }
  /// Waits for the latest copies. Any thread may call it, while steps go on. **Host** blocks.
  void await_copies() {
    [[maybe_unused]] const auto on = on_device();
    copies_.await();
  }
  /// Writes an entry, and what derives from it, from elements in a file's type. **Host** blocks.
  void copy_in(const StateEntry& entry, const std::byte* from) {
    [[maybe_unused]] const auto on = on_device();
    if constexpr (!traits::gathers_parameters) await_parameters();
    await_device();
    copies_.in(entry, from);
  }
  /// Host memory for copies; pinned for a GPU.
  auto make_state_memory(std::size_t bytes) const {
    [[maybe_unused]] const auto on = on_device();
    return typename Copies::Memory(bytes);
  }

 private:
  static constexpr bool declares_outputs = OutputDeclaring<Model>;

  /// A forward pass, in which `f(step)` calls the model and returns its loss.
  Loss run_forward(Sync sync, const auto& f) {
    [[maybe_unused]] const auto in = in_step();
    [[maybe_unused]] const span_type span({"forward"});
    if (sync == Sync::yes) before_forward(step_call<traits>());
    if constexpr (traits::gathers_parameters) updater_.owned().begin_forward();
    const Loss loss = with_step(f);
    // Ranks with other sub-graphs may have asked for more units.
    if constexpr (traits::gathers_parameters && traits::notes_usage) updater_.owned().end_forward();
    require_finite_loss(loss);
    return loss;
  }

  /// Before the forward pass of a micro-batch that synchronizes: `Buffers<Broadcast>`.
  void before_forward([[maybe_unused]] JobCall part_of) {
    if constexpr (traits::broadcasts_buffers) synchronize_buffers(part_of);
  }

  /// Before a collective: waits until ranks of this host have finished their own allocations.
  void finish_allocations() {
    if constexpr (requires { comm_.finish_allocations(); }) comm_.finish_allocations();
  }
  /// Allocates the parameters, once all ranks have agreed on them. **Ranks** all.
  std::byte* agree_and_allocate() {
    finish_allocations();
    if constexpr (!traits::alone) {
      require_agreement(
          comm_, "jobs", fingerprint_of<Policies>(layouts_.parameters, layouts_.buffers),
          [&] { return job_description<Policies>(layouts_.parameters, layouts_.buffers); });
    }
    const auto& plan = layouts_.parameters.plan();
    const std::size_t size = plan.all_bytes;
    if constexpr (traits::gathers_parameters)  // frozen ones, if any, which lie behind all others
      return allocate(std::max(size - plan.bytes, arena_alignment)) - plan.bytes;
    if constexpr (traits::shares_parameters)
      return bytes(comm_.template allocate_shared<std::uint8_t>(size));
    return allocate(size);
  }
  std::byte* allocate(std::size_t size) {
    return size == 0 ? nullptr : bytes(comm_.template allocate<std::uint8_t>(size));
  }
  static std::byte* bytes(std::span<std::uint8_t> memory) {
    return reinterpret_cast<std::byte*>(memory.data());
  }
  void broadcast(std::byte* data, std::size_t size, JobCall part_of = current_job_call(),
                 Rank root = Rank{0}) {
    if (size == 0) return;
    comm_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(data), size), root, part_of);
  }
  void reserve_outputs(std::size_t rows) {
    if (rows <= outputs_.capacity()) return;
    await_device();  // the memory may be in use
    outputs_.reserve(model_, rows);
  }

  static constexpr bool keeps_own_buffers =
      !traits::alone && std::is_same_v<typename traits::template choice<axes::Buffers>, Local>;

  /// Does this rank list state that is equal on all ranks? Rank 0 alone saves it.
  bool is_listed(StateUse use) const { return use == StateUse::loading || comm_.rank() == Rank{0}; }

  /// A whole tensor of a layout, which a file stores as `element`.
  StateEntry entry_of(StateRole role, std::size_t tensor, const auto& layout, ElementKind element,
                      std::byte* arena) const {
    StateEntry piece;
    piece.role = role;
    piece.tensor = tensor;
    piece.name = layout.name(tensor);
    piece.whole = layout.infos()[tensor];
    piece.whole.element = element;
    piece.count = piece.whole.count();
    piece.data = arena + layout.plan().placements[tensor].offset;
    piece.held = layout.infos()[tensor].element;
    piece.on_host = std::is_same_v<typename traits::memory, HostMemory>;
    piece.rank = comm_.rank().value();
    return piece;
  }

  /// Lists parameters, or their master weights where they have some, over all ranks together. Where
  /// ranks divide master weights, each also loads the whole parameter that the model uses.
  void list_parameters(StateUse use, StateEntries& to) {
    constexpr bool divides = traits::divides_states;
    const bool all = is_listed(use);
    const auto& layout = layouts_.parameters;
    const typename traits::declared_layout declared(model_);
    for (std::size_t p = 0; p != declared.infos().size(); ++p) {
      StateEntry parameter =
          entry_of(StateRole::parameter, p, layout, declared.infos()[p].element, parameters_);
      parameter.shared = traits::shares_parameters;
      const bool has_master = traits::keeps_masters && layout.plan().is_trained(p);
      const bool is_owner = divides ? all || updater_.owned().is_saved() : all;
      if constexpr (traits::gathers_parameters) {
        if (layout.plan().is_trained(p)) {
          if (is_owner || use == StateUse::loading) list_slices(p, parameter, use, to);
          continue;
        }
      }
      if (has_master ? divides && use == StateUse::loading : all) to.push_back(parameter);
      if (!has_master || !is_owner) continue;
      updater_.for_each_master(p, [&](auto values, std::size_t first) {
        StateEntry entry = parameter;
        entry.first = first;
        if constexpr (!divides) {
          entry.derived = entry.data;
          entry.derived_kind = entry.held;
        }
        entry.hold(values);
        to.push_back(entry);
      });
    }
  }

  /// Lists this rank's slices of a parameter, or of its master weights, from which they derive. A
  /// rank that loads, and has none, lists no elements, because it knows the parameter.
  void list_slices(std::size_t parameter, const StateEntry& whole, StateUse use, StateEntries& to) {
    const std::size_t before = to.size();
    [[maybe_unused]] std::size_t listed = before;
    updater_.owned().for_each_slice(parameter, [&](auto values, std::size_t first) {
      StateEntry entry = whole;
      entry.first = first;
      entry.hold(values);
      to.push_back(entry);
    });
    if constexpr (traits::keeps_masters) {
      updater_.for_each_master(parameter, [&](auto values, std::size_t) {
        StateEntry& entry = to[listed++];
        entry.derived = entry.data;
        entry.derived_kind = entry.held;
        entry.hold(values);
      });
    }
    if (use == StateUse::loading && to.size() == before) {
      to.push_back(whole);
      to.back().count = 0;
    }
  }

  /// The values of a parameter's state, from element `first` on.
  template <class T>
  StateEntry state_of(std::size_t parameter, std::string_view state, std::span<T> values,
                      std::size_t first) const {
    StateEntry entry =
        entry_of(StateRole::state, parameter, layouts_.parameters, element_kind<T>(), parameters_);
    entry.state = state;
    entry.first = first;
    entry.hold(values);
    return entry;
  }

  void list_optimizer(StateUse use, StateEntries& to) {
    const bool all = is_listed(use);
    if (all || (traits::divides_states && updater_.owned().is_saved())) {
      updater_.for_each_state(
          [&](std::size_t p, std::string_view state, auto values, std::size_t first) {
            to.push_back(state_of(p, state, std::span(values), first));
          });
    }
    if constexpr (traits::counts_updates) {
      const std::span<std::uint64_t> counts = updater_.update_counts();
      for (std::size_t p = 0; all && p != counts.size(); ++p) {
        if (!layouts_.parameters.plan().is_trained(p)) continue;
        to.push_back(state_of(p, "step", counts.subspan(p, 1), 0));
        to.back().whole = {to.back().held, 0, {}};
      }
    }
  }

  /// Lists the states of hooks: once if equal on all ranks, else by rank.
  void list_hooks(StateUse use, StateEntries& to) {
    gradients_.reductions().for_each_state(
        [&]<class T>(std::size_t p, std::string_view state, std::span<T> values, Keeper keeper) {
          const bool own = keeper == Keeper::each_rank;
          if (!own && !is_listed(use)) return;
          StateEntry entry = state_of(p, state, values, 0);
          if (own) entry.role = StateRole::local;
          if (!entry.is_whole())  // it has not the parameter's shape
            entry.whole = {element_kind<T>(), 1, {values.size()}};
          to.push_back(entry);
        });
  }

  /// Lists the parameters and states of every rank, where ranks train alone between averages.
  void list_own(StateEntries& to) {
    StateEntries all;
    list_parameters(StateUse::loading, all);
    list_optimizer(StateUse::loading, all);
    for (StateEntry& entry : all) {
      // Counts of updates are the same on all ranks.
      if (!layouts_.parameters.plan().is_trained(entry.tensor) || !is_floating(entry.held))
        continue;
      if (entry.role == StateRole::parameter) entry.state = "parameter";
      entry.role = StateRole::local;
      entry.averaged = true;
      to.push_back(entry);
    }
  }

  auto make_step(std::byte* gradients) {
    const bare_step bare = gradients_.features().view(
        execution_.step(layouts_, Arenas{parameters_, gradients, buffers_}), *this);
    if constexpr (traits::tracks) {
      return step_type(bare, gradients_, updater_.owned());
    } else {
      return bare;
    }
  }
  /// The step of micro-batches after the first.
  auto& adding_step() {
    if (!adding_step_) adding_step_.emplace(make_step(gradients_.second_arena()));
    return *adding_step_;
  }

  void end_update() {
    if constexpr (traits::is_hooked) gradients_.reductions().count_step();
    if constexpr (traits::averages_parameters) {
      if (traits::hooks::stages::averages_after(updates())) average_parameters();
    }
    discard_gradients();
  }

  [[noreturn, gnu::cold, gnu::noinline]] void reject_loss(double loss) const {
    throw anomaly_error("the loss is " + std::to_string(loss), updates() + 1).on(comm_.rank());
  }

  /// Calls `f(initial)`, whose values go to `parameters` and `buffers`: see `ArenaValues`.
  template <class P, class B>
  void write_initial(auto& f, const typename traits::declared_layout& declared, P& parameters,
                     B& buffers, Seed seed) {
    const BufferLayout<Model> declared_buffers(model_);
    InitialValues<Model, typename traits::declared_layout, P, B> initial(declared, declared_buffers,
                                                                         parameters, buffers, seed);
    f(initial);
    initial.flush();
  }

  /// The values of parameters of which no rank has memory for all: see `UnitExchange`.
  void initialize_units(auto& f, Seed seed) {
    UnitExchange<traits, Comm, execution_type, Updating> exchange(comm_, execution_,
                                                                  layouts_.parameters, updater_);
    finish_allocations();
    await_parameters();
    if (comm_.rank() == Rank{0}) {
      const typename traits::declared_layout declared(model_);
      const auto write = [&]<class P, class B>(P&& frozen, B&& buffers) {
        using Values = UnitValues<traits, decltype(exchange), std::remove_reference_t<P>>;
        Values values(exchange, layouts_.parameters, declared, frozen);
        write_initial<Values&, B>(f, declared, values, buffers, seed);
      };
      execution_.initialize(model_, {parameters_, nullptr, buffers_}, nullptr, write);
      exchange.end();
    } else {
      exchange.follow_all();
    }
    const auto& plan = layouts_.parameters.plan();
    broadcast(parameters_ + plan.bytes, plan.all_bytes - plan.bytes);
    broadcast(buffers_, layouts_.buffers.plan().bytes);
    await_device();
  }

  /// Waits for the latest update's parameters. **Host** blocks, or on a GPU the stream waits.
  void await_parameters() {
    if constexpr (traits::gathers_parameters) {
      updater_.owned().release_all();
    } else {
      updater_.owned().await_parameters();
    }
  }

  /// The same for the host, whose last wait for the compute stream may not have covered them.
  void wait_for_host_access() const {
    if constexpr (traits::shards && !traits::gathers_parameters) {
      if (step_.await_parameters()) await_device();
    }
  }

  void await_device() const {
    if constexpr (StreamCommunicator<Comm>) comm_.synchronize();
  }

  [[no_unique_address]] typename execution_type::OnDevice built_;
  Comm& comm_;
  Model model_;
  [[no_unique_address]] execution_type execution_;
  [[no_unique_address]] layouts_type layouts_;
  std::byte* parameters_;
  [[no_unique_address]] JobGroupsOf<traits, Comm> groups_;
  std::byte* buffers_;
  Gradients gradients_;
  Updating updater_;
  std::size_t micro_batches_ = 0;         // accumulated
  std::size_t micro_batches_before_ = 0;  // a micro-batch that is captured
  step_type step_;
  std::optional<step_type> adding_step_;  // of micro-batches after the first
  [[no_unique_address]] OutputsOf<declares_outputs, Model, typename traits::memory, execution_type>
      outputs_;
  std::size_t evaluated_ = whole_model;  // the sub-graph of evaluations
  [[no_unique_address]] Copies copies_;
};

}  // namespace lockstep::detail

namespace lockstep {

/// A model with its parameters, gradients and optimizer on one rank, as the parts of a step.
template <class Model, class Policies, class Comm>
using Replica = detail::Replica<Model, Policies, Comm>;

}  // namespace lockstep
