// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The names of the files in a folder of checkpoints, and which of them there are.
///
/// `step-000000001200.safetensors` is a checkpoint after 1,200 updates, and
/// `step-000000001200.<token>.rank-3-of-8.safetensors` a shard of it. `best.safetensors` is the
/// checkpoint with the best score so far, and `best.score` that score. What ends in `.tmp-<token>`
/// is being written.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/utility.hpp"

namespace lockstep::detail {

inline constexpr std::string_view best_checkpoint_name = "best.safetensors";

/// The file of a checkpoint after so many updates, without its folder.
std::string checkpoint_name(std::uint64_t step);

/// After how many updates the checkpoint of this name was made; nothing if it is none.
std::optional<std::uint64_t> checkpoint_step(std::string_view name);

/// The checkpoint that a shard belongs to by its name, without `.safetensors`; empty if the name is
/// no shard's.
std::string_view shard_stem(std::string_view name);

/// Is this a file that was being written, or a copy that was being made?
bool is_temporary_name(std::string_view name);

/// A checkpoint in a folder. Of `best.safetensors` the step is not known from its name.
struct FoundCheckpoint {
  std::string path;
  std::optional<std::uint64_t> step;

  bool operator==(const FoundCheckpoint&) const = default;
};

/// The plain files in a folder, in no order; none where the folder cannot be read.
std::vector<std::string> files_in(const std::string& folder);

/// The checkpoints in a folder, the newest first, without `best.safetensors`.
std::vector<FoundCheckpoint> list_checkpoints(const std::string& folder);

/// The newest checkpoint for which `verify(path)` throws no `Error`; `best.safetensors` comes last.
/// `skipped(path, why)` is called for each that is passed over.
std::optional<FoundCheckpoint> newest_valid_checkpoint(
    const std::string& folder, FunctionRef<void(const std::string&)> verify,
    FunctionRef<void(const FoundCheckpoint&, const std::string&)> skipped);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/folder_names.ipp"
#endif
