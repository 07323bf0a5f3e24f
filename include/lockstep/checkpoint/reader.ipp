// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `reader.hpp`.

#include <algorithm>
#include <atomic>
#include <charconv>
#include <exception>
#include <functional>
#include <optional>
#include <system_error>

#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/share_work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE Json index_of(std::span<const ShardFile> shards) {
  Json index = Json::array();
  for (const ShardFile& shard : shards) {
    index.push(Json::object()
                   .add("name", shard.name)
                   .add("bytes", shard.file.bytes)
                   .add("digest", checksum_text(shard.file.digest)));
  }
  return index;
}

LOCKSTEP_INLINE std::vector<ShardFile> shards_in(const JsonEntry& facts) {
  std::vector<ShardFile> shards;
  const auto files = facts.find("files");
  if (!files) return shards;
  for (std::size_t i = 0; i < files->as_array().size(); ++i) {
    const JsonEntry file = files->item(i);
    const std::string name = file.at("name").text();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || name == name_in_folder(facts.file()))
      file.at("name").fail("is not the name of another file in the same folder");
    shards.push_back({name, {file.at("bytes").natural(), file.at("digest").checksum()}});
  }
  std::vector<std::string_view> names;
  names.reserve(shards.size());
  for (const ShardFile& shard : shards) names.push_back(shard.name);
  std::ranges::sort(names);
  if (std::ranges::adjacent_find(names) != names.end()) files->fail("has a name twice");
  return shards;
}

LOCKSTEP_INLINE std::string piece_name(std::string_view whole, std::uint64_t first) {
  return text({whole, "@", first});
}

/// `name@12` is the piece of `name` from element 12 on.
struct PieceName {
  std::string_view whole;
  std::uint64_t first;
};

LOCKSTEP_INLINE std::optional<PieceName> as_piece(std::string_view name) {
  const std::size_t sign = name.rfind('@');
  if (sign == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(sign + 1);
  if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  std::uint64_t first = 0;
  const char* const begin = &digits.front();
  const char* const end = begin + digits.size();
  const auto [stop, error] = std::from_chars(begin, end, first);
  if (error != std::errc() || stop != end) return std::nullopt;
  return PieceName{name.substr(0, sign), first};
}

/// The parameter or buffer that `lockstep/state/<parameter>/<state>`,
/// `lockstep/local/<rank>/<parameter>/<state>`, `lockstep/gradient/<rank>/<parameter>` or
/// `lockstep/buffer/<rank>/<buffer>` belongs to.
LOCKSTEP_INLINE std::string_view owner_of(std::string_view name) {
  constexpr std::string_view state = "lockstep/state/";
  if (name.starts_with(state)) {
    const std::size_t slash = name.rfind('/');
    return slash < state.size() ? "" : name.substr(state.size(), slash - state.size());
  }
  constexpr std::string_view local = "lockstep/local/";
  constexpr std::string_view roles[] = {"lockstep/gradient/", "lockstep/buffer/", local};
  for (const std::string_view role : roles) {
    if (!name.starts_with(role)) continue;
    const std::size_t slash = name.find('/', role.size());
    if (slash == std::string_view::npos) return "";
    const std::size_t end = role == local ? name.rfind('/') : name.size();
    return end <= slash ? "" : name.substr(slash + 1, end - slash - 1);
  }
  return "";
}

LOCKSTEP_INLINE CheckpointReader::CheckpointReader(const std::string& path) {
  files_.emplace_back(path);
  open_shards(path);
  collect();
}

LOCKSTEP_INLINE void CheckpointReader::open_shards(const std::string& path) {
  shards_ = shards_in(facts());
  if (shards_.empty()) return;
  prefer_open_files(shards_.size() + 16);
  const auto refuse = [&](std::string_view problem) {
    fail("checkpoint", {"'", path, "' is not whole: ", problem},
         "bring all its files into one folder, or take another checkpoint");
  };
  const std::string folder = folder_of(path);
  for (const ShardFile& shard : shards_) {
    const std::string shard_path = text({folder, "/", shard.name});
    try {
      files_.emplace_back(shard_path);
    } catch (const Error& error) {
      refuse(error.problem());
    }
    const SafetensorsFile& file = files_.back();
    if (file.bytes() != shard.file.bytes || file.digest() != shard.file.digest) {
      refuse(text({"its shard '", shard_path, "' is not the one that was saved with it (",
                   file.bytes(), " bytes, digest ", checksum_text(file.digest().value_or(0)), "; ",
                   shard.file.bytes, " and ", checksum_text(shard.file.digest), " are expected)"}));
    }
  }
}

LOCKSTEP_INLINE void CheckpointReader::collect() {
  const SafetensorsFile& main = files_.front();
  std::vector<std::pair<std::string_view, JsonEntry>> recorded;
  if (const auto shapes = facts().find("shapes")) {
    for (std::size_t i = 0; i < shapes->as_object().size(); ++i)
      recorded.emplace_back(shapes->member_name(i), shapes->member(i));
  }
  using Recorded = std::pair<std::string_view, JsonEntry>;
  std::ranges::sort(recorded, {}, &Recorded::first);
  const auto recorded_shape = [&](std::string_view name) -> const JsonEntry* {
    const auto found = std::ranges::lower_bound(recorded, name, {}, &Recorded::first);
    return found == recorded.end() || found->first != name ? nullptr : &found->second;
  };
  const auto owner_shape = [&](std::string_view name) -> std::optional<std::vector<std::uint64_t>> {
    const std::string_view owner = owner_of(name);
    if (owner.empty()) return std::nullopt;
    if (const TensorEntry* const whole = main.find(owner)) return whole->shape;
    if (const JsonEntry* const shape = recorded_shape(owner)) return shape->naturals();
    return std::nullopt;
  };
  const auto piece_of = [&](const TensorEntry& entry) -> std::optional<PieceName> {
    const std::string_view name = entry.name;
    const auto piece = main.is_lockstep() ? as_piece(name) : std::nullopt;
    if (!piece || entry.shape.size() != 1) return std::nullopt;
    if (recorded_shape(piece->whole) != nullptr) return piece;
    if (!name.starts_with("lockstep/")) return std::nullopt;
    // A parameter may be called `a@1` itself; a state is never.
    if (!name.starts_with("lockstep/state/") && owner_shape(name)) return std::nullopt;
    if (!owner_shape(piece->whole))
      fail_damaged(path(), text({"nothing says how large '", piece->whole, "' is"}));
    return piece;
  };

  struct Found {
    std::string_view whole;
    bool is_piece;
    StoredPiece piece;
  };
  std::vector<Found> found;
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& entry : file.tensors()) {
      const auto piece = piece_of(entry);
      found.push_back({piece ? piece->whole : std::string_view(entry.name),
                       piece.has_value(),
                       {piece ? piece->first : 0, entry.count, &file, &entry}});
    }
  }
  std::ranges::sort(found, [](const Found& a, const Found& b) {
    if (a.whole != b.whole) return a.whole < b.whole;
    if (a.piece.first != b.piece.first) return a.piece.first < b.piece.first;
    return a.piece.count < b.piece.count;
  });
  for (std::size_t i = 0; i < found.size();) {
    const Found& first = found[i];
    const TensorEntry& entry = *first.piece.entry;
    StoredTensor tensor{std::string(first.whole), entry.element, entry.shape, entry.count, {}};
    bool is_whole = false;
    for (; i < found.size() && found[i].whole == tensor.name; ++i) {
      tensor.pieces.push_back(found[i].piece);
      is_whole = is_whole || !found[i].is_piece;
    }
    if (is_whole && tensor.pieces.size() > 1) {
      fail_damaged(path(), text({"'", tensor.name, "' is in '", tensor.pieces[0].file->path(),
                                 "' and again in '", tensor.pieces[1].file->path(), "'"}));
    }
    if (!is_whole) {
      const JsonEntry* const shape = recorded_shape(tensor.name);
      tensor.shape =
          shape != nullptr ? shape->naturals() : owner_shape(tensor.name).value_or(tensor.shape);
      join(tensor);
    }
    tensors_.push_back(std::move(tensor));
  }
}

