// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel` for hand-written loops, with ranks, collectives and hooks.

#include "lockstep/comm.hpp"
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "lockstep/hooks.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/observe/observe.ipp"
#include "lockstep/detail/strategy/strategy.ipp"
#include "lockstep/detail/trainer/trainer.ipp"
#endif
