// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Saving, loading and resuming, of a wrapper or of a hand-written loop.

#include "lockstep/comm.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/trainer/job_saves.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/checkpoint/checkpoint.ipp"
#include "lockstep/detail/core/storage.ipp"
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/observe/observe.ipp"
#include "lockstep/detail/strategy/strategy.ipp"
#include "lockstep/detail/trainer/trainer.ipp"
#endif
