// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What is read from which tensor of a file, found out before anything of a job changes.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/checkpoint_contents.hpp"
#include "lockstep/trainer/kept_job.hpp"
#include "lockstep/trainer/load_what.hpp"

namespace lockstep::detail {

/// The name of the call that loads it.
std::string_view operation_of(LoadWhat what);

/// A piece of the job, and the tensors of the file from which it is read: one, except for what
/// ranks keep for themselves, which is the sum of all of them.
struct LoadedPiece {
  KeptPiece piece;
  std::vector<const StoredTensor*> sources;
};

/// One rank's part of a load.
struct LoadPlan {
  std::unique_ptr<CheckpointReader> reader;
  CheckpointFacts facts;  // without the program's values
  std::vector<LoadedPiece> pieces;
  std::vector<LoadedPiece> residuals;  // what ranks have of gradients, and did not send
  std::vector<LoadedPiece> averaged;
  std::vector<SavedValue> values;
  std::vector<SavedValue> common;
  LoadReport report;
  std::vector<std::string> notes;
};

/// Opens a checkpoint, verifies it on rank 0 and compares it with the job on every rank. Throws on
/// all ranks, where it does not fit or cannot be read on one. **Ranks** all. **Host** blocks.
LoadPlan plan_load(const KeptJob& job, const std::string& path, const LoadOptions& options,
                   LoadWhat what);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/load_plan.ipp"
#endif
