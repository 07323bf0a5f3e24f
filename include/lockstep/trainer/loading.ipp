// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `loading.hpp`.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/convert.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/checkpoint_contents.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/loading.hpp"

namespace lockstep::detail {

using Names = std::vector<std::string>;

/// A piece of the job, and the tensor of the file that it is a part of.
struct LoadedPiece {
  KeptPiece piece;
  const StoredTensor* stored;
};

/// What a rank finds when it compares the file with its job.
struct LoadFindings {
  Names missing;
  Names unused;      // what no rank uses is unexpected
  Names mismatches;  // in words

  std::string packed() const {
    std::string text;
    for (const Names* names : {&missing, &unused, &mismatches}) {
      std::string list;
      for (const std::string& name : *names) append_sized(list, name);
      append_sized(text, list);
    }
    return text;
  }
  static LoadFindings unpack(std::string_view text) {
    LoadFindings found;
    for (Names* names : {&found.missing, &found.unused, &found.mismatches}) {
      std::string_view list = take_sized(text);
      while (!list.empty()) names->emplace_back(take_sized(list));
    }
    return found;
  }
};

/// One rank's part of a load.
class Loading {
 public:
  Loading(const KeptJob& job, const std::string& path, const LoadOptions& options, LoadWhat what)
      : job_(job), path_(path), options_(options), what_(what) {}

  Resumed run() {
    open();
    compare();
    read();
    return result();
  }

 private:
  std::string_view operation() const {
    constexpr std::string_view names[] = {"load_parameters", "load", "resume"};
    return names[static_cast<std::size_t>(what_)];
  }

  /// Calls `f()` on all ranks; none goes on where one has failed.
  template <class F>
  std::vector<std::string> together(const F& f) const {
    return work_together(job_.ranks, operation(), f);
  }

  void open();
  void compare();
  void read();
  Resumed result() const;

  LoadFindings match();
  void name_tensors();
  const StoredTensor* find(const std::string& name) const;
  void want(const KeptPiece& piece, LoadFindings& found, std::set<const StoredTensor*>& used);
  bool fits(const KeptPiece& piece, const StoredTensor& stored, LoadFindings& found) const;
  void compare_kept_values(LoadFindings& found);
  void judge_accumulation();
  void judge(const std::vector<std::string>& told);
  KeptPiece own_part(const KeptPiece& piece) const;
  void read_piece(const LoadedPiece& loaded);
  void read_gradient(const KeptPiece& piece, double factor);
  std::byte* staging();

