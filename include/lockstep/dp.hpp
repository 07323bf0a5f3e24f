// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: one process with a thread for each replica.

#include "lockstep/comm.hpp"
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/observe/observe.ipp"
#include "lockstep/detail/strategy/strategy.ipp"
#include "lockstep/detail/trainer/trainer.ipp"
#endif
