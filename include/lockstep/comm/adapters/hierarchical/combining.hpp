// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The middle of a reduce operation, for reductions that are made in stages.

#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep {

/// Op without its first and last step, over values that have been prepared. What is prepared once
/// and finished once can be combined in as many stages as there are.
template <class Op>
struct Combining : detail::Narrowing {
  static constexpr std::string_view name = Op::name;
  Op op;

  constexpr explicit Combining(const Op& whole) : op(whole) {}

  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T prepare(T value) const {
    return value;
  }
  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return op.combine(a, b);
  }
};

static_assert(ReduceOp<Combining<Average>, float> && ReduceOp<Combining<Max>, Half>);

}  // namespace lockstep
