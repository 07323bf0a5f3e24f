// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies data from slow or shared storage to a disk of the host, once for all its ranks.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

/// Copies a file, or a folder with its contents, into `folder` and returns the path of the copy,
/// `folder/name`. A copy is reused while source and copy have unchanged sizes and times, and
/// appears whole or not at all. **Ranks** any ranks, threads and jobs, without coordination: one
/// per host copies. **Host** blocks until the copy is complete, or the copying process has made no
/// progress for `patience`; waiting is reported on stderr.
std::string stage_locally(const std::string& path, const std::string& folder,
                          std::chrono::milliseconds patience = std::chrono::minutes(10));

}  // namespace lockstep
