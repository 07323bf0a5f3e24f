// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Copies data from slow or shared storage to a disk of the host, once for all its ranks.

#include "lockstep/core/standard.hpp"

namespace lockstep {

/// How `stage_locally` waits.
struct StageOptions {
  /// For how long a process that copies may make no progress before those that wait give up.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
};

/// Copies a file, or a folder with all that is in it, into `folder` and returns the path of the
/// copy, `folder/name`. A copy that is there is used again while the source and the copy have the
/// sizes and times that they had.
///
/// **Ranks**: any number of ranks, threads and jobs may call it, with no need to agree: one of a
/// host copies. **Host**: waits until the copy is whole; a line on stderr says for whom. A copy
/// appears whole or not at all.
std::string stage_locally(const std::string& path, const std::string& folder,
                          const StageOptions& options = {});

}  // namespace lockstep
