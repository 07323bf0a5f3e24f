// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The files of a checkpoint to which several ranks write: their names, and their commit.

#include <atomic>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Another rank's file beside that of rank 0.
struct ExpectedShard {
  std::size_t rank;
  std::string name;  // within the folder
};

/// The name of a rank's file, and a file in the folder of `path`. A token is new for every save, so
/// that nothing is overwritten.
std::string shard_name(std::string_view path, std::string_view token, std::size_t rank,
                       std::size_t world);
std::string beside(std::string_view path, std::string_view name);
void remove_beside(std::string_view path, std::string_view name);

/// The other ranks' files, which are there as soon as they are whole. Nothing where `is_given_up`
/// becomes true. **Host** blocks.
std::optional<std::vector<ShardFile>> await_shards(const std::string& path,
                                                   const std::vector<ExpectedShard>& expected,
                                                   const std::atomic<bool>& is_given_up);

/// Writes rank 0's file: with its rename all files are the checkpoint, and not before. Then removes
/// the shards of the file that it has replaced; where it fails, those of this one.
void commit(const std::string& path, FileToWrite& file, const std::vector<ShardFile>& shards);

/// The same, with all tensors in the one file. The parts, and rank 0's own that is `part`, are
/// removed.
void commit_whole(const std::string& path, const std::string& part, FileToWrite& file,
                  const std::vector<ShardFile>& shards);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/shard_files.ipp"
#endif
