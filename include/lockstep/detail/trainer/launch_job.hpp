// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `launch<Job>(argc, argv, f)`: a trainer's whole `main`.

#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/trainer/rejected.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

/// The source of a rank's model: `source` if it is a function or `DefaultModel`; else a copy of
/// `source`, or `source` itself if this process has one rank.
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

template <class Job, class Source>
consteval bool require_models() {
  using Model = typename Job::model_type;
  constexpr bool is_model = std::same_as<Source, Model>;
  constexpr bool has_models = is_model || ModelMaking<Source, Model, Session>;
  constexpr bool must_copy = is_model && Job::ranks_are_threads && !Job::is_one_process;
  constexpr bool can_copy = !must_copy || std::copy_constructible<Model>;
  static_assert(has_models,
                "lockstep: launch<Job>(argc, argv, model, f) takes the job's model, or a function "
                "that makes one: [](Session& session) { return Model(...); }");
  static_assert(can_copy,
                "lockstep: the ranks of this job are threads, each with a model of its own, and "
                "this model cannot be copied; give launch a function that makes one instead: "
                "[](Session& session) { return Model(...); }");
  return has_models && can_copy;
}

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
  constexpr RanksAs how = Job::is_one_process       ? RanksAs::replicas
                          : !Job::ranks_are_threads ? RanksAs::processes
                          : Job::spans_processes    ? RanksAs::threads_of_processes
                                                    : RanksAs::threads;
  return launch_as(how, argc, argv, run, ranks, trainer_flags);
}

}  // namespace detail

/// Starts or joins the job's ranks as `launch` does, and calls `f(job)` on each. `World<N>` starts
/// N ranks, `World<dynamic>` as many as `--ranks` says. Ranks are processes; with `Device<Cuda>`
/// and `Backend<Shm>` threads of this process, with `Backend<Hierarchical<Shm, Nccl>>` threads of
/// one process per host. `ParallelStrategy<DP>` is this process, with the replicas of `World<N>`,
/// `--ranks` or `--replicas`, or one per device. **Ranks** all, as their `main`. **Host** blocks.
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
  }
  return 1;
}

/// The same with a model, or with a function that makes each rank's: `[](Session& session) { return
/// Model(...); }`. Every process constructs the model; replicas, and ranks that are threads, have
/// copies. On GPUs prefer a function: it is called with its GPU selected.
template <class Job, class Source, class F>
  requires(!std::convertible_to<F, std::size_t>)
int launch(int argc, char** argv, Source&& model, F&& f) {
  if constexpr (!detail::is_rejected<Job>) {
    if constexpr (detail::require_models<Job, std::remove_cvref_t<Source>>()) {
      auto source = std::forward<Source>(model);
      return detail::launch_job<Job>(argc, argv, source, f);
    }
  }
  return 1;
}

}  // namespace lockstep

LOCKSTEP_COLD_END