/// Checks that the pieces make the whole.
LOCKSTEP_INLINE void CheckpointReader::join(StoredTensor& tensor) const {
  tensor.count = 1;
  for (const std::uint64_t extent : tensor.shape) {
    if (!multiply(tensor.count, extent, tensor.count))
      fail_damaged(path(), text({"the shape of '", tensor.name, "' is too large"}));
  }
  std::uint64_t place = 0;
  for (const StoredPiece& piece : tensor.pieces) {
    if (piece.entry->element != tensor.element)
      fail_damaged(path(), text({"the pieces of '", tensor.name, "' have different types"}));
    if (piece.first != place) {
      fail_damaged(path(), text({"the pieces of '", tensor.name,
                                 piece.first < place ? "' overlap at element " : "' lack element ",
                                 std::min(place, piece.first)}));
    }
    if (!add_up(place, piece.count, place) || place > tensor.count) break;
  }
  if (place != tensor.count) {
    fail_damaged(path(), text({"the pieces of '", tensor.name, "' have ", place, " elements of ",
                               tensor.count}));
  }
}

LOCKSTEP_INLINE const StoredTensor* CheckpointReader::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors_, name, {}, &StoredTensor::name);
  return found == tensors_.end() || found->name != name ? nullptr : &*found;
}

LOCKSTEP_INLINE void CheckpointReader::read(const StoredTensor& tensor, std::uint64_t first,
                                            std::uint64_t count, std::byte* to) const {
  check(first <= tensor.count && count <= tensor.count - first,
        "read no more of a tensor than there is");
  check(tensor.element->bits % 8 == 0, "read elements of whole bytes only");
  const std::uint64_t size = tensor.element->bits / 8;
  auto piece = std::ranges::upper_bound(tensor.pieces, first, {}, &StoredPiece::first);
  if (piece != tensor.pieces.begin()) --piece;
  for (; count != 0; ++piece) {
    const std::uint64_t skipped = first - piece->first;
    const std::uint64_t taken = std::min(count, piece->count - skipped);
    piece->file->read(*piece->entry, skipped * size, {to, static_cast<std::size_t>(taken * size)});
    to += taken * size;
    first += taken;
    count -= taken;
  }
}

LOCKSTEP_INLINE void CheckpointReader::verify() const {
  struct Task {
    const SafetensorsFile* file;
    const TensorEntry* tensor;
  };
  std::vector<Task> tasks;
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& tensor : file.tensors()) tasks.push_back({&file, &tensor});
  }
  std::ranges::sort(tasks, std::greater(), [](const Task& task) { return task.tensor->bytes; });

  // Whoever waits for it has nothing else to do. Large tensors come first.
  share_work(tasks.size(), [&](std::size_t i) {
    const TensorEntry& tensor = *tasks[i].tensor;
    std::vector<std::byte> memory(static_cast<std::size_t>(
        std::min<std::uint64_t>(tensor.bytes, SafetensorsFile::verify_bytes)));
    tasks[i].file->verify(tensor, memory);
  });
}

}  // namespace lockstep::detail
