// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DistributedDataParallel` for hand-written loops, with ranks, collectives and hooks.

#include "lockstep/comm.hpp"
#include "lockstep/hooks.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/trainer/wrappers.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/data.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"
#endif
