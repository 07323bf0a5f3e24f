// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From a model and policies to a job, or to a stand-in that keeps one error the only one.

#include "lockstep/detail/observe/summary.hpp"
#include "lockstep/detail/strategy/ddp.hpp"
#include "lockstep/detail/trainer/composition.hpp"
#include "lockstep/detail/trainer/connection.hpp"
#include "lockstep/detail/trainer/options.hpp"

namespace lockstep {

class Checkpoints;
struct DpOptions;
struct FitOptions;
struct LoaderOptions;
struct PredictOptions;
class Tally;

namespace detail {

/// The options of a rejected choice: all names that optimizers and schedules have.
struct RejectedOptions {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, factor, last;
  std::uint64_t epochs, updates, warmup, steps;
};

/// The options of a policy's choice; `RejectedOptions` if it has none.
template <class P>
auto options_of() {
  if constexpr (requires { typename P::choice::Options; }) {
    return typename P::choice::Options{};
  } else {
    return RejectedOptions{};
  }
}
template <class Default, class... Ps>
using OptionsAmong = decltype(options_of<PickOr<Default, Ps...>>());

using RejectedView = AnyView<HostMemory, float>;

/// Stands for a rejected trainer, wrapper, phase, epoch or communicator. Nothing here runs: only
/// members that may get a local type have a body.
template <class Model, class... Ps>
class RejectedJob {
 public:
  static constexpr bool is_rejected = true;
  static constexpr bool is_one_process = false;
  static constexpr bool ranks_are_threads = false;
  using model_type = Model;
  using Loss = double;

  RejectedJob();
  template <class Source = DefaultModel>
  explicit RejectedJob(const DpOptions&, Source&& = {}) {}
  /// With `TrainerOptions` or a seed.
  template <class Source = DefaultModel, class Options = TrainerOptions>
  explicit RejectedJob(auto&, Source&& = {}, const Options& = {}) {}

  // Of `JobMembers`.

  Model& model() const;
  OptionsAmong<Optimizer<SGD>, Ps...>& optimizer() const;
  OptionsAmong<Optimizer<SGD>, Ps...>& optimizer(const auto&) const { std::terminate(); }
  OptionsAmong<Schedule<Constant>, Ps...>& schedule() const;
  double learning_rate() const;
  std::uint64_t updates() const;
  std::uint64_t skipped_steps() const;
  RejectedView param(const auto&) const { std::terminate(); }
  RejectedView grad(const auto&) const { std::terminate(); }
  RejectedView buffer(const auto&) const { std::terminate(); }
  void for_each_parameter(const auto&) const {}
  void for_each_gradient(const auto&) const {}
  void for_each_buffer(const auto&) const {}
  void for_each_state(const auto&) const {}
  static SubgraphChoice subgraph(std::string_view);
  template <auto... Set>
  double step(const auto&...) const {
    std::terminate();
  }
  template <auto... Set>
  double evaluate(const auto&) const {
    std::terminate();
  }
  template <auto... Set>
  void evaluate(const auto&, Tally&) const {}
  template <auto... Set>
  RejectedView predict(const auto&...) const {
    std::terminate();
  }
  std::size_t parameter_bytes() const;
  std::size_t state_bytes() const;
  std::size_t gradient_bytes() const;
  RejectedJob on_device() const;
  RejectedJob gpu() const;

  // Of wrappers.

  std::size_t replicas() const;
  std::uint64_t bytes_sent() const;
  void average_parameters() const;
  void initialize(const auto&, Seed = {}) const {}
  void for_each_model(const auto&) const {}
  void set_epoch(std::uint64_t) const;
  void begin_schedule(std::uint64_t) const;
  void synchronize_buffers() const;
  void check_replicas() const;
  void synchronize() const;
  void require_finite() const;
  template <class Batch>
  std::size_t captured_graphs() const;

