// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), as PyTorch's.

#include <cmath>

#include "lockstep/detail/optim/optimizer.hpp"

namespace lockstep {

namespace detail {

/// Two states: the running means of the gradient and of its square. `Decoupled` weight decay
/// shrinks the parameter (AdamW); otherwise it is added to the gradient (Adam).
template <bool Decoupled>
struct AdamRule : Choice<axes::Optimizer> {
  static constexpr std::size_t states = 2;
  static constexpr std::string_view state_names[] = {"exp_avg", "exp_avg_sq"};  // PyTorch's names

  struct Options {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double weight_decay = Decoupled ? 1e-2 : 0;
    constexpr void for_each(const auto& f) const {
      f("lr", lr);
      f("beta1", beta1);
      f("beta2", beta2);
      f("eps", eps);
      f("weight_decay", weight_decay);
    }
  };

  template <class A>
  struct Update {
    A rate;   // with the bias correction of the first mean
    A rest1;  // 1 - beta1, and 1 - beta2: in float, a subtraction would lose half of their digits
    A beta2;
    A rest2;
    A unbias;  // bias correction of the second mean's root
    A eps;
    A decay;
    LOCKSTEP_HOST_DEVICE constexpr void operator()(A& parameter, A gradient, A* state) const {
      using std::sqrt;
      if constexpr (Decoupled) {
        parameter *= decay;
      } else {
        gradient += decay * parameter;
      }
      state[0] += rest1 * (gradient - state[0]);
      state[1] = beta2 * state[1] + rest2 * gradient * gradient;
      parameter -= rate * state[0] / (sqrt(state[1]) * unbias + eps);
    }
  };

  /// Computed in double once per step: `1 - beta2^step` needs the precision.
  template <class A>
  LOCKSTEP_HOST_DEVICE static constexpr Update<A> at(const Options& options, double lr,
                                                     std::uint64_t step) {
    const auto steps = static_cast<double>(step);
    const double bias1 = 1 - std::pow(options.beta1, steps);
    const double bias2 = 1 - std::pow(options.beta2, steps);
    return {static_cast<A>(lr / bias1),
            static_cast<A>(1 - options.beta1),
            static_cast<A>(options.beta2),
            static_cast<A>(1 - options.beta2),
            static_cast<A>(1 / std::sqrt(bias2)),
            static_cast<A>(options.eps),
            static_cast<A>(Decoupled ? 1 - lr * options.weight_decay : options.weight_decay)};
  }
};

}  // namespace detail

/// PyTorch's Adam: weight decay is added to the gradient.
struct Adam : detail::AdamRule<false>, WithName<"Adam"> {};

/// PyTorch's AdamW: weight decay shrinks the parameter itself.
struct AdamW : detail::AdamRule<true>, WithName<"AdamW"> {};

static_assert(UpdateRule<Adam> && UpdateRule<AdamW>);

}  // namespace lockstep
