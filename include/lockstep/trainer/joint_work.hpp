// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Work of which all ranks learn how it ended: files are opened and written by single ranks,
/// and what goes wrong on one is the same error on all.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/function_ref.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// The ranks of a job, without the type of their communicator.
struct JointRanks {
  Rank rank;
  std::size_t world = 1;
  /// Every rank's text, by rank. **Ranks** all. **Host** blocks.
  FunctionRef<std::vector<std::string>(std::string)> gather;
};

/// What every rank's `work()` returned, by rank. Where it throws on any rank, all ranks throw the
/// first such rank's error, with its number; no rank is told to end, so that the program may go
/// on. `work` must not communicate. **Ranks** all. **Host** blocks.
std::vector<std::string> work_together(const JointRanks& ranks, std::string_view operation,
                                       FunctionRef<std::string()> work);

/// Throws on all ranks unless they were given the same path; `paths` are those of all ranks.
void require_same_path(const JointRanks& ranks, std::string_view operation,
                       const std::vector<std::string>& paths);

/// Appends a text with its length, and takes it off again.
void append_sized(std::string& out, std::string_view piece);
std::string_view take_sized(std::string_view& rest);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/joint_work.ipp"
#endif
