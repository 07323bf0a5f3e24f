// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A checkpoint that is read: one safetensors file and the shards that it names, as one set
/// of whole tensors; what it says beside them; and what is loaded from it.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/checkpoint/state.hpp"
#include "lockstep/checkpoint/values.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/optim/progress.hpp"

namespace lockstep::detail {

/// What a checkpoint's main file says of a shard beside it.
struct ShardFile {
  std::string name;  // within the folder of the main file
  WrittenFile file;
};

/// The `files` member of the main file's facts, and how it is read back. Names with slashes, of the
/// main file itself or given twice are errors.
Json index_of(std::span<const ShardFile> shards);
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
  void open_shards(const std::string& path);
  void collect();
  void join(StoredTensor& tensor) const;

  std::vector<SafetensorsFile> files_;  // the main file, then the shards
  std::vector<ShardFile> shards_;
  std::vector<StoredTensor> tensors_;  // sorted by name
};

/// Names that begin so are the library's; all others are parameters and buffers.
inline constexpr std::string_view reserved_prefix = "lockstep/";

/// The name under which a piece's whole tensor is in a file. Buffers of other ranks than the first
/// have names of their own: they are there only where ranks keep their own buffers.
std::string stored_name(const StateEntry& piece);

/// A name in its parts: `lockstep/state/<parameter>/<state>`, `lockstep/buffer/<rank>/<name>`,
/// `lockstep/local/<rank>/<parameter>/<state>`, or a parameter's
/// or buffer's alone.
struct StoredName {
  enum class Kind : std::uint8_t { plain, state, buffer, local, other } kind = Kind::plain;
  std::string_view name;   // of the parameter or buffer
  std::string_view extra;  // the state, or the rank
  std::string_view state;  // of a rank's own
};
StoredName parse_stored_name(std::string_view name);
/// The same with another parameter's or buffer's name.
std::string renamed(const StoredName& stored, std::string_view name);

/// Everything that a checkpoint says beside tensors.
struct CheckpointFacts {
  std::string version;  ///< of the library that wrote it
  std::string time;     ///< in UTC
  JobShape shape;
  ReplicaProgress progress;
  /// Of a step that was under way: version 1.x saved their gradients too.
  std::uint64_t micro_batches_under_way = 0;
  std::uint64_t epoch = 0;
  std::optional<double> best;
  std::optional<SamplerState> position;
  Scores scores;
  std::vector<std::vector<SavedValue>> values;  ///< of the program, by rank
  std::vector<SavedValue> common;               ///< of the program, for all ranks
};

/// The time now, `2026-11-16T05:23:49Z`.
std::string utc_time();

/// What a file of parameters alone says beside tensors: nothing that depends on how its job has
/// come to them, so that the same parameters are the same file.
Json parameters_only_facts();
bool has_parameters_only(const CheckpointReader& reader);

/// The facts as JSON. Texts and lists of numbers among the values are no part of it: they become
/// tensors, which point into the facts.
Json json_of(const CheckpointFacts& facts);
void add_value_tensors(const CheckpointFacts& facts, std::vector<TensorToWrite>& to);

/// The facts of a checkpoint without the program's values.
CheckpointFacts read_facts(const CheckpointReader& reader);
/// The values that a rank has in a checkpoint, and those of all ranks.
std::vector<SavedValue> read_values(const CheckpointReader& reader, std::size_t rank);
std::vector<SavedValue> read_common_values(const CheckpointReader& reader);

enum class LoadWhat : std::uint8_t { parameters, training, job };

Resumed load_job(const StatefulJob& job, const std::string& path, const LoadOptions& options,
                 LoadWhat what);

/// The name of the call that loads it.
std::string_view operation_of(LoadWhat what);

/// A piece of the job, and the tensors of the file from which it is read: one, except for what
/// ranks keep for themselves, which is the sum of all of them.
struct LoadedPiece {
  StateEntry piece;
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
LoadPlan plan_load(const StatefulJob& job, const std::string& path, const LoadOptions& options,
                   LoadWhat what);

}  // namespace lockstep::detail
