// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `saver_core.hpp`.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <span>
#include <string_view>
#include <utility>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/checkpoint_contents.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/save_announcement.hpp"
#include "lockstep/trainer/saver_core.hpp"
#include "lockstep/trainer/shard_files.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// The file that a rank writes. It points into itself and into the job's memory or a copy of it.
struct RankFile {
  std::string path;
  FileToWrite file;
  std::vector<KeptPiece> pieces;
  bool is_copied = false;             // does it wait for copies?
  CheckpointFacts facts;              // of rank 0
  std::vector<ExpectedShard> shards;  // of rank 0
  std::string part;                   // of rank 0, where all files become one: its own
  std::function<void()> written;      // of rank 0
};

/// Rank 0's file, after those of all other ranks.
LOCKSTEP_INLINE void commit_all(RankFile& file, const std::vector<ShardFile>& shards) {
  if (file.part.empty() || shards.empty()) {
    commit(file.path, file.file, shards);
  } else {
    commit_whole(file.path, file.part, file.file, shards);
  }
  if (file.written) file.written();
}

// What a rank writes.

/// A tensor of a file, and the pieces of it that this rank has.
struct CollectedTensor {
  std::string name;
  std::vector<const KeptPiece*> pieces;  // in order
};

LOCKSTEP_INLINE std::vector<CollectedTensor> collected_tensors(std::span<const KeptPiece> pieces,
                                                               std::span<const NameAlias> aliases) {
  std::vector<CollectedTensor> tensors;
  std::map<std::string, std::size_t> places;
  const auto add = [&](std::string name, const KeptPiece& piece) {
    const auto [place, is_new] = places.try_emplace(name, tensors.size());
    if (is_new) tensors.push_back({std::move(name), {}});
    tensors[place->second].pieces.push_back(&piece);
  };
  for (const KeptPiece& piece : pieces) {
    std::string name = stored_name(piece);
    if (name == piece.name) {
      // The format has no two names for the same bytes: they are written once more.
      for (const NameAlias& alias : aliases)
        if (alias.of == name) add(alias.name, piece);
    }
    add(std::move(name), piece);
  }
  std::vector<CollectedTensor> result;
  for (CollectedTensor& tensor : tensors) {
    std::ranges::sort(tensor.pieces, {}, &KeptPiece::first);
    std::size_t count = 0;
    for (const KeptPiece* piece : tensor.pieces) count += piece->count;
    if (count == tensor.pieces.front()->whole.count()) {
      result.push_back(std::move(tensor));
      continue;
    }
    for (const KeptPiece* piece : tensor.pieces)
      result.push_back({piece_name(tensor.name, piece->first), {piece}});
  }
  return result;
}

/// The shapes of parameters that rank 0's file does not have whole: ranks have saved them in
/// pieces, and rank 0 may have none.
LOCKSTEP_INLINE void add_shapes(const KeptJob& job, RankFile& file) {
  std::vector<std::string_view> whole;
  for (const KeptPiece& piece : file.pieces) {
    if (piece.role == KeptRole::parameter && piece.is_whole()) whole.push_back(piece.name);
  }
  std::ranges::sort(whole);
  Json shapes = Json::object();
  bool has_shapes = false;
  for (const KeptPiece& piece : job.pieces(KeptFor::loading)) {
    if (piece.role != KeptRole::parameter || std::ranges::binary_search(whole, piece.name))
      continue;
    const std::span extents(piece.whole.extents.data(), piece.whole.rank);
    shapes.set(piece.name, Json::array_of(extents));
    for (const NameAlias& alias : job.aliases)
      if (alias.of == piece.name) shapes.set(alias.name, Json::array_of(extents));
    has_shapes = true;
  }
  if (has_shapes) file.file.facts.add("shapes", std::move(shapes));
}

/// Can it be written from where it is?
LOCKSTEP_INLINE bool is_as_in_file(const CollectedTensor& tensor) {
  const KeptPiece& piece = *tensor.pieces.front();
  return tensor.pieces.size() == 1 && piece.on_host && piece.held == piece.whole.element;
}

/// Bytes of a tensor that the host cannot write from where it is, or not in that type: copied to
/// `window` when they are wanted. The pieces follow each other.
LOCKSTEP_INLINE std::span<const std::byte> copied_chunk(const KeptJob& job,
                                                        std::span<const KeptPiece* const> pieces,
                                                        std::byte* window, std::uint64_t at,
                                                        std::size_t bytes) {
  const std::size_t size = element_size(pieces.front()->whole.element);
  const std::size_t begin = at / size;
  const std::size_t end = begin + bytes / size;
  std::vector<KeptPiece> parts;
  std::size_t place = 0;  // of a piece, in elements
  for (const KeptPiece* piece : pieces) {
    const std::size_t from = std::max(begin, place);
    const std::size_t to = std::min(end, place + piece->count);
    if (from < to) parts.push_back(piece->part(from - place, to - from));
    place += piece->count;
  }
  std::vector<KeptCopy> copies;
  std::byte* next = window;
  for (const KeptPiece& part : parts) {
    copies.push_back({next, &part});
    next += part.file_bytes();
  }
  job.copy_out(copies);
  job.await_copies(job.wrapper);
  return {window, bytes};
}