  template <auto... Set>
  const RejectedJob& forward(const auto&...) const {
    std::terminate();
  }
  const RejectedJob& backward() const;
  const RejectedJob& reduce() const;
  double update() const;
  double reduce_and_update() const;
  double loss() const;
  RejectedView outputs() const;
  operator double() const;  ///< `backward` in `no_sync` returns the loss
  const RejectedJob& no_sync() const;
  const RejectedJob& join() const;
  void finish() const;

  // Of communicators, those of groups too.

  const RejectedJob& group() const;
  const RejectedJob& across() const;
  Rank rank() const;
  WorldSize world_size() const;
  void barrier() const;
  void all_reduce(const auto&...) const {}
  void broadcast(const auto&...) const {}
  std::vector<double> all_gather(const auto&...) const { std::terminate(); }
  std::vector<double> all_gather_variable(const auto&...) const { std::terminate(); }
  std::vector<double> gather_variable(const auto&...) const { std::terminate(); }

  // Of trainers.

  static std::uint64_t fingerprint();
  const Membership& membership() const;
  template <class T>
  auto option(std::string_view, T otherwise, std::string_view = {}) const {
    if constexpr (std::is_convertible_v<T, std::string_view>) {
      return std::string(otherwise);
    } else {
      return otherwise;
    }
  }
  const std::vector<std::string>& arguments() const;
  const std::string& data() const;
  RejectedJob& ddp() const;
  RejectedJob& dp() const;
  const RejectedJob& communicator() const;
  Seed seed() const;
  RandomStream random() const;
  SamplerOptions& sampler_options() const;
  LoaderOptions& loader_options() const;

  auto open(auto&& make) const { return make(); }
  std::span<const RejectedJob> epochs(std::uint64_t) const;
  template <auto... Set>
  Scores evaluate(const auto&, std::size_t, std::string_view = "") const {
    std::terminate();
  }
  RejectedView predict(const auto&, const PredictOptions&) const { std::terminate(); }
  EpochSummary fit(const auto&, const FitOptions&, const auto&...) const { std::terminate(); }
  EpochSummary fit(const auto&, const auto&, const FitOptions&, const auto&...) const {
    std::terminate();
  }
  Scores reduce_metrics(const Tally&) const;
  void log_field(std::string_view, const auto&) const {}
  void on_rank0(const auto&) const {}
  SamplerState position() const;
  void resume(const SamplerState&) const;
  Resumed resume(const std::string&, const LoadOptions& = {}) const;
  std::optional<Resumed> resume() const;
  void keep(std::string_view, const auto&) const {}
  void save(const std::string&, const SaveOptions& = {}) const;
  LoadReport load(const std::string&, const LoadOptions& = {}) const;
  LoadReport load_parameters(const std::string&, const LoadOptions& = {}) const;
  void checkpoints(const CheckpointOptions&) const;
  Checkpoints* checkpoints() const;
  void finish_saves() const;
  EpochSummary summary() const;

  // Of epochs.

  std::uint64_t number() const;
  template <class Source>
  std::span<const typename Source::batch_type> batches(const Source&, std::size_t) const {
    std::terminate();
  }
  template <class Source>
  std::span<const typename Source::batch_type> batches(const Source&, const LoaderOptions&) const {
    std::terminate();
  }
  void mark_as_printed() const;
};

template <class Job>
inline constexpr bool is_rejected = requires { Job::is_rejected; };

template <template <class, class> class Job, class Model, class... Ps>
consteval auto compose() {
  if constexpr (!require_composition<Model, Ps...>()) {
    return std::type_identity<RejectedJob<Model, Ps...>>{};
  } else if constexpr (!require_connection<CanonicalPolicies<Ps...>>()) {
    return std::type_identity<RejectedJob<Model, Ps...>>{};
  } else {
    return std::type_identity<Job<Model, CanonicalPolicies<Ps...>>>{};
  }
}

/// `Job<Model, Policies>` of a model under policies in any order, which all give one type. An
/// invalid composition gives one compile error and a `RejectedJob`, which causes no further ones.
template <template <class, class> class Job, class Model, class... Ps>
using Compose = typename decltype(compose<Job, Model, Ps...>())::type;

}  // namespace detail

}  // namespace lockstep
