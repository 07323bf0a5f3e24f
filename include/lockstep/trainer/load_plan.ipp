// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `load_plan.hpp`.

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <utility>

#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/load_plan.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string_view operation_of(LoadWhat what) {
  constexpr std::string_view names[] = {"load_parameters", "load", "resume"};
  return names[static_cast<std::size_t>(what)];
}

using Names = std::vector<std::string>;

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

/// Makes the plan.
class LoadPlanning {
 public:
  LoadPlanning(const KeptJob& job, const std::string& path, const LoadOptions& options,
               LoadWhat what)
      : job_(job), path_(path), options_(options), what_(what) {}

  LoadPlan run() {
    open();
    judge(together([&] { return match().packed(); }));
    return std::move(plan_);
  }

 private:
  std::string_view operation() const { return operation_of(what_); }
  /// Calls `f()` on all ranks; none goes on where one has failed.
  template <class F>
  std::vector<std::string> together(const F& f) const {
    return store_together(job_.ranks, operation(), f);
  }

  void open();
  LoadFindings match();
  void name_tensors();
  const StoredTensor* find(const std::string& name) const;
  void want(const KeptPiece& piece, LoadFindings& found, std::set<const StoredTensor*>& used);
  void want_residual(const KeptPiece& piece, LoadFindings& found);
  void want_local(const KeptPiece& piece, LoadFindings& found);
  bool fits(const KeptPiece& piece, const StoredTensor& stored, LoadFindings& found) const;
  KeptPiece own_part(const KeptPiece& piece) const;
  void compare_kept_values(LoadFindings& found);
  void judge(const std::vector<std::string>& told);

  const KeptJob& job_;
  const std::string& path_;
  const LoadOptions& options_;
  LoadWhat what_;
  LoadPlan plan_;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;  // by their names in the job
};

LOCKSTEP_INLINE void LoadPlanning::open() {
  require_same_path(job_.ranks, operation(), together([&] { return path_; }));
  const std::vector<std::string> digests = together([&] {
    plan_.reader = std::make_unique<CheckpointReader>(path_);
    if (what_ != LoadWhat::parameters) {
      if (has_parameters_only(*plan_.reader))
        fail(operation(),
             {"'", path_, "' is a file of parameters and buffers only, and has no training state"},
             "call load_parameters, or name a checkpoint that was saved without parameters_only");
      if (!plan_.reader->facts().find("progress"))
        fail(operation(), {"'", path_, "' was not saved by lockstep, and has no optimizer"},
             "call load_parameters, which loads parameters and buffers of any safetensors file");
      plan_.facts = read_facts(*plan_.reader);
    }
    if (job_.ranks.rank == Rank{0}) plan_.reader->verify();
    const std::uint64_t digest =
        plan_.reader->main_file().digest().value_or(plan_.reader->main_file().bytes());
    return std::string(reinterpret_cast<const char*>(&digest), sizeof digest);
  });
  for (std::size_t rank = 1; rank < digests.size(); ++rank) {
    if (digests[rank] != digests[0])
      fail(operation(), {"rank ", rank, " and rank 0 see different files at '", path_, "'"},
           "give all ranks the same file, which nobody replaces while it is read", job_.ranks.rank);
  }
}

// Names, shapes and types.

