// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The optimizer axis: how a reduced gradient changes a parameter.

#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Optimizer : WithName<"Optimizer"> {};
}  // namespace axes

/// Options that are numbers, which ranks compare. `for_each(f)` calls `f(name, number)` for each.
template <class O>
concept NumberOptions =
    std::default_initializable<O> &&
    requires(const O& options, void (*f)(std::string_view, double)) { options.for_each(f); };

/// A choice of this axis is an update rule: the number of states per element (`states`), maybe
/// their `state_names`, the `Options` with a learning rate `lr`, and `at<A>(options, lr, step)`,
/// the constants of a step, counted from 1, as a function of one element in arithmetic of type A:
/// `update(A& parameter, A gradient, A* state)`. The update depends on nothing else, so that it may
/// run in a loop, a kernel, or the pass that reduces the bucket.
template <class R>
concept UpdateRule =
    NumberOptions<typename R::Options> &&
    requires(const typename R::Options& options, float& parameter, float gradient, float* state) {
      { R::states } -> std::convertible_to<std::size_t>;
      { options.lr } -> std::convertible_to<double>;
      R::template at<float>(options, 0.1, std::uint64_t{1})(parameter, gradient, state);
    };

namespace detail {

template <UpdateRule Rule>
constexpr std::string_view state_name(std::size_t k) {
  if constexpr (requires { Rule::state_names[0]; }) return Rule::state_names[k];
  constexpr std::string_view numbered[] = {"state.0", "state.1", "state.2", "state.3"};
  return k < 4 ? numbered[k] : "state";
}

}  // namespace detail

/// The policy of the update rule: `Optimizer<AdamW>`.
template <class Rule>
struct Optimizer : detail::ChoicePolicy<axes::Optimizer, Rule> {};

}  // namespace lockstep
