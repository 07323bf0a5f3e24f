// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a checkpoint has: the names of its tensors, and what it says beside them.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/checkpoint/json.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/trainer/kept_shape.hpp"
#include "lockstep/trainer/kept_values.hpp"

namespace lockstep::detail {

/// Names that begin so are the library's; all others are parameters and buffers.
inline constexpr std::string_view reserved_prefix = "lockstep/";

/// The name under which a piece's whole tensor is in a file. Buffers of other ranks than the first
/// have names of their own: they are there only where ranks keep their own buffers.
std::string stored_name(const KeptPiece& piece);

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
  KeptShape shape;
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

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/checkpoint_contents.ipp"
#endif
