// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `tally.hpp`.

#include <cstdlib>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/observe/tally.hpp"

namespace lockstep {

LOCKSTEP_INLINE void Tally::add(std::string_view name, double sum, double count) {
  for (Entry& entry : entries_) {
    if (entry.name != name) continue;
    entry.sum += sum;
    entry.count += count;
    return;
  }
  entries_.push_back({std::string(name), sum, count});
}

LOCKSTEP_INLINE Scores Tally::scores() const {
  std::vector<Score> scores;
  scores.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    scores.push_back({entry.name, entry.sum / entry.count, entry.count});
  }
  return Scores(std::move(scores));
}

namespace detail {

LOCKSTEP_INLINE std::string packed_names(const Tally& tally) {
  std::string packed;
  for (const Tally::Entry& entry : tally) packed += text({entry.name.size(), ":", entry.name});
  return packed;
}

LOCKSTEP_INLINE std::vector<std::string> unpacked_names(std::string_view packed) {
  std::vector<std::string> names;
  while (!packed.empty()) {
    const std::size_t colon = packed.find(':');
    std::size_t size = 0;
    for (const char digit : packed.substr(0, colon)) {
      size = 10 * size + static_cast<std::size_t>(digit - '0');
    }
    names.emplace_back(packed.substr(colon + 1, size));
    packed.remove_prefix(colon + 1 + size);
  }
  return names;
}

LOCKSTEP_INLINE std::string quoted_list(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += text({list.empty() ? "'" : ", '", name, "'"});
  return list;
}

LOCKSTEP_INLINE std::size_t index_of(const std::vector<std::string>& names, std::string_view name) {
  std::size_t i = 0;
  while (i < names.size() && names[i] != name) ++i;
  return i;
}

LOCKSTEP_INLINE std::vector<std::string> common_names(const std::vector<std::string>& packed,
                                                      Rank me) {
  std::vector<std::string> agreed;
  std::size_t first = 0;
  for (std::size_t r = 0; r < packed.size(); ++r) {
    std::vector<std::string> names = unpacked_names(packed[r]);
    if (names.empty()) continue;
    if (agreed.empty()) {
      first = r;
      agreed = std::move(names);
      continue;
    }
    bool is_same = names.size() == agreed.size();
    for (const std::string& name : names) {
      is_same = is_same && index_of(agreed, name) < agreed.size();
    }
    if (is_same) continue;
    fail("reduce",
         {"rank ", first, " has tallied ", quoted_list(agreed), " and rank ", r, " ",
          quoted_list(names)},
         "tally the same names on all ranks that tally any", me);
  }
  return agreed;
}

LOCKSTEP_INLINE std::vector<double> sums_and_counts(const Tally& tally,
                                                    const std::vector<std::string>& names) {
  std::vector<double> totals(2 * names.size());
  for (const Tally::Entry& entry : tally) {
    const std::size_t i = index_of(names, entry.name);
    totals[2 * i] = entry.sum;
    totals[2 * i + 1] = entry.count;
  }
  return totals;
}

LOCKSTEP_INLINE Scores scores_of(const std::vector<double>& totals,
                                 const std::vector<std::string>& names) {
  std::vector<Score> scores;
  scores.reserve(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    scores.push_back({names[i], totals[2 * i] / totals[2 * i + 1], totals[2 * i + 1]});
  }
  return Scores(std::move(scores));
}

}  // namespace detail

}  // namespace lockstep