  const KeptJob& job_;
  const std::string& path_;
  const LoadOptions& options_;
  LoadWhat what_;
  std::optional<CheckpointReader> reader_;
  CheckpointFacts facts_;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;  // by their names in the job
  std::vector<LoadedPiece> pieces_;
  std::vector<KeptPiece> gradients_;
  std::vector<SavedValue> values_;
  std::vector<SavedValue> common_;
  LoadReport report_;
  Names notes_;
  SnapshotMemory staging_;
};

/// Tensors that are not read to where they belong are read by parts of this size.
inline constexpr std::size_t staging_bytes = std::size_t{8} << 20;

LOCKSTEP_INLINE void Loading::open() {
  const std::vector<std::string> paths = together([&] { return path_; });
  for (std::size_t rank = 1; rank < paths.size(); ++rank) {
    if (paths[rank] != paths[0])
      fail(operation(),
           {"ranks were given different paths: rank 0 has '", paths[0], "' and rank ", rank,
            " has '", paths[rank], "'"},
           "give all ranks the same path", job_.ranks.rank);
  }
  const std::vector<std::string> digests = together([&] {
    reader_.emplace(path_);
    if (what_ != LoadWhat::parameters) {
      if (!reader_->facts().find("progress"))
        fail(operation(), {"'", path_, "' was not saved by lockstep, and has no optimizer"},
             "call load_parameters, which loads parameters and buffers of any safetensors file");
      facts_ = read_facts(*reader_);
    }
    if (job_.ranks.rank == Rank{0}) reader_->verify();
    const std::uint64_t digest =
        reader_->main_file().digest().value_or(reader_->main_file().bytes());
    return std::string(reinterpret_cast<const char*>(&digest), sizeof digest);
  });
  for (std::size_t rank = 1; rank < digests.size(); ++rank) {
    if (digests[rank] != digests[0])
      fail(operation(), {"rank ", rank, " and rank 0 see different files at '", path_, "'"},
           "give all ranks the same file, which nobody replaces while it is read", job_.ranks.rank);
  }
}

// Names, shapes and types.

LOCKSTEP_INLINE void Loading::name_tensors() {
  for (const StoredTensor& stored : reader_->tensors()) {
    const StoredName parts = parse_stored_name(stored.name);
    std::string name = stored.name;
    if (parts.kind == StoredName::Kind::other) continue;
    if (options_.rename) {
      const std::string wanted = options_.rename(parts.name);
      if (wanted.empty()) continue;
      name = renamed(parts, wanted);
    }
    const auto [place, is_new] = tensors_.try_emplace(std::move(name), &stored);
    if (!is_new)
      fail(operation(),
           {"both '", place->second->name, "' and '", stored.name, "' of '", path_, "' become '",
            place->first, "'"},
           "give every tensor a name of its own in .rename");
  }
}

LOCKSTEP_INLINE const StoredTensor* Loading::find(const std::string& name) const {
  const auto place = tensors_.find(name);
  return place == tensors_.end() ? nullptr : place->second;
}

LOCKSTEP_INLINE bool Loading::fits(const KeptPiece& piece, const StoredTensor& stored,
                                   LoadFindings& found) const {
  const std::vector<std::uint64_t> shape(
      piece.whole.extents.begin(),
      piece.whole.extents.begin() + static_cast<std::ptrdiff_t>(piece.whole.rank));
  if (stored.shape != shape) {
    found.mismatches.push_back(
        text({"size mismatch for ", stored.name, ": ", shape_text(stored.shape), " in the file, ",
              shape_text(shape), " in the job"}));
    return false;
  }
  const bool convertible = is_floating(stored.kind()) && is_floating(piece.whole.element);
  const bool may_differ = options_.convert || piece.role == KeptRole::gradient;
  if (stored.kind() == piece.whole.element || (convertible && may_differ)) return true;
  found.mismatches.push_back(
      text({"type mismatch for ", stored.name, ": ", stored.element->name, " in the file, ",
            element_name(piece.whole.element), " in the job",
            convertible ? " (.convert = true rounds it)" : ""}));
  return false;
}

LOCKSTEP_INLINE void Loading::want(const KeptPiece& piece, LoadFindings& found,
                                   std::set<const StoredTensor*>& used) {
  const StoredTensor* stored = nullptr;
  std::string name = stored_name(piece);
  if (piece.role == KeptRole::buffer) {
    const bool own = job_.shape.keeps_own_buffers && what_ != LoadWhat::parameters;
    if (own) stored = find(name);
    name = piece.name;
  }
  if (stored == nullptr) stored = find(name);
  if (stored == nullptr) {
    // Without counts of single parameters, theirs is the count of all.
    if (piece.role != KeptRole::state || piece.state != "step") found.missing.push_back(name);
    return;
  }
  used.insert(stored);
  if (fits(piece, *stored, found)) pieces_.push_back({own_part(piece), stored});
}

LOCKSTEP_INLINE LoadFindings Loading::match() {
  name_tensors();
  LoadFindings found;
  std::set<const StoredTensor*> used;
  std::set<std::string_view> known;  // parameters and buffers of the job
  for (const KeptPiece& piece : job_.pieces(KeptFor::loading)) {
    const bool is_plain = piece.role == KeptRole::parameter || piece.role == KeptRole::buffer;
    if (is_plain) known.insert(piece.name);
    if (piece.role == KeptRole::gradient) {
      if (what_ != LoadWhat::job || facts_.progress.micro_batches == 0) continue;
      for (std::size_t k = 0; k != facts_.shape.replicas; ++k) {
        KeptPiece of_rank = piece;
        of_rank.rank = k;
        if (const StoredTensor* stored = find(stored_name(of_rank))) fits(piece, *stored, found);
      }
      gradients_.push_back(piece);
    } else if (is_plain || what_ != LoadWhat::parameters) {
      want(piece, found, used);
    }
  }
  for (const auto& [name, stored] : tensors_) {
    if (used.contains(stored)) continue;
    const StoredName parts = parse_stored_name(name);
    const bool is_unknown_state = parts.kind == StoredName::Kind::state &&
                                  what_ != LoadWhat::parameters && parts.extra != "step" &&
                                  known.contains(parts.name);
    if (parts.kind == StoredName::Kind::plain || is_unknown_state) found.unused.push_back(name);
  }
  if (what_ == LoadWhat::job) compare_kept_values(found);
  return found;
}

LOCKSTEP_INLINE void Loading::compare_kept_values(LoadFindings& found) {
  const auto compare = [&](const KeptValues& wanted, const std::vector<SavedValue>& saved,
                           std::string_view whose) {
    const ValueDifferences differences = compare_values(wanted, saved);
    for (const std::string& name : differences.missing)
      found.missing.push_back(text({"the value ", name, whose}));
    for (const std::string& words : differences.other_types)
      found.mismatches.push_back(text({"type mismatch for the value ", words}));
    for (const std::string& name : differences.unexpected)
      if (!name.starts_with(reserved_prefix))  // those are a trainer's own
        notes_.push_back(
            text({"the file has a value ", name, whose, " that nobody has asked for"}));
  };
  common_ = read_common_values(*reader_);
  compare(options_.common, common_, "");
  const std::size_t me = job_.ranks.rank.value();
  if (me < facts_.shape.world) {
    values_ = read_values(*reader_, me);
    compare(options_.values, values_, text({" of rank ", me}));
  } else if (!options_.values.empty()) {
    notes_.push_back(text({"rank ", me, " is new, and its values stay as they are"}));
  }
}

/// A step that is under way goes on only in a job whose steps are as long.
LOCKSTEP_INLINE void Loading::judge_accumulation() {
  const std::size_t batches = facts_.progress.micro_batches;
  if (what_ != LoadWhat::job || batches == 0) return;
  if (facts_.shape.micro_batches == job_.shape.micro_batches) return;
  const std::string difference =
      text({"'", path_, "' was saved after ", batches, " of ", facts_.shape.micro_batches,
            " micro-batches of a step, and this job's steps have ", job_.shape.micro_batches});
  if (options_.strict)
    fail(operation(), {difference},
         "use the same Accumulate<N>, or forget those batches with .strict = false",
         job_.ranks.rank);
  notes_.push_back(difference + ": they are forgotten");
  facts_.progress.micro_batches = 0;
  gradients_.clear();
}

LOCKSTEP_INLINE std::string short_list(const Names& names) {
  constexpr std::size_t most = 24;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > most) list += text({" and ", names.size() - most, " more"});
  return list;
}

