// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A checkpoint that is read: one safetensors file and the shards that it names, as one set
/// of whole tensors; `load`, `load_parameters` and `resume`.
///
/// A file may have been written by a job of another world, strategy, backend, device, sharding or
/// precision: tensors are found by their names, and a rank reads what it keeps and nothing else.
/// Before anything of the job changes, rank 0 has compared all checksums, and all ranks have
/// compared names, shapes and types. What goes wrong on one rank is the same error on all.

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/json.hpp"

namespace lockstep::detail {

/// What a checkpoint's main file says of a shard beside it.
struct ShardFile {
  std::string name;  // within the folder of the main file
  WrittenFile file;
  std::size_t rank = 0;  // whose it is, while it is written
};

/// The `files` member of the main file's facts, and how it is read back. Names with slashes, of the
/// main file itself or given twice are errors.
JsonLine index_of(std::span<const ShardFile> shards);
std::vector<ShardFile> shards_in(const JsonEntry& facts);

/// The name of the part of a tensor that begins with its flat element `first`.
std::string piece_name(std::string_view whole, std::uint64_t first);

/// A part of a whole tensor, as a file has it.
struct StoredPiece {
  std::uint64_t first;  // flat elements of the whole
  std::uint64_t count;
  const SafetensorsFile* file;
  const TensorEntry* entry;
};

struct StoredTensor {
  std::string name;
  const FileElement* element;
  std::vector<std::uint64_t> shape;
  std::uint64_t count;
  std::vector<StoredPiece> pieces;  // one after another, without gaps

  /// Booleans are bytes in a job.
  ElementKind kind() const { return element->name == "BOOL" ? ElementKind::u8 : element->kind; }
};

/// Opens the main file and its shards, checks that they belong together and that pieces fit,
/// without reading any data. Any safetensors file is a checkpoint of parameters.
///
/// A tensor `name@k` of a file that lockstep wrote is a piece of `name`, if `name` has a recorded
/// shape (`shapes` in the main file's facts) or is a state, gradient or buffer of a tensor that the
/// checkpoint has whole, whose shape it has then.
class CheckpointReader {
 public:
  explicit CheckpointReader(const std::string& path);

  const std::string& path() const { return files_.front().path(); }
  /// What lockstep has recorded in the main file; an empty object for files of other programs.
  JsonEntry facts() const { return files_.front().facts(); }
  bool is_lockstep() const { return files_.front().is_lockstep(); }
  const SafetensorsFile& main_file() const { return files_.front(); }
  std::span<const ShardFile> shards() const { return shards_; }

  /// All tensors, whole, by name.
  std::span<const StoredTensor> tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;

  /// Reads elements of a whole tensor as they are stored, flat and from `first` on: nothing else of
  /// the files is read. May be called by several threads.
  void read(const StoredTensor& tensor, std::uint64_t first, std::uint64_t count,
            std::byte* to) const;

  /// Reads all files and compares the checksums; throws an error that names the first tensor whose
  /// data is not what was written.
  void verify() const;

 private:
  void collect();
  void join(StoredTensor& tensor) const;

  std::vector<SafetensorsFile> files_;  // the main file, then the shards
  std::vector<ShardFile> shards_;
  std::vector<StoredTensor> tensors_;  // sorted by name
};

/// How much of a file is loaded.
enum class LoadWhat : std::uint8_t { parameters, training, job };

/// Loads a file into a job. **Ranks** all, with the same path. **Host** blocks.
Resumed load_job(const StatefulJob& job, const std::string& path, const LoadOptions& options,
                 LoadWhat what);

template <class Wrapper>
Resumed load_wrapped(Wrapper& wrapped, const std::string& path, const LoadOptions& options,
                     LoadWhat what) {
  Resumed resumed;
  with_job(wrapped, JobCall::load,
           [&](const StatefulJob& job) { resumed = load_job(job, path, options, what); });
  return resumed;
}

}  // namespace lockstep::detail

namespace lockstep {

/// Loads parameters, buffers and the optimizer: its states, its numbers, its counts of updates, its
/// schedule and the loss scale. Gradients that were added up in the job are forgotten. **Ranks**
/// all, with the same path. **Host** blocks.
template <class Wrapper>
LoadReport load(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::training).report;
}

/// Loads parameters and buffers, from any safetensors file: `load_parameters(ddp,
/// "resnet.safetensors", {.rename = ...})`. The optimizer stays as it is. **Ranks** all, with the
/// same path. **Host** blocks.
template <class Wrapper>
LoadReport load_parameters(Wrapper& wrapped, const std::string& path,
                           const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::parameters).report;
}

/// Loads all that `load` does, and goes on where the job was saved, with the program's values. The
/// result says where, for `loader.resume` and the loop. **Ranks** all, with the same path. **Host**
/// blocks.
template <class Wrapper>
Resumed resume(Wrapper& wrapped, const std::string& path, const LoadOptions& options = {}) {
  return detail::load_wrapped(wrapped, path, options, detail::LoadWhat::job);
}

}  // namespace lockstep
