// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Sums and counts by name, and their means over all ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/objects.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep {

/// Keeps sums and counts, never means: means over uneven shares of the data cannot be averaged,
/// sums can be added.
class Tally {
 public:
  struct Entry {
    std::string name;
    double sum = 0;
    double count = 0;
  };

  /// `tally.add("loss", loss * batch, batch)`, `tally.add("accuracy", correct, batch)`.
  void add(std::string_view name, double sum, double count) {
    auto entry = std::ranges::find(entries_, name, &Entry::name);
    if (entry == entries_.end()) entry = entries_.insert(entry, {std::string(name), 0, 0});
    entry->sum += sum;
    entry->count += count;
  }

  /// Of this rank alone.
  double mean(std::string_view name) const { return scores()[name]; }
  Scores scores() const {
    std::vector<Score> scores;
    scores.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      scores.push_back({entry.name, entry.sum / entry.count, entry.count});
    }
    return Scores(std::move(scores));
  }

  void clear() { entries_.clear(); }
  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

namespace detail {

/// Names with their lengths in front, so that any character may be in them.
inline std::string packed_names(const Tally& tally) {
  std::string text;
  for (const Tally::Entry& entry : tally) {
    text += std::to_string(entry.name.size()) + ":" + entry.name;
  }
  return text;
}

inline std::vector<std::string> unpacked_names(std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const std::size_t colon = text.find(':');
    const std::size_t size = std::stoul(std::string(text.substr(0, colon)));
    names.emplace_back(text.substr(colon + 1, size));
    text.remove_prefix(colon + 1 + size);
  }
  return names;
}

inline std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "'" : ", '") + name + "'";
  return text;
}

/// The names of the first rank that has any. The others have the same ones, in any order, or none.
template <Communicator C>
std::vector<std::string> agreed_names(C& comm, const Tally& tally) {
  const std::string own = packed_names(tally);
  const std::uint64_t fingerprint[] = {hash_of(own)};
  std::vector<std::uint64_t> fingerprints(comm.world_size().value());
  comm.all_gather(fingerprint, fingerprints);
  // Nearly always everybody has the same names, and eight bytes have told so.
  if (std::ranges::count(fingerprints, fingerprint[0]) == std::ssize(fingerprints)) {
    return unpacked_names(own);
  }
  std::vector<std::string> agreed;
  std::vector<std::string> agreed_sorted;
  std::size_t first = 0;
  const std::vector<std::string> packed = all_gather_objects(comm, own);
  for (std::size_t r = 0; r < packed.size(); ++r) {
    std::vector<std::string> names = unpacked_names(packed[r]);
    if (names.empty()) continue;
    std::vector<std::string> sorted = names;
    std::ranges::sort(sorted);
    if (agreed.empty()) {
      first = r;
      agreed = std::move(names);
      agreed_sorted = std::move(sorted);
    } else if (sorted != agreed_sorted) {
      throw Error("reduce",
                  "rank " + std::to_string(first) + " has tallied " + quoted_list(agreed) +
                      " and rank " + std::to_string(r) + " " + quoted_list(names),
                  "tally the same names on all ranks that tally any", comm.rank());
    }
  }
  return agreed;
}

}  // namespace detail

/// The means over what all ranks have tallied, the same bits on all of them. A rank that has seen
/// no sample, and therefore knows no name, takes part like any other.
/// **Ranks** all. **Host** blocks. **Stream** none.
template <Communicator C>
Scores reduce(C& comm, const Tally& tally) {
  const std::vector<std::string> names = detail::agreed_names(comm, tally);
  std::vector<double> totals(2 * names.size());
  for (const Tally::Entry& entry : tally) {
    const auto i = static_cast<std::size_t>(std::ranges::find(names, entry.name) - names.begin());
    totals[2 * i] = entry.sum;
    totals[2 * i + 1] = entry.count;
  }
  comm.all_reduce(totals, Sum{});
  std::vector<Score> scores;
  scores.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    scores.push_back({names[i], totals[2 * i] / totals[2 * i + 1], totals[2 * i + 1]});
  }
  return Scores(std::move(scores));
}

}  // namespace lockstep
