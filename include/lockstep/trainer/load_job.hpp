// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Loads a file into a job, whatever its type is.

#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/kept_job.hpp"
#include "lockstep/trainer/load_what.hpp"

namespace lockstep::detail {

Resumed load_job(const KeptJob& job, const std::string& path, const LoadOptions& options,
                 LoadWhat what);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/load_job.ipp"
#endif
