// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `late_failure.hpp`.

#include <cstddef>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/late_failure.hpp"

namespace lockstep::detail {

/// The failures that were told and not taken, for all `LateFailures` of this process.
struct ToldFailures {
  std::mutex mutex;
  std::size_t listeners = 0;
  std::vector<LateFailure> told;
};

LOCKSTEP_INLINE ToldFailures& told_failures() {
  // Never destroyed: objects of static storage tell of failures as late as that.
  static ToldFailures& all = *new ToldFailures;
  return all;
}

/// Prints a failure in one piece, with its rank.
LOCKSTEP_INLINE void print_late_failure(const LateFailure& failure) {
  const std::string whose = failure.rank ? text({"rank ", *failure.rank, ": "}) : std::string();
  std::string line;
  try {
    std::rethrow_exception(failure.thrown);
  } catch (const Error& error) {
    line = error.rank() || !failure.rank ? error.what() : error.on(*failure.rank).what();
  } catch (const std::exception& error) {
    line = text({"lockstep: ", whose, error.what()});
  } catch (...) {
    line = text({"lockstep: ", whose, "an exception that is no std::exception"});
  }
  std::fputs(text({line, "\n"}).c_str(), stderr);
}

LOCKSTEP_INLINE void tell_late_failure(const LateFailure& failure) noexcept {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (all.listeners != 0) {
    all.told.push_back(failure);
  } else {
    print_late_failure(failure);
  }
}

LOCKSTEP_INLINE LateFailures::LateFailures() {
  const std::lock_guard lock(told_failures().mutex);
  ++told_failures().listeners;
}

LOCKSTEP_INLINE LateFailures::~LateFailures() {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (--all.listeners != 0) return;
  for (const LateFailure& failure : all.told) print_late_failure(failure);
  all.told.clear();
}

LOCKSTEP_INLINE std::optional<LateFailure> LateFailures::take() {
  ToldFailures& all = told_failures();
  const std::lock_guard lock(all.mutex);
  if (all.told.empty()) return std::nullopt;
  LateFailure first = all.told.front();
  all.told.erase(all.told.begin());
  return first;
}

}  // namespace lockstep::detail
