// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a trainer that all others use: its place, its model under its policies, and
/// which calls it refuses.

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/data/distributed_sampler.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/job.hpp"
#include "lockstep/trainer/job_feed.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/training.hpp"

namespace lockstep::detail {

/// A rank's model, communicator and options. Each later base of a trainer adds one purpose.
template <class Model, class Policies>
class JobBase : public ComposedJob<Model, Policies> {
 protected:
  using Base = ComposedJob<Model, Policies>;
  using Training = TrainingOf<Model, Policies>;
  using Comm = typename Training::communicator;
  using traits = ReplicaTraits<Model, Policies>;

 public:
  using remainder = typename Base::template policy<axes::Sampler>::remainder;
  using sampler =
      DistributedSampler<remainder, typename Base::template policy<axes::Sampler>::order>;
  using wrapper = typename Training::wrapper;
  using feed = JobFeed<Policies, wrapper>;
  /// What loads the batches of a kind of data set in this job.
  template <class Source, class Sampler>
  using loader = typename feed::template loader<Source, Sampler>;
  static constexpr bool is_one_process = is_dp<Policies>;
  /// May ranks have different numbers of batches?
  static constexpr bool joins = traits::joins;
  static constexpr bool ranks_are_threads = ConnectionOf<Policies>::ranks_are_threads;
  static constexpr bool spans_processes = requires { ConnectionOf<Policies>::spans_processes; };

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

 protected:
  /// `source` is the model, what makes it, or `DefaultModel`.
  template <class Source>
  JobBase(Session& session, Source&& source, TrainerOptions&& options)
      : session_(session),
        options_(leave_options_to_job(session, std::move(options), program_has_job<void>)),
        comm_(Training::communicate(session)),
        wrapped_(Training::make(session, comm_, std::forward<Source>(source), options_)),
        feed_(session, wrapped_) {
    sampler_options_.seed = options_.seed;
    // Where ranks fill all cores, a loading thread would only take time from the model.
    std::size_t busy = session.membership().local_world;
    if constexpr (is_one_process) busy = wrapped_.replicas();
    loader_options_.workers = has_free_core(busy) ? 1 : 0;
    loader_options_.timed = !options_.log.empty() && session.rank() == Rank{0};
  }

  /// Holds the job up while it lives: what it guards is called on rank 0 alone.
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
    if constexpr (traits::joins) wrapped_.require_joined(operation);
    return wrapped_.on_device();
  }
  /// The begin of a step, which ranks may make while others are through.
  [[nodiscard]] auto enter_step() {
    require_all_ranks("step");
    return wrapped_.on_device();
  }
  /// The loader of a loop over data, which `source` and `sampler` outlive.
  template <class Source, class Sampler>
  loader<Source, Sampler> make_loader(const Source& source, Sampler& sampler,
                                      const LoaderOptions& options) {
    if constexpr (feed::sends) {
      return loader<Source, Sampler>(source, sampler, options, feed_.line());
    } else {
      return loader<Source, Sampler>(source, sampler, options);
    }
  }
  /// `f()`, which takes batches from a loader. A reader's failure ends the ranks that it feeds; the
  /// others are told of it.
  template <class F>
  auto fetch(const F& f) -> decltype(f()) {
    if constexpr (feed::sends) {
      try {
        return f();
      } catch (const std::exception& error) {
        comm_.abandon(error.what());
        throw;
      }
    } else {
      return f();
    }
  }
  Comm& own_communicator() { return comm_; }
  wrapper& own_wrapper() { return wrapped_; }
  /// The program has asked for all of its options.
  void end_asking() {
    if (!is_asking_) return;
    is_asking_ = is_held_up_ = false;
    session_.options().close();
  }
  [[gnu::cold, gnu::noinline]] void refuse(const char* operation) {
    if (is_asking_) return end_asking();
    if (failure_.thrown) {
      is_held_up_ = false;
      std::rethrow_exception(std::exchange(failure_.thrown, nullptr));
    }
    throw Error(operation, "rank 0 alone has come here, inside on_rank0",
                "call it outside, on all ranks", rank());
  }

  /// Calls `f` in the destructor of a loop that a `break` has left. A destructor cannot throw: a
  /// failure is thrown by this trainer's next call or, where there is none, told at its end.
  template <class F>
  void after_break(F&& f) noexcept {
    try {
      f();
    } catch (const std::exception&) {
      if (!failure_.thrown) failure_.keep(std::current_exception(), rank());
      is_held_up_ = true;
    }
  }

  /// The failure of an epoch that a `break` has ended. One that nobody has seen is told as a late
  /// failure, unless an exception ends the job anyway.
  struct KeptFailure {
    KeptFailure() = default;
    KeptFailure(KeptFailure&& other) noexcept
        : thrown(std::exchange(other.thrown, nullptr)), rank(other.rank) {}
    KeptFailure& operator=(KeptFailure&&) = delete;
    ~KeptFailure() {
      if (thrown && std::uncaught_exceptions() == 0) tell_late_failure({thrown, rank});
    }
    void keep(std::exception_ptr failure, Rank of) {
      thrown = std::move(failure);
      rank = of;
    }

    std::exception_ptr thrown;
    Rank rank;
  };

  Session& session_;
  TrainerOptions options_;
  Comm comm_;
  wrapper wrapped_;
  [[no_unique_address]] feed feed_;
  SamplerOptions sampler_options_;
  LoaderOptions loader_options_;
  KeptFailure failure_;
  bool is_asking_ = true;  // the program, for its options
  // Because the program asks for its options, by a failure, or because rank 0 alone is in
  // `on_rank0`.
  bool is_held_up_ = true;
};

}  // namespace lockstep::detail
