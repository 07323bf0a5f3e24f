// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What stands for a wrapper that was rejected, so that one error stays one error: it has the
/// members of `DistributedDataParallel` and `DataParallel`, which take and give what theirs do.
/// Nothing here is ever run.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/ddp.hpp"
#include "lockstep/trainer/axes.hpp"

namespace lockstep {

struct DpOptions;

namespace detail {

/// The numbers of a choice that was rejected: all names that optimizers and schedules have.
struct RejectedOptions {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, factor, last;
  std::uint64_t epochs, updates, warmup, steps;
};

template <class P, class Axis>
concept AnswerTo = requires { requires std::is_same_v<typename P::axis, Axis>; };

/// The numbers of the policy that answers an axis among `Ps`, or else of its default.
template <class Axis, class... Ps>
struct OptionsAmong
    : std::type_identity<typename Pick<Axis, CanonicalPolicies<>>::choice::Options> {};
template <class Axis, class P, class... Ps>
struct OptionsAmong<Axis, P, Ps...> : OptionsAmong<Axis, Ps...> {};
template <class Axis, AnswerTo<Axis> P, class... Ps>
struct OptionsAmong<Axis, P, Ps...> : std::type_identity<RejectedOptions> {};
template <class Axis, AnswerTo<Axis> P, class... Ps>
  requires requires { typename P::choice::Options; }
struct OptionsAmong<Axis, P, Ps...> : std::type_identity<typename P::choice::Options> {};

/// Any phase of a step.
struct RejectedPhase {
  RejectedPhase backward() const { std::terminate(); }
  RejectedPhase reduce() const { std::terminate(); }
  double update() const { std::terminate(); }
  double reduce_and_update() const { std::terminate(); }
  double loss() const { std::terminate(); }
  AnyView<HostMemory, float> grad(const auto&) const { std::terminate(); }
  AnyView<HostMemory, float> outputs() const { std::terminate(); }
  operator double() const { std::terminate(); }  ///< the backward phase of `no_sync` gives the loss
};

template <class Model, class... Ps>
class RejectedWrapper {
 public:
  static constexpr bool is_rejected = true;
  static constexpr bool is_one_process = false;
  static constexpr bool ranks_are_threads = false;
  using model_type = Model;
  using Loss = double;

  RejectedWrapper() {}
  explicit RejectedWrapper(const DpOptions&, DefaultModel = {}) {}
  RejectedWrapper(const DpOptions&, Model) {}
  template <ModelMaking<Model, std::size_t> Make>
  RejectedWrapper(const DpOptions&, Make&&) {}
  explicit RejectedWrapper(auto&, DefaultModel = {}, Seed = {}) {}
  RejectedWrapper(auto&, Model, Seed = {}) {}
  template <ModelMaking<Model> Make>
  RejectedWrapper(auto&, Make&&, Seed = {}) {}

  struct OnDevice {
    OnDevice() {}
  };
  OnDevice on_device() const { std::terminate(); }

  Model& model() const { std::terminate(); }
  typename OptionsAmong<axes::Optimizer, Ps...>::type& optimizer() const { std::terminate(); }
  typename OptionsAmong<axes::Schedule, Ps...>::type& schedule() const { std::terminate(); }
  double learning_rate() const { std::terminate(); }
  std::uint64_t updates() const { std::terminate(); }
  std::size_t replicas() const { std::terminate(); }
  std::uint64_t bytes_sent() const { std::terminate(); }
  void average_parameters() const {}
  AnyView<HostMemory, float> param(const auto&) const { std::terminate(); }
  AnyView<HostMemory, float> grad(const auto&) const { std::terminate(); }
  AnyView<HostMemory, float> buffer(const auto&) const { std::terminate(); }

  void initialize(const auto&, Seed = {}) const {}
  void for_each_model(const auto&) const {}
  void for_each_parameter(const auto&) const {}
  void for_each_gradient(const auto&) const {}
  void for_each_buffer(const auto&) const {}
  void for_each_state(const auto&) const {}
  void set_shares(const auto&) const {}
  void set_epoch(std::uint64_t) const {}
  void begin_schedule(std::uint64_t) const {}
  void synchronize_buffers() const {}
  void synchronize() const {}

  RejectedPhase forward(const auto&) const { std::terminate(); }
  RejectedPhase forward(const auto&, const auto&) const { std::terminate(); }
  template <auto Set>
  RejectedPhase forward(const auto&) const {
    std::terminate();
  }
  const RejectedWrapper& no_sync() const { std::terminate(); }
  const RejectedWrapper& join() const { std::terminate(); }
  void finish() const {}
  const RejectedWrapper& group() const { std::terminate(); }
  const RejectedWrapper& across() const { std::terminate(); }
  void all_reduce(const auto&...) const {}
  void broadcast(const auto&...) const {}
  Rank rank() const { std::terminate(); }
  WorldSize world_size() const { std::terminate(); }
  double step(const auto&) const { std::terminate(); }
  double step(const auto&, const auto&) const { std::terminate(); }
  template <auto Set>
  double step(const auto&) const {
    std::terminate();
  }
  static SubgraphChoice subgraph(std::string_view) { std::terminate(); }
  AnyView<HostMemory, float> predict(const auto&) const { std::terminate(); }
  template <auto Set>
  AnyView<HostMemory, float> predict(const auto&...) const {
    std::terminate();
  }
  double evaluate(const auto&) const { std::terminate(); }
  template <auto Set>
  double evaluate(const auto&...) const {
    std::terminate();
  }
  void evaluate(const auto&, auto&) const {}
  template <class Batch>
  std::size_t captured_graphs() const {
    std::terminate();
  }
};

/// Was the job rejected?
template <class Job>
inline constexpr bool is_rejected = requires { Job::is_rejected; };

/// `launch<Job>` of such a job does nothing: it has its error already.
template <class Job, class Source, class F>
  requires is_rejected<Job>
int launch_job(int, char**, Source&, F&) {
  return 1;
}

}  // namespace detail

}  // namespace lockstep
