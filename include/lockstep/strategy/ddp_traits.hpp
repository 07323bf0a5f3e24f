// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job's policies mean to DDP, as constants.

#include <cstddef>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/optim/optimizer.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/sharding.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/strategy/accumulate.hpp"
#include "lockstep/strategy/buffers.hpp"
#include "lockstep/strategy/loss_placement.hpp"
#include "lockstep/strategy/parallel_strategy.hpp"
#include "lockstep/strategy/precision.hpp"
#include "lockstep/strategy/step_execution.hpp"
#include "lockstep/strategy/unused_parameters.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

template <class Model, class Policies>
struct DdpTraits {
  using model = Model;

  template <class Axis>
  using policy = Pick<Axis, Policies>;
  template <class Axis>
  using choice = typename policy<Axis>::choice;

  using precision = choice<axes::Precision>;
  using parameter_types = typename precision::parameter_types;
  using layout = Layout<Model, policy<axes::Buckets>, parameter_types>;
  using declared_layout = Layout<Model, policy<axes::Buckets>>;
  using buffer_types = typename precision::buffer_types;
  using buffer_layout = BufferLayout<Model, buffer_types>;
  using memory = typename choice<axes::Device>::memory;
  using bare_step = BareStep<Model, policy<axes::Buckets>, memory, parameter_types, buffer_types>;
  using rule = choice<axes::Optimizer>;
  using curve = choice<axes::Schedule>;

  static constexpr std::size_t parameters = parameter_table<Model>.size();
  static constexpr bool has_dynamic_parameters = has_dynamic_shapes<Model, TensorRole::parameter>;
  static constexpr bool has_buffers = buffer_table<Model>.size() != 0;

  /// A world that the compiler knows to be of one.
  static constexpr bool alone = policy<axes::World>::static_size == 1;
  static constexpr bool shares_parameters =
      !alone && std::is_same_v<choice<axes::Sharding>, HostShared>;
  static constexpr std::size_t micro_batches = policy<axes::Accumulate>::micro_batches;
  static constexpr bool clips = policy<axes::Clip>::clips;
  static constexpr bool captures = policy<axes::StepExecution>::captures;
  static constexpr bool keeps_masters = precision::keeps_masters;
  static constexpr bool scales_loss = precision::scales_loss;
  static constexpr bool skips_unused = std::is_same_v<choice<axes::UnusedParameters>, Zero>;
  static constexpr bool broadcasts_buffers =
      !alone && has_buffers && std::is_same_v<choice<axes::Buffers>, Broadcast>;

  /// Must it be known which gradients have arrived? Not with one rank and one batch a step: then a
  /// step costs what the bare model costs.
  static constexpr bool tracks = !alone || micro_batches > 1 || skips_unused;

  /// Is every rank given a share of somebody's batch?
  static constexpr bool scatters = !alone && std::is_same_v<choice<axes::ParallelStrategy>, DP>;
  /// Is one loss taken of the outputs of all? Then what ranks compute are parts of its gradient,
  /// and their sum is the whole.
  static constexpr bool gathers_outputs = scatters && OutputDeclaring<Model> &&
                                          std::is_same_v<policy<axes::LossPlacement>, LossOnOutput>;
  static constexpr bool sums_gradients = gathers_outputs;
  /// Otherwise each has the gradient of its own mean. Shares can differ in size, so these are
  /// weighed before they meet.
  static constexpr bool weighs_shares = scatters && !gathers_outputs;

  /// What gradients of T travel as. Alone, nothing travels.
  template <class T>
  using travelling = std::conditional_t<alone, T, typename precision::template reduced<T>>;

  /// The element kinds of the parameters, as the model sees them.
  static constexpr const auto& kinds() {
    return kinds_of<Model, TensorRole::parameter, parameter_types>;
  }

  /// Calls `f(std::type_identity<T>{})` with the type behind a bucket's elements.
  template <class F>
  static constexpr void with_element(ElementKind kind, F&& f) {
    lockstep::with_element<Model, TensorRole::parameter, parameter_types>(kind, std::forward<F>(f));
  }
};

}  // namespace lockstep
