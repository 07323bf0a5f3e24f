// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: DP for hand-written loops.

#include "lockstep/strategy/dp.hpp"
#include "lockstep/trainer/axes.hpp"
#include "lockstep/trainer/connection.hpp"
#include "lockstep/trainer/rejected.hpp"

namespace lockstep {

namespace detail {
template <class Model, class Policies>
using DpOf = BasicDp<Model, Policies, ReplicaMeetingOf<Policies>>;
}  // namespace detail

/// PyTorch's name, a model and policies in any order:
///
///     DataParallel<Linear, Optimizer<AdamW>> dp;                 // all devices of this process
///     DataParallel<Linear, Optimizer<AdamW>> two({.replicas = 2});
///     dp.step(batch);
template <class Model, class... Ps>
using DataParallel =
    detail::Compose<detail::DpOf, detail::RejectedWrapper, Model, ParallelStrategy<DP>, Ps...>;

}  // namespace lockstep
