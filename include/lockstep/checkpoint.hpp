// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Saving, loading and resuming, of a wrapper or of a hand-written loop.

#include "lockstep/checkpoint/checkpoints.hpp"
#include "lockstep/comm.hpp"
#include "lockstep/trainer/job_saves.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/checkpoint.ipp"
#include "lockstep/core/storage.ipp"
#include "lockstep/data/data.ipp"
#include "lockstep/observe/observe.ipp"
#include "lockstep/strategy/strategy.ipp"
#include "lockstep/trainer/trainer.ipp"
#endif
