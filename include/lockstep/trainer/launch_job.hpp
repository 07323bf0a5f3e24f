// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `launch<Job>(argc, argv, f)`: a trainer's whole `main`.

#include "lockstep/launch/launch.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/topology/topology.hpp"
#include "lockstep/trainer/options.hpp"
#include "lockstep/trainer/rejected.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

/// Where the job of one rank gets its model: from `source`, where that is a function or
/// `DefaultModel`, else a copy of `source` that is made by the rank, or `source` itself where this
/// process has one rank.
template <class Job, class Source>
decltype(auto) model_of_rank(Source& source) {
  using Model = typename Job::model_type;
  if constexpr (!std::same_as<Source, Model>) {
    return (source);
  } else if constexpr (Job::ranks_are_threads && !Job::is_one_process) {
    return [&source] { return Model(std::as_const(source)); };
  } else {
    return std::move(source);
  }
}

/// Gives a compile error in words unless every rank can have its model.
template <class Job, class Source>
consteval bool require_models() {
  using Model = typename Job::model_type;
  constexpr bool is_model = std::same_as<Source, Model>;
  constexpr bool makes_models = ModelMaking<Source, Model, Session>;
  constexpr bool must_copy = is_model && Job::ranks_are_threads && !Job::is_one_process;
  static_assert(is_model || makes_models,
                "lockstep: launch<Job>(argc, argv, model, f) takes the job's model, or a function "
                "that makes one: [](Session& session) { return Model(...); }");
  static_assert(!must_copy || std::copy_constructible<Model>,
                "lockstep: the ranks of this job are threads, each with a model of its own, and "
                "this model cannot be copied; give launch a function that makes one instead: "
                "[](Session& session) { return Model(...); }");
  return (is_model || makes_models) && (!must_copy || std::copy_constructible<Model>);
}

/// `launch<Job>` with the model of every rank from `source`.
template <class Job, class Source, class F>
int launch_job(int argc, char** argv, Source& source, F& f) {
  const auto run = [&](Session& session, std::optional<std::size_t> replicas = std::nullopt) {
    TrainerOptions options = take_trainer_options(session);
    if (options.replicas && replicas) {
      fail("launch", {"--ranks and --replicas are both given"}, "give one of them");
    }
    if (!options.replicas) options.replicas = replicas;
    Job job(session, model_of_rank<Job>(source), std::move(options));
    int status = 0;
    if constexpr (std::is_void_v<std::invoke_result_t<F&, Job&>>) {
      f(job);
    } else {
      status = static_cast<int>(f(job));
    }
    job.finish_saves();
    return status;
  };
  constexpr std::size_t ranks = Job::template policy<axes::World>::static_size;
  if constexpr (Job::is_one_process) {
    return launch_as(RanksAs::replicas, argc, argv, run, ranks, trainer_flags);
  } else if constexpr (Job::ranks_are_threads) {
    constexpr auto how = Job::spans_processes ? RanksAs::threads_of_processes : RanksAs::threads;
    return launch_as(how, argc, argv, run, ranks, trainer_flags);
  } else {
    return launch_as(RanksAs::processes, argc, argv, run, ranks, trainer_flags);
  }
}

}  // namespace detail

/// Starts or joins the job's ranks as `launch` does, and calls `f(job)` on each. A job of
/// `World<4>` starts four ranks without being told; of `World<dynamic>`, as many as `--ranks` says.
/// With `Device<Cuda>` and `Backend<Shm>` they are threads of this process, with
/// `Backend<Hierarchical<Shm, Nccl>>` threads of a process on each host, else processes. A job of
/// `ParallelStrategy<DP>` is this process alone; its replicas are as many as `World<N>`, `--ranks`
/// or `--replicas` says, or one for each device.
/// A job that was rejected has its error, and nothing of what the program does with it is looked
/// at.
/// **Ranks** all call it, being their `main`. **Host** blocks.
template <class Job, class F>
int launch(int argc, char** argv, F&& f) {
  using Model = typename Job::model_type;
  constexpr bool is_rejected = detail::is_rejected<Job>;
  static_assert(is_rejected || std::is_default_constructible_v<Model>,
                "lockstep: this model has no default constructor; give launch a model too: "
                "launch<Job>(argc, argv, Model(...), f)");
  if constexpr (!is_rejected && std::is_default_constructible_v<Model>) {
    constexpr detail::DefaultModel by_default{};
    return detail::launch_job<Job>(argc, argv, by_default, f);
  } else {
    return 1;
  }
}

/// The same with a model that the program has constructed, or with a function that makes the model
/// of each rank: `[](Session& session) { return Model(...); }`. Every process of the job constructs
/// the model; ranks that are threads of one process, and replicas, have copies. On GPUs a function
/// is the better choice: it is called when the rank's or replica's GPU is selected, and streams,
/// handles and memory that the model makes are that GPU's.
template <class Job, class Source, class F>
  requires(!std::convertible_to<F, std::size_t>)
int launch(int argc, char** argv, Source&& model, F&& f) {
  if constexpr (detail::is_rejected<Job>) {
    return 1;
  } else if constexpr (detail::require_models<Job, std::remove_cvref_t<Source>>()) {
    auto source = std::forward<Source>(model);
    return detail::launch_job<Job>(argc, argv, source, f);
  } else {
    return 1;
  }
}

}  // namespace lockstep

LOCKSTEP_COLD_END