/// The tensors of this rank's file. A save that blocks writes them from where they are, or through
/// a small window; one that does not needs a copy of all.
LOCKSTEP_INLINE void SaverCore::add_tensors(const KeptJob& job, bool copies_all, RankFile& file) {
  const std::vector<CollectedTensor> tensors = collected_tensors(file.pieces, job.aliases);
  std::size_t copied_bytes = 0;
  std::vector<KeptCopy> copies;
  for (const CollectedTensor& tensor : tensors) {
    if (!copies_all) {
      if (!is_as_in_file(tensor)) copied_bytes = write_chunk_bytes;
      continue;
    }
    for (const KeptPiece* piece : tensor.pieces) copied_bytes += piece->file_bytes();
    copied_bytes = align_up(copied_bytes);
  }
  if (snapshot_.bytes < copied_bytes) {
    snapshot_ = {};
    snapshot_ = job.make_memory(copied_bytes);
  }
  std::size_t place = 0;
  for (const CollectedTensor& tensor : tensors) {
    const KeptPiece& first = *tensor.pieces.front();
    TensorToWrite& written = file.file.tensors.emplace_back();
    written.name = tensor.name;
    written.kind = first.whole.element;
    std::size_t bytes = 0;
    std::size_t count = 0;
    for (const KeptPiece* piece : tensor.pieces) {
      bytes += piece->file_bytes();
      count += piece->count;
    }
    if (first.is_whole() || tensor.pieces.size() > 1) {
      written.shape.assign(first.whole.extents.begin(),
                           first.whole.extents.begin() + static_cast<int>(first.whole.rank));
    } else {
      written.shape = {count};
    }
    if (copies_all) {
      written.data = {snapshot_.data + place, bytes};
      for (const KeptPiece* piece : tensor.pieces) {
        copies.push_back({snapshot_.data + place, piece});
        place += piece->file_bytes();
      }
      place = align_up(place);
    } else if (is_as_in_file(tensor)) {
      written.data = {first.data, bytes};
    } else {
      written.data = {static_cast<const std::byte*>(nullptr), bytes};
      written.read = [&job, pieces = tensor.pieces, window = snapshot_.data](std::uint64_t at,
                                                                             std::size_t size) {
        return copied_chunk(job, pieces, window, at, size);
      };
    }
  }
  file.is_copied = !copies.empty();
  if (file.is_copied) job.copy_out(copies);
}

/// What a save is to have of what this rank keeps.
LOCKSTEP_INLINE std::vector<KeptPiece> saved_pieces(const KeptJob& job,
                                                    const SaveOptions& options) {
  std::vector<KeptPiece> pieces = job.pieces(KeptFor::saving);
  if (options.parameters_only)
    std::erase_if(pieces, [](const KeptPiece& piece) { return stored_name(piece) != piece.name; });
  return pieces;
}

LOCKSTEP_INLINE std::shared_ptr<RankFile> SaverCore::collect(const KeptJob& job,
                                                             const std::string& path,
                                                             const SaveOptions& options,
                                                             const std::vector<std::string>& told) {
  const auto file = std::make_shared<RankFile>();
  const std::string_view token = SaveAnnouncement(told[0]).token;
  const std::size_t me = job.ranks.rank.value();
  file->pieces = saved_pieces(job, options);
  if (me == 0) {
    file->path = path;
    if (options.consolidated || options.parameters_only)
      file->part = beside(path, shard_name(path, token, me, told.size()));
    file->written = options.written;
    CheckpointFacts& facts = file->facts;
    facts.version = version;
    facts.time = utc_time();
    facts.shape = job.shape;
    facts.progress = job.progress();
    facts.epoch = options.epoch;
    facts.best = options.best;
    facts.position = options.position;
    facts.scores = options.scores;
    for (std::size_t rank = 0; rank != told.size(); ++rank) {
      const SaveAnnouncement of_rank(told[rank]);
      facts.values.push_back(unpack_values(of_rank.values));
      if (rank != 0 && of_rank.has_tensors)
        file->shards.push_back({rank, shard_name(path, token, rank, told.size())});
    }
    facts.common = unpack_values(pack_values(options.common));
    file->file.facts = options.parameters_only ? parameters_only_facts() : json_of(facts);
    add_shapes(job, *file);
    if (!options.parameters_only) add_value_tensors(facts, file->file.tensors);
  } else {
    file->path = beside(path, shard_name(path, token, me, told.size()));
    file->file.facts.add("version", version).add("shard", me).add("world", told.size());
  }
  add_tensors(job, options.asynchronous, *file);
  // In the order in which parts of several ranks are joined, whatever the number of ranks is.
  if (options.parameters_only) std::ranges::sort(file->file.tensors, {}, &TensorToWrite::name);
  return file;
}

