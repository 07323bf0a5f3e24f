// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file PyTorch's SGD: plain, with momentum, with Nesterov momentum (types, as they cost memory).

#include "lockstep/detail/optim/optimizer.hpp"

namespace lockstep {

/// PyTorch's SGD without momentum.
struct SGD : Choice<axes::Optimizer>, WithName<"SGD"> {
  static constexpr std::size_t states = 0;

  struct Options {
    double lr = 1e-3;
    double weight_decay = 0;
    constexpr void for_each(const auto& f) const {
      f("lr", lr);
      f("weight_decay", weight_decay);
    }
  };

  template <class A>
  struct Update {
    A lr;
    A weight_decay;
    LOCKSTEP_HOST_DEVICE constexpr void operator()(A& parameter, A gradient, A* /*state*/) const {
      parameter -= lr * (gradient + weight_decay * parameter);
    }
  };

  template <class A>
  LOCKSTEP_HOST_DEVICE static constexpr Update<A> at(const Options& options, double lr,
                                                     std::uint64_t /*step*/) {
    return {static_cast<A>(lr), static_cast<A>(options.weight_decay)};
  }
};

namespace detail {

/// The momentum buffer starts as the first gradient, regardless of the dampening, as in PyTorch.
template <bool Nesterov>
struct MomentumRule : Choice<axes::Optimizer> {
  static constexpr std::size_t states = 1;
  static constexpr std::string_view state_names[] = {"momentum_buffer"};  // PyTorch's name

  struct Options {
    double lr = 1e-3;
    double momentum = 0.9;
    double dampening = 0;
    double weight_decay = 0;
    constexpr void for_each(const auto& f) const {
      f("lr", lr);
      f("momentum", momentum);
      f("dampening", dampening);
      f("weight_decay", weight_decay);
    }
  };

  template <class A>
  struct Update {
    A lr;
    A momentum;
    A share;  // of the gradient in the momentum buffer
    A weight_decay;
    LOCKSTEP_HOST_DEVICE constexpr void operator()(A& parameter, A gradient, A* state) const {
      const A slope = gradient + weight_decay * parameter;
      state[0] = momentum * state[0] + share * slope;
      parameter -= lr * (Nesterov ? slope + momentum * state[0] : state[0]);
    }
  };

  template <class A>
  LOCKSTEP_HOST_DEVICE static constexpr Update<A> at(const Options& options, double lr,
                                                     std::uint64_t step) {
    return {static_cast<A>(lr), static_cast<A>(options.momentum),
            static_cast<A>(step == 1 ? 1 : 1 - options.dampening),
            static_cast<A>(options.weight_decay)};
  }
};

}  // namespace detail

/// PyTorch's SGD with momentum.
struct SGDMomentum : detail::MomentumRule<false>, WithName<"SGDMomentum"> {};

/// PyTorch's SGD with Nesterov's momentum.
struct SGDNesterov : detail::MomentumRule<true>, WithName<"SGDNesterov"> {};

static_assert(UpdateRule<SGD> && UpdateRule<SGDMomentum> && UpdateRule<SGDNesterov>);

}  // namespace lockstep
