// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How often this process's job was started again by whoever has started it.

#include <cstddef>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// 0 in a job that was started once. Launchers count for themselves: lockstep's (LOCKSTEP_RESTART),
/// torchrun (TORCHELASTIC_RESTART_COUNT) and Slurm, whose batch jobs are requeued
/// (SLURM_RESTART_COUNT). One may have started another, so their counts are added.
std::size_t restart_count();

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/restarts.ipp"
#endif
