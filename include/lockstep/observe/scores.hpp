// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The results of an evaluation: named means, and over how many samples each was taken.

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// The mean of one figure over samples, under its name.
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

  /// The mean of that name: `scores["accuracy"] > 0.97`.
  double operator[](std::string_view name) const { return find(name).mean; }
  double count(std::string_view name) const { return find(name).count; }

  bool contains(std::string_view name) const;
  bool empty() const { return scores_.empty(); }
  std::size_t size() const { return scores_.size(); }
  auto begin() const { return scores_.begin(); }
  auto end() const { return scores_.end(); }

  bool operator==(const Scores&) const = default;

 private:
  const Score& find(std::string_view name) const;

  std::vector<Score> scores_;
};

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/scores.ipp"
#endif