/// Throws unless the findings of all ranks let the job be loaded.
LOCKSTEP_INLINE void Loading::judge(const std::vector<std::string>& told) {
  std::set<std::string> missing;
  std::set<std::string> mismatches;
  std::map<std::string, std::size_t> unused;
  for (const std::string& text : told) {
    LoadFindings found = LoadFindings::unpack(text);
    missing.insert(found.missing.begin(), found.missing.end());
    mismatches.insert(found.mismatches.begin(), found.mismatches.end());
    for (const std::string& name : found.unused) ++unused[name];
  }
  report_.missing.assign(missing.begin(), missing.end());
  for (const auto& [name, ranks] : unused)
    if (ranks == told.size()) report_.unexpected.push_back(name);
  const bool is_strange =
      options_.strict && !(report_.missing.empty() && report_.unexpected.empty());
  if (mismatches.empty() && !is_strange) return;
  Names problems;
  if (options_.strict && !report_.missing.empty())
    problems.push_back("missing in the file: " + short_list(report_.missing));
  if (options_.strict && !report_.unexpected.empty())
    problems.push_back("unexpected in the file: " + short_list(report_.unexpected));
  problems.insert(problems.end(), mismatches.begin(), mismatches.end());
  std::string problem = text({"'", path_, "' does not fit this job: "});
  for (std::size_t i = 0; i != problems.size(); ++i) problem += (i == 0 ? "" : "; ") + problems[i];
  throw Error(operation(), problem,
              is_strange ? "load a file of the same model and optimizer, translate names with "
                           ".rename, or load what both have with .strict = false"
                         : "load a file of the same model",
              job_.ranks.rank);
}

LOCKSTEP_INLINE void Loading::compare() {
  judge(together([&] { return match().packed(); }));
  judge_accumulation();
}

// Reading.

/// Of memory that ranks share each writes a part; replicas of one process leave it to the first.
LOCKSTEP_INLINE KeptPiece Loading::own_part(const KeptPiece& piece) const {
  if (!piece.shared) return piece;
  if (job_.is_one_process) return piece.part(0, piece.rank == 0 ? piece.count : 0);
  const std::size_t me = job_.ranks.rank.value();
  const std::size_t share = piece.count / job_.ranks.world;
  const bool is_last = me + 1 == job_.ranks.world;
  return piece.part(me * share, is_last ? piece.count - me * share : share);
}

LOCKSTEP_INLINE std::byte* Loading::staging() {
  if (staging_.data == nullptr) staging_ = job_.make_memory(3 * staging_bytes);
  return staging_.data;
}

