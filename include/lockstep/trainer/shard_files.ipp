// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `shard_files.hpp`.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <span>
#include <utility>

#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/checkpoint/safetensors_file.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/trainer/shard_files.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string shard_name(std::string_view path, std::string_view token,
                                       std::size_t rank, std::size_t world) {
  constexpr std::string_view ending = ".safetensors";
  std::string_view stem = name_in_folder(path);
  if (stem.ends_with(ending)) stem.remove_suffix(ending.size());
  return text({stem, ".", token, ".rank-", rank, "-of-", world, ending});
}

LOCKSTEP_INLINE std::string beside(std::string_view path, std::string_view name) {
  return text({folder_of(path), "/", name});
}

/// The shards of the file that is about to be replaced. None where another name is linked to that
/// file, which needs them.
LOCKSTEP_INLINE std::vector<std::string> shards_to_replace(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0 || status.st_nlink > 1) return {};
  std::vector<std::string> names;
  try {
    for (const ShardFile& shard : shards_in(SafetensorsFile(path).facts()))
      names.push_back(shard.name);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it was no checkpoint, and has none
  }
  return names;
}

LOCKSTEP_INLINE void remove_beside(std::string_view path, std::string_view name) {
  ::unlink(beside(path, name).c_str());
}

LOCKSTEP_INLINE void commit(const std::string& path, FileToWrite& file,
                            const std::vector<ShardFile>& shards) {
  if (!shards.empty()) file.facts.set("files", index_of(shards));
  const std::vector<std::string> replaced = shards_to_replace(path);
  try {
    write_file(path, file);
  } catch (...) {
    for (const ShardFile& shard : shards) remove_beside(path, shard.name);
    throw;
  }
  for (const std::string& name : replaced) remove_beside(path, name);
}

/// A file with the tensors of a checkpoint, which are read when they are written.
LOCKSTEP_INLINE FileToWrite joined_file(const CheckpointReader& parts, Json facts,
                                        std::vector<std::byte>& window) {
  FileToWrite file;
  file.facts = std::move(facts);
  for (const StoredTensor& tensor : parts.tensors()) {
    const std::size_t size = element_size(tensor.kind());
    const auto bytes = static_cast<std::size_t>(tensor.count) * size;
    const auto read = [&parts, &tensor, &window, size](std::uint64_t at, std::size_t n) {
      parts.read(tensor, at / size, n / size, window.data());
      return std::span<const std::byte>(window.data(), n);
    };
    file.tensors.push_back({tensor.name,
                            tensor.kind(),
                            tensor.shape,
                            {static_cast<const std::byte*>(nullptr), bytes},
                            read});
  }
  return file;
}

LOCKSTEP_INLINE void commit_whole(const std::string& path, const std::string& part,
                                  FileToWrite& file, const std::vector<ShardFile>& shards) {
  Json facts = file.facts;  // without the index of the parts
  facts.take("shapes");     // of what the parts do not have whole
  const auto remove_parts = [&] {
    ::unlink(part.c_str());
    for (const ShardFile& shard : shards) remove_beside(path, shard.name);
  };
  try {
    file.facts.set("files", index_of(shards));
    write_file(part, file);
    const CheckpointReader parts(part);
    std::vector<std::byte> window(write_chunk_bytes);
    FileToWrite whole = joined_file(parts, std::move(facts), window);
    whole.metadata = file.metadata;
    commit(path, whole, {});
  } catch (...) {
    remove_parts();
    throw;
  }
  remove_parts();
}

/// How long rank 0 waits for another rank's part of an asynchronous save.
inline constexpr std::chrono::minutes longest_shard_wait{30};

LOCKSTEP_INLINE std::optional<std::vector<ShardFile>> await_shards(
    const std::string& path, const std::vector<ExpectedShard>& expected,
    const std::atomic<bool>& is_given_up) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + longest_shard_wait;
  std::vector<ShardFile> shards;
  std::chrono::milliseconds pause{1};
  while (shards.size() != expected.size()) {
    const ExpectedShard& next = expected[shards.size()];
    const std::string missing = beside(path, next.name);
    if (::access(missing.c_str(), F_OK) == 0) {
      const SafetensorsFile shard(missing);
      shards.push_back({next.name, {shard.bytes(), shard.digest().value_or(0)}});
      continue;
    }
    if (is_given_up.load()) return std::nullopt;
    struct stat folder{};
    if (::stat(folder_of(path).c_str(), &folder) != 0 || folder.st_nlink == 0)
      fail_writing(path, ENOENT);  // what is not there will get no file
    if (Clock::now() > deadline) {
      for (const ShardFile& shard : shards) remove_beside(path, shard.name);
      fail("save",
           {"rank ", next.rank, " has not written its part '", missing, "' within ",
            longest_shard_wait.count(), " minutes"},
           "see whether that rank writes to the same folder");
    }
    sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(32));
  }
  return shards;
}

}  // namespace lockstep::detail
