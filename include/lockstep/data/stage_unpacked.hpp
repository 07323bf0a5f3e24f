// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `stage_locally` for compressed files. Programs that use it link zlib (`-lz`).

#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/stage.hpp"

namespace lockstep {

/// Like `stage_locally`, but files whose names end in `.gz`, alone or in a folder, are unpacked and
/// lose that ending: what is read in every epoch is then mapped instead of unpacked.
std::string stage_unpacked(const std::string& path, const std::string& folder,
                           const StageOptions& options = {});

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/stage_unpacked.ipp"
#endif
