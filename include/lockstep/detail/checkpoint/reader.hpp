// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reading checkpoints: a safetensors file and its shards as one set of whole tensors.
///
/// The saving job may have had another world size, strategy, backend, device, sharding or
/// precision: tensors are found by name, and a rank reads only what it keeps.

#include "lockstep/detail/checkpoint/job.hpp"
#include "lockstep/detail/checkpoint/options.hpp"
#include "lockstep/detail/checkpoint/safetensors.hpp"

namespace lockstep::detail {

/// The `files` member of the main file's facts. Duplicates and files elsewhere are rejected.
JsonLine index_of(std::span<const ShardFile> shards);
std::vector<ShardFile> shards_in(const JsonEntry& facts);

/// The name of the piece of a tensor that begins at its flat element `first`.
inline std::string piece_name(std::string_view whole, std::uint64_t first) {
  return text({whole, "@", first});
}

/// A piece of a tensor in a file.
struct StoredPiece {
  std::uint64_t first;  // flat element of the whole tensor
  std::uint64_t count;
  const SafetensorsFile* file;
  const TensorEntry* entry;
};

struct StoredTensor {
  std::string name;
  const FileElement* element;
  std::vector<std::uint64_t> shape;
  std::uint64_t count;
  std::vector<StoredPiece> pieces;  // consecutive, without gaps

  /// A job holds booleans as bytes.
  ElementKind kind() const { return element->name == "BOOL" ? ElementKind::u8 : element->kind; }
};

/// Opens the main file and its shards, and checks without reading data that they belong together
/// and that the pieces form whole tensors. Any safetensors file is a checkpoint of parameters. In
/// lockstep's files, tensor `name@k` is a piece of `name` if `name` has a recorded shape (`shapes`
/// in the main file's facts) or is a state or buffer of a whole tensor, whose shape it shares.
class CheckpointReader {
 public:
  explicit CheckpointReader(const std::string& path);

  const std::string& path() const { return files_.front().path(); }
  JsonEntry facts() const { return files_.front().facts(); }
  bool is_lockstep() const { return files_.front().is_lockstep(); }
  const SafetensorsFile& main_file() const { return files_.front(); }
  std::span<const ShardFile> shards() const { return shards_; }

  /// All tensors, sorted by name.
  std::span<const StoredTensor> tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;

  /// Reads `count` stored elements from the flat element `first` on. Thread-safe.
  void read(const StoredTensor& tensor, std::uint64_t first, std::uint64_t count,
            std::byte* to) const;

  /// Reads all files and throws an error that names the first tensor whose checksum differs.
  void verify() const;

 private:
  void collect();
  void join(StoredTensor& tensor) const;

  std::vector<SafetensorsFile> files_;  // the main file, then the shards
  std::vector<ShardFile> shards_;
  std::vector<StoredTensor> tensors_;  // sorted by name
};

/// How much of a file is loaded: `load_parameters`, `load` or `resume`.
enum class LoadWhat : std::uint8_t { parameters, training, job };

/// Loads a file into a job. **Ranks** all, with the same path. **Host** blocks.
Resumed load_job(const StatefulJob& job, const std::string& path, const LoadOptions& options,
                 LoadWhat what);

Resumed load_wrapped(auto& wrapped, const std::string& path, const LoadOptions& options,
                     LoadWhat what) {
  Resumed resumed;
  with_job(wrapped, JobCall::load,
           [&](const StatefulJob& job) { resumed = load_job(job, path, options, what); });
  return resumed;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Loads parameters, buffers and the optimizer (states, hyperparameters, update counts, schedule,
/// loss scale); discards accumulated gradients. **Ranks** all, with the same path. **Host** blocks.
LoadReport load(auto& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::training).report;
}

/// Loads parameters and buffers from any safetensors file, and leaves the optimizer as it is.
/// **Ranks** all, with the same path. **Host** blocks.
LoadReport load_parameters(auto& wrapped, const std::string& path,
                           const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::parameters).report;
}

/// Loads what `load` does and the program's values, and continues the saved run. The result has the
/// position for `loader.resume` and the loop. **Ranks** all, with the same path. **Host** blocks.
Resumed resume(auto& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::job);
}

}  // namespace lockstep
