// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The middle of a reduce operation, for reductions that are made in stages.

#include <string_view>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail {

/// Op without its first and last step, over values that have been prepared. Values that are
/// prepared once and finished once may be combined in any number of stages.
template <class Op>
struct Combining : Narrowing {
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

}  // namespace lockstep::detail
