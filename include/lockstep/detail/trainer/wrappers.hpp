// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel` and `DataParallel`: PyTorch's names, for hand-written loops.

#include "lockstep/detail/strategy/dp.hpp"
#include "lockstep/detail/trainer/rejected.hpp"

namespace lockstep {

namespace detail {

template <class Policies>
consteval bool require_ddp() {
  static_assert(!is_dp<Policies>,
                "lockstep: DistributedDataParallel is ParallelStrategy<DDP>; the wrapper of "
                "ParallelStrategy<DP> is DataParallel");
  return true;
}
template <class Model, class Policies>
using DdpOf =
    std::enable_if_t<require_ddp<Policies>(), BasicDdp<Model, Policies, CommunicatorOf<Policies>>>;
template <class Model, class Policies>
using DpOf = BasicDp<Model, Policies, ReplicaRendezvousOf<Policies>>;

}  // namespace detail

/// A model and policies in any order:
///
///     auto group = init_process_group();
///     DistributedDataParallel<Linear, Optimizer<AdamW>> ddp(*group);
///     ddp.forward(batch).backward().reduce().update();
template <class Model, class... Ps>
using DistributedDataParallel = detail::Compose<detail::DdpOf, Model, Ps...>;

/// The same with replicas in one process:
///
///     DataParallel<Linear, Optimizer<AdamW>> dp;                 // all devices of this process
///     DataParallel<Linear, Optimizer<AdamW>> two({.replicas = 2});
///     dp.step(batch);
template <class Model, class... Ps>
using DataParallel = detail::Compose<detail::DpOf, Model, ParallelStrategy<DP>, Ps...>;

}  // namespace lockstep
