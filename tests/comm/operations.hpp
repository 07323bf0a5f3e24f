// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every reduce operation, for tests that try all of them.

#include "lockstep/detail/core/reduce_op.hpp"

namespace ranks {

/// Calls `f(op)` for every operation that T has.
template <class T, class F>
void each_operation(const F& f) {
  using namespace lockstep;
  const auto try_op = [&]<class Op>(Op op) {
    if constexpr (ReduceOp<Op, T>) f(op);
  };
  try_op(Sum{});
  try_op(Product{});
  try_op(Min{});
  try_op(Max{});
  try_op(Average{});
  try_op(PreMultipliedSum<float>{0.25f});
  try_op(BitAnd{});
  try_op(BitOr{});
  try_op(BitXor{});
}

}  // namespace ranks
