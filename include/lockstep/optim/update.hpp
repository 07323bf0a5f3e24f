// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An optimizer's pass over a contiguous piece of a bucket, on the host.

#include <array>
#include <cstddef>
#include <tuple>

#include "lockstep/core/element.hpp"
#include "lockstep/optim/anomaly.hpp"

namespace lockstep::detail {

/// Where the states of a piece lie, one array per state, in the type in which sums are kept.
template <class Rule, class T>
using StatesOf = std::array<Accumulator<T>*, Rule::states>;

/// Updates `count` elements: parameters and states are read and written, gradients read, once.
/// `scale(g)` comes before the rule: clipping, averaging over micro-batches, or nothing. Returns
/// whether all gradients were finite; it is true where nobody `Watches`.
template <class Rule, bool Watches, class T, class Update, class Scale>
bool update_elements(Update update, T* __restrict parameters, const T* __restrict gradients,
                     const StatesOf<Rule, T>& states, std::size_t count, Scale scale) {
  using A = Accumulator<T>;
  // All captures are by value: the compiler would reload constants that a store might change.
  const auto pass = [update, scale, parameters, gradients, count](auto* __restrict... state) {
    auto blemishes = blemish(A{0});
#pragma GCC ivdep
    for (std::size_t i = 0; i < count; ++i) {
      A parameter = static_cast<A>(parameters[i]);
      const A gradient = static_cast<A>(gradients[i]);
      if constexpr (Watches) blemishes |= blemish(gradient);
      A values[] = {state[i]..., A{}};  // one more, so that it is never empty
      update(parameter, scale(gradient), values);
      parameters[i] = static_cast<T>(parameter);
      std::size_t k = 0;
      ((state[i] = values[k++]), ...);
    }
    return blemishes;
  };
  return std::apply(pass, states) == 0;
}

/// The scale before the rule: none, or a factor for clipping and for averaging over micro-batches.
struct Unscaled {
  constexpr auto operator()(auto gradient) const { return gradient; }
};
template <class A>
struct Scaled {
  A factor;
  constexpr A operator()(A gradient) const { return factor * gradient; }
};

}  // namespace lockstep::detail
