// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `auto joined = ddp.join();`: the scope of a hand-written loop whose batches may end
/// earlier on some ranks.

#include <cstdio>
#include <exception>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

/// Nothing is called after an update.
struct NoUpdateCall {
  constexpr void operator()() const {}
};

/// Ends with `finish`, or with its scope: this rank then answers the others until no rank has a
/// batch. An exception that ends the scope is a failure of this rank, which answers nobody.
/// `after_update()` is called after each step that is made here.
template <class Ddp, class AfterUpdate = NoUpdateCall>
class [[nodiscard(
    "the scope ends at once unless it has a name: auto joined = ddp.join();")]] JoinScope {
 public:
  explicit JoinScope(Ddp& ddp, AfterUpdate after_update = {})
      : ddp_(ddp), after_update_(std::move(after_update)) {
    ddp.begin_join();
  }
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
  /// all are.
  void finish() { ddp_.finish_join(after_update_); }
  /// The same with another function that is called after each step.
  template <class F>
    requires std::is_same_v<AfterUpdate, NoUpdateCall>
  void finish(const F& after_update) {
    ddp_.finish_join(after_update);
  }

 private:
  Ddp& ddp_;
  [[no_unique_address]] AfterUpdate after_update_;
  int at_first_ = std::uncaught_exceptions();
};

}  // namespace lockstep::detail