// Saving.

LOCKSTEP_INLINE SaverCore::SaverCore() : exceptions_(std::uncaught_exceptions()) {}

LOCKSTEP_INLINE SaverCore::~SaverCore() {
  if (std::uncaught_exceptions() > exceptions_) is_given_up_ = true;
  writer_.reset();  // it uses the other members
}

/// Ends the save under way, whose outcome nobody wants to know.
LOCKSTEP_INLINE void SaverCore::give_up() {
  is_given_up_ = true;
  try {
    if (writer_) writer_->wait();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it was thrown on all ranks
  }
  is_given_up_ = false;
}

LOCKSTEP_INLINE void SaverCore::finish(const JointRanks& ranks) {
  // First those who wait for nobody: rank 0 would wait in vain for the file of one that failed.
  const auto wait = [&](bool is_turn) {
    store_together(ranks, "save", [&] {
      if (is_turn && writer_) writer_->wait();
      return std::string();
    });
  };
  try {
    if (ranks.world > 1) wait(ranks.rank != Rank{0});
    wait(ranks.rank == Rank{0});
  } catch (...) {
    give_up();
    throw;
  }
}

LOCKSTEP_INLINE void SaverCore::write_now(const KeptJob& job, RankFile& file) {
  const bool writes_shard = job.ranks.rank != Rank{0} && !file.file.tensors.empty();
  std::vector<ShardFile> shards;
  try {
    const std::vector<std::string> told = store_together(job.ranks, "save", [&] {
      std::string written;
      if (file.is_copied) job.await_copies(job.wrapper);
      if (writes_shard) {
        const WrittenFile mine = write_file(file.path, file.file);
        written = {reinterpret_cast<const char*>(&mine), sizeof mine};
      }
      return written;
    });
    for (const ExpectedShard& shard : file.shards) {
      WrittenFile written{};
      told[shard.rank].copy(reinterpret_cast<char*>(&written), sizeof written);
      shards.push_back({shard.name, written});
    }
  } catch (...) {
    // Rank 0 alone could have made these files a checkpoint, and has not.
    for (const ExpectedShard& shard : file.shards) remove_beside(file.path, shard.name);
    throw;
  }
  store_together(job.ranks, "save", [&] {
    if (job.ranks.rank == Rank{0}) commit_all(file, shards);
    return std::string();
  });
}

LOCKSTEP_INLINE void SaverCore::write_later(const KeptJob& job,
                                            const std::shared_ptr<RankFile>& file) {
  const bool is_first = job.ranks.rank == Rank{0};
  if (!writer_ || (!is_first && file->file.tensors.empty())) return;
  writer_->start([this, is_first, file, await = job.await_copies, wrapper = job.wrapper] {
    if (file->is_copied) await(wrapper);
    if (!is_first) {
      write_file(file->path, file->file);
    } else if (const auto shards = await_shards(file->path, file->shards, is_given_up_)) {
      commit_all(*file, *shards);
    }
  });
}

LOCKSTEP_INLINE bool SaverCore::save(const KeptJob& job, const std::string& path,
                                     const SaveOptions& options) {
  if (!writer_) writer_.emplace(job.ranks.rank);
  std::vector<std::string> told;
  try {
    told = work_together(job.ranks, "save", [&] {
      writer_->rethrow();
      if (job.micro_batches != 0 && !options.parameters_only)
        fail("save", {"the job is between the micro-batches of a step"},
             "save after the last one; a trainer's own save waits for it");
      const std::string token = random_token();
      const std::string values = pack_values(options.values);
      SaveAnnouncement mine;
      mine.path = path;
      mine.token = token;
      mine.values = values;
      mine.is_busy = writer_->is_busy();
      mine.has_tensors = !saved_pieces(job, options).empty();
      return mine.packed();
    });
  } catch (...) {
    give_up();
    throw;
  }
  std::vector<std::string> paths;
  bool is_busy = false;
  for (const std::string& text : told) {
    const SaveAnnouncement of_rank(text);
    paths.emplace_back(of_rank.path);
    is_busy = is_busy || of_rank.is_busy;
  }
  require_same_path(job.ranks, "save", paths);
  if (is_busy && options.when_busy == WhenBusy::skip) return false;
  if (is_busy) finish(job.ranks);

  job.synchronize_buffers();
  std::shared_ptr<RankFile> file;
  try {
    work_together(job.ranks, "save", [&] {
      file = collect(job, path, options, told);
      return std::string();
    });
    if (options.asynchronous) {
      write_later(job, file);
    } else {
      write_now(job, *file);
    }
  } catch (...) {
    // Nobody writes these copies any more, but the device may still write to their memory.
    try {
      job.await_copies(job.wrapper);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first error counts
    }
    throw;
  }
  return true;
}

}  // namespace lockstep::detail
