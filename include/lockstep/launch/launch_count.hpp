// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which call of `launch` a process is in.

#include <atomic>
#include <cstddef>

namespace lockstep::detail {

/// The calls of `launch` in this process, while each lasts. A program may call it several times,
/// one after the other. lockstep's launcher runs the whole program on every rank and tells it the
/// number of the one call that it started ranks for; the rank leaves all others out.
class LaunchCount {
 public:
  LaunchCount() : number_(++all()) { ++under_way(); }
  ~LaunchCount() { --under_way(); }
  LaunchCount(const LaunchCount&) = delete;
  LaunchCount& operator=(const LaunchCount&) = delete;

  /// From 1.
  std::size_t number() const { return number_; }

  static bool is_under_way() { return under_way() != 0; }

 private:
  static std::atomic<std::size_t>& all() {
    static std::atomic<std::size_t> count = 0;
    return count;
  }
  static std::atomic<std::size_t>& under_way() {
    static std::atomic<std::size_t> count = 0;
    return count;
  }

  std::size_t number_;
};

}  // namespace lockstep::detail
