// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: one process with a thread for each replica.

#include "lockstep/comm.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/trainer/wrappers.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/data.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"
#endif