LOCKSTEP_INLINE void Loading::read_piece(const LoadedPiece& loaded) {
  const KeptPiece& piece = loaded.piece;
  const StoredTensor& stored = *loaded.stored;
  const ElementKind kind = piece.whole.element;
  if (piece.count == 0) return;
  if (piece.on_host && piece.derived == nullptr && piece.held == kind && stored.kind() == kind)
    return reader_->read(stored, piece.first, piece.count, piece.data);
  std::byte* const raw = staging();
  std::byte* const converted = raw + staging_bytes;
  const std::size_t most = staging_bytes / 8;
  for (std::size_t at = 0; at < piece.count; at += most) {
    const std::size_t count = std::min(most, piece.count - at);
    reader_->read(stored, piece.first + at, count, raw);
    const std::byte* from = raw;
    if (stored.kind() != kind) {
      convert_elements(converted, kind, raw, stored.kind(), count);
      from = converted;
    }
    job_.copy_in(piece.part(at, count), from);
  }
}

/// Replica r of n goes on with the gradients of the replicas r, r + n, ... that were saved.
LOCKSTEP_INLINE void Loading::read_gradient(const KeptPiece& piece, double factor) {
  std::vector<const StoredTensor*> sources;
  for (std::size_t k = piece.rank; k < facts_.shape.replicas; k += job_.shape.replicas) {
    KeptPiece of_rank = piece;
    of_rank.rank = k;
    if (const StoredTensor* stored = find(stored_name(of_rank))) sources.push_back(stored);
  }
  if (sources.empty()) return;
  const ElementKind kind = piece.whole.element;
  if (sources.size() == 1 && factor == 1 && sources[0]->kind() == kind) {
    // Through `copy_in`, which also notes that the parameter was used.
    std::byte* const raw = staging();
    const std::size_t most = staging_bytes / 8;
    for (std::size_t at = 0; at < piece.count; at += most) {
      const std::size_t count = std::min(most, piece.count - at);
      reader_->read(*sources[0], piece.first + at, count, raw);
      job_.copy_in(piece.part(at, count), raw);
    }
    return;
  }
  std::byte* const raw = staging();
  auto* const part = reinterpret_cast<double*>(raw + staging_bytes);
  auto* const sum = reinterpret_cast<double*>(raw + 2 * staging_bytes);
  const std::size_t most = staging_bytes / sizeof(double);
  for (std::size_t at = 0; at < piece.count; at += most) {
    const std::size_t count = std::min(most, piece.count - at);
    std::fill(sum, sum + count, 0.0);
    for (const StoredTensor* stored : sources) {
      reader_->read(*stored, piece.first + at, count, raw);
      convert_elements(reinterpret_cast<std::byte*>(part), ElementKind::f64, raw, stored->kind(),
                       count);
      for (std::size_t i = 0; i != count; ++i) sum[i] += factor * part[i];
    }
    convert_elements(raw, kind, reinterpret_cast<const std::byte*>(sum), ElementKind::f64, count);
    job_.copy_in(piece.part(at, count), raw);
  }
}

LOCKSTEP_INLINE void Loading::read() {
  together([&] {
    double factor = 1;
    if (what_ != LoadWhat::parameters) {
      ReplicaProgress progress = facts_.progress;
      if (what_ != LoadWhat::job) progress.micro_batches = 0;
      job_.set_progress(progress);
      // Gradients are of a scaled loss, and a job whose replicas are more divides by more.
      const auto now = progress.micro_batches == 0 ? progress : job_.progress();
      const auto scale = [](const ReplicaProgress& of) {
        return of.loss_scale ? static_cast<double>(of.loss_scale->scale) : 1.0;
      };
      factor = job_.shape.gradient_divisor / facts_.shape.gradient_divisor * scale(now) /
               scale(facts_.progress);
    }
    for (const LoadedPiece& loaded : pieces_) read_piece(loaded);
    for (const KeptPiece& piece : gradients_) read_gradient(piece, factor);
    set_values(options_.values, values_);
    set_values(options_.common, common_);
    return std::string();
  });
}

LOCKSTEP_INLINE Resumed Loading::result() const {
  Resumed resumed;
  resumed.path = path_;
  resumed.epoch = facts_.epoch;
  resumed.step = facts_.progress.updates;
  resumed.best = facts_.best;
  resumed.position = facts_.position;
  resumed.scores = facts_.scores;
  resumed.world = WorldSize{facts_.shape.world};
  resumed.report = report_;
  resumed.notes = notes_;
  if (what_ == LoadWhat::job && facts_.shape.replicas != job_.shape.replicas)
    resumed.notes.push_back(
        text({"saved by ", facts_.shape.replicas, " ranks, resumed by ", job_.shape.replicas}));
  return resumed;
}

LOCKSTEP_INLINE Resumed load_job(const KeptJob& job, const std::string& path,
                                 const LoadOptions& options, LoadWhat what) {
  return Loading(job, path, options, what).run();
}

}  // namespace lockstep::detail
