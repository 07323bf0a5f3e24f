// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The results of an evaluation by name: sums and counts (`Tally`), and means (`Scores`).

#include "lockstep/detail/comm/groups.hpp"

namespace lockstep {

/// The mean of one metric over samples.
struct Score {
  std::string name;
  double mean = 0;  // NaN where nothing was counted
  double count = 0;

  bool operator==(const Score&) const = default;
};

/// Scores in the order in which their names were first used.
class Scores {
 public:
  Scores() = default;
  explicit Scores(std::vector<Score> scores) : scores_(std::move(scores)) {}

  /// A mean: `scores["accuracy"] > 0.97`.
  double operator[](std::string_view name) const { return find(name).mean; }
  double count(std::string_view name) const { return find(name).count; }

  bool contains(std::string_view name) const {
    return std::ranges::find(scores_, name, &Score::name) != scores_.end();
  }
  bool empty() const { return scores_.empty(); }
  std::size_t size() const { return scores_.size(); }
  auto begin() const { return scores_.begin(); }
  auto end() const { return scores_.end(); }

  bool operator==(const Scores&) const = default;

 private:
  const Score& find(std::string_view name) const;

  std::vector<Score> scores_;
};

/// Sums and counts, because means over uneven shares of the data cannot be averaged.
class Tally {
 public:
  struct Entry {
    std::string name;
    double sum = 0;
    double count = 0;
  };

  /// `tally.add("loss", loss * batch, batch)`, `tally.add("accuracy", correct, batch)`.
  void add(std::string_view name, double sum, double count);

  /// The mean over this rank's samples alone.
  double mean(std::string_view name) const { return scores()[name]; }
  Scores scores() const;

  void clear() { entries_.clear(); }
  bool empty() const { return entries_.empty(); }
  std::size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }

 private:
  std::vector<Entry> entries_;
};

namespace detail {

/// Names with length prefixes, so that they may contain any character.
std::string packed_names(const Tally& tally);
std::vector<std::string> unpacked_names(std::string_view text);

/// The names of the first rank that has any. The others have the same, in any order, or none.
std::vector<std::string> common_names(const std::vector<std::string>& packed, Rank me);

std::vector<double> sums_and_counts(const Tally& tally, const std::vector<std::string>& names);

template <Communicator C>
std::vector<std::string> agreed_names(C& comm, const Tally& tally) {
  const std::string own = packed_names(tally);
  const std::uint64_t fingerprint[] = {hash_of(own)};
  std::vector<std::uint64_t> fingerprints(comm.world_size().value());
  comm.all_gather(fingerprint, fingerprints);
  // Nearly always all ranks have the same names, and comparing eight bytes is enough.
  for (std::uint64_t other : fingerprints) {
    if (other != fingerprint[0]) return common_names(all_gather_objects(comm, own), comm.rank());
  }
  return unpacked_names(own);
}

}  // namespace detail

/// The means over all ranks' tallies, bitwise the same on all. A rank without samples, and so
/// without names, takes part too. **Ranks** all. **Host** blocks. **Stream** none.
template <Communicator C>
Scores reduce(C& comm, const Tally& tally) {
  const std::vector<std::string> names = detail::agreed_names(comm, tally);
  std::vector<double> totals = detail::sums_and_counts(tally, names);
  comm.all_reduce(totals, Sum{});
  Tally all;
  for (std::size_t i = 0; i != names.size(); ++i)
    all.add(names[i], totals[2 * i], totals[2 * i + 1]);
  return all.scores();
}

}  // namespace lockstep
