// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DataParallel`: one process with a thread for each replica.

#include "lockstep/comm.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/trainer/wrappers.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/comm.ipp"
#include "lockstep/core/core.ipp"
#include "lockstep/data/data.ipp"
#include "lockstep/device/device.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"
#endif
