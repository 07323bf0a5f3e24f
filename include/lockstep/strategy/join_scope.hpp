// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `auto joined = ddp.join();`: the scope of a hand-written loop whose batches may end
/// earlier on some ranks.

#include <cstdio>
#include <exception>

namespace lockstep::detail {

/// Ends with `finish`, or with its scope: this rank then answers the others until no rank has a
/// batch. An exception that ends the scope is a failure of this rank, which answers nobody.
template <class Ddp>
class [[nodiscard(
    "the scope ends at once unless it has a name: auto joined = ddp.join();")]] JoinScope {
 public:
  explicit JoinScope(Ddp& ddp) : ddp_(ddp) { ddp.begin_join(); }
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  /// A destructor cannot throw: what fails here is printed, and the next call of the wrapper fails
  /// with the same words.
  ~JoinScope() {
    if (!ddp_.is_joining()) return;
    if (std::uncaught_exceptions() > at_first_) {
      ddp_.leave_join();
      return;
    }
    try {
      finish();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
  }

  /// This rank has no more batches. **Ranks** all, each when it is through. **Host** blocks until
  /// all are. `after_update()`, if it is given, is called after each step that is made here.
  template <class... F>
  void finish(const F&... after_update) {
    ddp_.finish_join(after_update...);
  }

 private:
  Ddp& ddp_;
  int at_first_ = std::uncaught_exceptions();
};

}  // namespace lockstep::detail
