// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `load_job.hpp`.

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/share_work.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/load_job.hpp"
#include "lockstep/trainer/load_plan.hpp"

namespace lockstep::detail {

/// Tensors that are not read to where they belong are read by parts of this size.
inline constexpr std::size_t staging_bytes = std::size_t{8} << 20;
inline constexpr std::size_t staged_elements = staging_bytes / 8;

/// Reads pieces of a checkpoint into a job.
class PieceReader {
 public:
  PieceReader(const KeptJob& job, const CheckpointReader& reader) : job_(job), reader_(reader) {}

  void read(const std::vector<LoadedPiece>& pieces);
  void read_sum(const LoadedPiece& loaded, double factor);

 private:
  /// Calls `f(part)` for parts of a piece that fit into staging memory.
  template <class F>
  static void for_each_part(const KeptPiece& piece, const F& f) {
    for (std::size_t at = 0; at < piece.count; at += staged_elements)
      f(piece.part(at, std::min(staged_elements, piece.count - at)));
  }
  void read_through_staging(const KeptPiece& piece, const StoredTensor& stored);
  /// One of three memories from which the device copies best.
  std::byte* staging(std::size_t which);

  const KeptJob& job_;
  const CheckpointReader& reader_;
  SnapshotMemory staging_;
};

LOCKSTEP_INLINE std::byte* PieceReader::staging(std::size_t which) {
  if (staging_.data == nullptr) staging_ = job_.make_memory(3 * staging_bytes);
  return staging_.data + which * staging_bytes;
}

/// What lies in the file as it does in memory is read to where it belongs, by several threads.
LOCKSTEP_INLINE void PieceReader::read(const std::vector<LoadedPiece>& pieces) {
  struct Part {
    KeptPiece piece;
    const StoredTensor* stored;
  };
  std::vector<Part> parts;
  for (const LoadedPiece& loaded : pieces) {
    const KeptPiece& piece = loaded.piece;
    const StoredTensor& stored = *loaded.sources.front();
    const ElementKind kind = piece.whole.element;
    if (piece.on_host && piece.derived == nullptr && piece.held == kind && stored.kind() == kind) {
      for_each_part(piece, [&](const KeptPiece& part) { parts.push_back({part, &stored}); });
    } else {
      read_through_staging(piece, stored);
    }
  }
  share_work(parts.size(), [&](std::size_t i) {
    const KeptPiece& piece = parts[i].piece;
    reader_.read(*parts[i].stored, piece.first, piece.count, piece.data);
  });
}

LOCKSTEP_INLINE void PieceReader::read_through_staging(const KeptPiece& piece,
                                                       const StoredTensor& stored) {
  const ElementKind kind = piece.whole.element;
  for_each_part(piece, [&](const KeptPiece& part) {
    std::byte* from = staging(0);
    reader_.read(stored, part.first, part.count, from);
    if (stored.kind() != kind) {
      convert_elements(staging(1), kind, from, stored.kind(), part.count);
      from = staging(1);
    }
    job_.copy_in(part, from);
  });
}

/// Writes the sum of the sources times `factor`. Through `copy_in` also where it is one tensor: it
/// notes that the parameter was used.
LOCKSTEP_INLINE void PieceReader::read_sum(const LoadedPiece& loaded, double factor) {
  if (loaded.sources.size() == 1 && factor == 1)
    return read_through_staging(loaded.piece, *loaded.sources.front());
  const ElementKind kind = loaded.piece.whole.element;
  for_each_part(loaded.piece, [&](const KeptPiece& part) {
    auto* const numbers = reinterpret_cast<double*>(staging(1));
    auto* const sum = reinterpret_cast<double*>(staging(2));
    std::fill(sum, sum + part.count, 0.0);
    for (const StoredTensor* stored : loaded.sources) {
      reader_.read(*stored, part.first, part.count, staging(0));
      convert_elements(staging(1), ElementKind::f64, staging(0), stored->kind(), part.count);
      for (std::size_t i = 0; i != part.count; ++i) sum[i] += factor * numbers[i];
    }
    convert_elements(staging(0), kind, staging(2), ElementKind::f64, part.count);
    job_.copy_in(part, staging(0));
  });
}

/// Steps draw from the seed of the job that is resumed, whatever this one was given. Says so.
LOCKSTEP_INLINE void note_seed(const KeptJob& job, LoadPlan& plan) {
  const std::optional<std::uint64_t> own = job.progress().random_seed;
  const std::optional<std::uint64_t> saved = plan.facts.progress.random_seed;
  if (own && saved && *own != *saved)
    plan.notes.push_back(text({"random numbers of steps go on from seed ", *saved,
                               " of the checkpoint, not from seed ", *own}));
}

/// Sets how far the job is. Returns by what saved residuals of gradients are multiplied: they are
/// of a scaled loss, and a job whose replicas are more divides by more.
LOCKSTEP_INLINE double set_progress(const KeptJob& job, const LoadPlan& plan, LoadWhat what) {
  ReplicaProgress progress = plan.facts.progress;
  if (what != LoadWhat::job) progress.random_seed.reset();  // a new run, from its own seed
  job.set_progress(progress);
  if (plan.residuals.empty()) return 1;
  const auto scale = [](const ReplicaProgress& of) {
    return of.loss_scale ? static_cast<double>(of.loss_scale->scale) : 1.0;
  };
  return job.shape.gradient_divisor / plan.facts.shape.gradient_divisor * scale(job.progress()) /
         scale(progress);
}

LOCKSTEP_INLINE Resumed load_job(const KeptJob& job, const std::string& path,
                                 const LoadOptions& options, LoadWhat what) {
  LoadPlan plan = plan_load(job, path, options, what);
  if (what == LoadWhat::job) note_seed(job, plan);
  store_together(job.ranks, operation_of(what), [&] {
    double factor = 1;
    if (what != LoadWhat::parameters) factor = set_progress(job, plan, what);
    PieceReader reader(job, *plan.reader);
    reader.read(plan.pieces);
    for (const LoadedPiece& loaded : plan.residuals) reader.read_sum(loaded, factor);
    for (const LoadedPiece& loaded : plan.averaged)
      reader.read_sum(loaded, 1 / static_cast<double>(loaded.sources.size()));
    set_values(options.values, plan.values);
    set_values(options.common, plan.common);
    return std::string();
  });
  const CheckpointFacts& facts = plan.facts;
  Resumed resumed;
  resumed.path = path;
  resumed.epoch = facts.epoch;
  resumed.step = facts.progress.updates;
  resumed.best = facts.best;
  resumed.position = facts.position;
  resumed.scores = facts.scores;
  resumed.world = WorldSize{facts.shape.world};
  resumed.report = std::move(plan.report);
  resumed.notes = std::move(plan.notes);
  if (what == LoadWhat::job && facts.shape.replicas != job.shape.replicas)
    resumed.notes.push_back(
        text({"saved by ", facts.shape.replicas, " ranks, resumed by ", job.shape.replicas}));
  return resumed;
}

}  // namespace lockstep::detail