LOCKSTEP_INLINE void LoadPlanning::name_tensors() {
  for (const StoredTensor& stored : plan_.reader->tensors()) {
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

LOCKSTEP_INLINE const StoredTensor* LoadPlanning::find(const std::string& name) const {
  const auto place = tensors_.find(name);
  return place == tensors_.end() ? nullptr : place->second;
}

LOCKSTEP_INLINE bool LoadPlanning::fits(const KeptPiece& piece, const StoredTensor& stored,
                                        LoadFindings& found) const {
  const std::vector<std::uint64_t> shape(
      piece.whole.extents.begin(),
      piece.whole.extents.begin() + static_cast<std::ptrdiff_t>(piece.whole.rank));
  if (stored.shape != shape) {
    found.mismatches.push_back(
        text({"size mismatch for ", printable(stored.name), ": ", shape_text(stored.shape),
              " in the file, ", shape_text(shape), " in the job"}));
    return false;
  }
  const bool convertible = is_floating(stored.kind()) && is_floating(piece.whole.element);
  const bool may_differ = options_.convert || (piece.role == KeptRole::local && !piece.averaged);
  if (stored.kind() == piece.whole.element || (convertible && may_differ)) return true;
  found.mismatches.push_back(
      text({"type mismatch for ", printable(stored.name), ": ", stored.element->name,
            " in the file, ", element_name(piece.whole.element), " in the job",
            convertible ? " (.convert = true rounds it)" : ""}));
  return false;
}

/// Of memory that ranks share each writes a part; replicas of one process leave it to the first.
LOCKSTEP_INLINE KeptPiece LoadPlanning::own_part(const KeptPiece& piece) const {
  if (!piece.shared) return piece;
  if (job_.is_one_process) return piece.part(0, piece.rank == 0 ? piece.count : 0);
  const std::size_t me = job_.ranks.rank.value();
  const std::size_t share = piece.count / job_.ranks.world;
  const bool is_last = me + 1 == job_.ranks.world;
  return piece.part(me * share, is_last ? piece.count - me * share : share);
}

LOCKSTEP_INLINE void LoadPlanning::want(const KeptPiece& piece, LoadFindings& found,
                                        std::set<const StoredTensor*>& used) {
  const StoredTensor* stored = nullptr;
  std::string name = stored_name(piece);
  if (piece.role == KeptRole::buffer) {
    const bool own = job_.shape.keeps_own_buffers && what_ != LoadWhat::parameters;
    if (own) stored = find(name);
    name = piece.name;
  }
  if (stored == nullptr) stored = find(name);
  // A file of another program may have one of several names.
  for (const NameAlias& alias : job_.aliases)
    if (stored == nullptr && alias.of == name) stored = find(alias.name);
  if (stored == nullptr) {
    // Without counts of single parameters, theirs is the count of all.
    if (piece.role != KeptRole::state || piece.state != "step") found.missing.push_back(name);
    return;
  }
  used.insert(stored);
  if (fits(piece, *stored, found)) plan_.pieces.push_back({own_part(piece), {stored}});
}

/// Replica r of n goes on with what the replicas r, r + n, ... had not sent of their gradients.
LOCKSTEP_INLINE void LoadPlanning::want_residual(const KeptPiece& piece, LoadFindings& found) {
  LoadedPiece loaded{piece, {}};
  for (std::size_t k = piece.rank; k < plan_.facts.shape.replicas; k += job_.shape.replicas) {
    KeptPiece of_rank = piece;
    of_rank.rank = k;
    const StoredTensor* const stored = find(stored_name(of_rank));
    if (stored != nullptr && fits(piece, *stored, found)) loaded.sources.push_back(stored);
  }
  if (!loaded.sources.empty()) plan_.residuals.push_back(std::move(loaded));
}

/// What a rank had for itself it has again. Where there were more ranks or fewer, all go on with
/// the mean, as after the average that they would have made next.
LOCKSTEP_INLINE void LoadPlanning::want_local(const KeptPiece& piece, LoadFindings& found) {
  if (what_ == LoadWhat::parameters) return;
  if (!piece.averaged) return want_residual(piece, found);
  LoadedPiece loaded{piece, {}};
  const bool same = plan_.facts.shape.replicas == job_.shape.replicas;
  for (std::size_t k = 0; k != plan_.facts.shape.replicas; ++k) {
    if (same && k != piece.rank) continue;
    KeptPiece of_rank = piece;
    of_rank.rank = k;
    const StoredTensor* const stored = find(stored_name(of_rank));
    if (stored != nullptr && fits(piece, *stored, found)) loaded.sources.push_back(stored);
  }
  if (!loaded.sources.empty()) plan_.averaged.push_back(std::move(loaded));
}

LOCKSTEP_INLINE LoadFindings LoadPlanning::match() {
  name_tensors();
  LoadFindings found;
  std::set<const StoredTensor*> used;
  std::set<std::string_view> known;  // parameters and buffers of the job
  for (const KeptPiece& piece : job_.pieces(KeptFor::loading)) {
    const bool is_plain = piece.role == KeptRole::parameter || piece.role == KeptRole::buffer;
    if (is_plain) known.insert(piece.name);
    if (piece.role == KeptRole::local) {
      want_local(piece, found);
    } else if (is_plain || what_ != LoadWhat::parameters) {
      want(piece, found, used);
    }
  }
  std::set<std::string_view> aliases;
  for (const NameAlias& alias : job_.aliases) aliases.insert(alias.name);
  for (const auto& [name, stored] : tensors_) {
    if (used.contains(stored) || aliases.contains(name)) continue;
    const StoredName parts = parse_stored_name(name);
    const bool is_unknown_state = parts.kind == StoredName::Kind::state &&
                                  what_ != LoadWhat::parameters && parts.extra != "step" &&
                                  known.contains(parts.name);
    if (parts.kind == StoredName::Kind::plain || is_unknown_state) found.unused.push_back(name);
  }
  if (what_ == LoadWhat::job) {
    compare_kept_values(found);
    if (const std::uint64_t batches = plan_.facts.micro_batches_under_way; batches != 0)
      plan_.notes.push_back(text({"saved after ", batches,
                                  " micro-batches of a step, which are forgotten: newer versions "
                                  "save after updates"}));
  }
  return found;
}

LOCKSTEP_INLINE void LoadPlanning::compare_kept_values(LoadFindings& found) {
  const auto compare = [&](const KeptValues& wanted, const std::vector<SavedValue>& saved,
                           std::string_view whose) {
    const ValueDifferences differences = compare_values(wanted, saved);
    for (const std::string& name : differences.missing)
      found.missing.push_back(text({"the value ", name, whose}));
    for (const std::string& words : differences.other_types)
      found.mismatches.push_back(text({"type mismatch for the value ", words}));
    for (const std::string& name : differences.unexpected)
      if (!name.starts_with(reserved_prefix))  // those are a trainer's own
        plan_.notes.push_back(
            text({"the file has a value ", name, whose, " that nobody has asked for"}));
  };
  plan_.common = read_common_values(*plan_.reader);
  compare(options_.common, plan_.common, "");
  const std::size_t me = job_.ranks.rank.value();
  if (me < plan_.facts.shape.world) {
    plan_.values = read_values(*plan_.reader, me);
    compare(options_.values, plan_.values, text({" of rank ", me}));
  } else if (!options_.values.empty()) {
    plan_.notes.push_back(text({"rank ", me, " is new, and its values stay as they are"}));
  }
}

LOCKSTEP_INLINE std::string short_list(const Names& names) {
  constexpr std::size_t most = 24;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    list += (i == 0 ? "" : ", ") + printable(names[i]);
  if (names.size() > most) list += text({" and ", names.size() - most, " more"});
  return list;
}

/// Throws unless the findings of all ranks let the job be loaded.
LOCKSTEP_INLINE void LoadPlanning::judge(const std::vector<std::string>& told) {
  std::set<std::string> missing;
  std::set<std::string> mismatches;
  std::map<std::string, std::size_t> unused;
  for (const std::string& text : told) {
    LoadFindings found = LoadFindings::unpack(text);
    missing.insert(found.missing.begin(), found.missing.end());
    mismatches.insert(found.mismatches.begin(), found.mismatches.end());
    for (const std::string& name : found.unused) ++unused[name];
  }
  plan_.report.missing.assign(missing.begin(), missing.end());
  for (const auto& [name, ranks] : unused)
    if (ranks == told.size()) plan_.report.unexpected.push_back(name);
  const bool is_strange =
      options_.strict && !(plan_.report.missing.empty() && plan_.report.unexpected.empty());
  if (mismatches.empty() && !is_strange) return;
  Names problems;
  if (options_.strict && !plan_.report.missing.empty())
    problems.push_back("missing in the file: " + short_list(plan_.report.missing));
  if (options_.strict && !plan_.report.unexpected.empty())
    problems.push_back("unexpected in the file: " + short_list(plan_.report.unexpected));
  problems.insert(problems.end(), mismatches.begin(), mismatches.end());
  std::string problem = text({"'", path_, "' does not fit this job: "});
  for (std::size_t i = 0; i != problems.size(); ++i) problem += (i == 0 ? "" : "; ") + problems[i];
  throw Error(operation(), problem,
              is_strange ? "load a file of the same model and optimizer, translate names with "
                           ".rename, or load what both have with .strict = false"
                         : "load a file of the same model",
              job_.ranks.rank);
}

LOCKSTEP_INLINE LoadPlan plan_load(const KeptJob& job, const std::string& path,
                                   const LoadOptions& options, LoadWhat what) {
  return LoadPlanning(job, path, options, what).run();
}

}  // namespace lockstep::detail
