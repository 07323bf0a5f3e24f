// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The handle of an all-reduce of threads.

#include <cstdint>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/backends/threads/member.cuh"

namespace lockstep {

/// An all-reduce under way. Not to be used after its communicator.
class ThreadWork {
 public:
  ThreadWork() = default;  // was done at once
  ThreadWork(threads::Member& member, std::uint64_t ticket, const Call& call)
      : member_(&member), ticket_(ticket), call_(call) {}

  /// Is the result there? **Host** does not block.
  bool test() const { return member_ == nullptr || member_->test(ticket_); }

  /// **Host** blocks until all ranks have made the call, not until it is done. **Stream** the
  /// compute stream waits for the result.
  void wait() {
    if (member_ != nullptr) member_->wait(ticket_, call_);
  }

 private:
  threads::Member* member_ = nullptr;
  std::uint64_t ticket_ = 0;
  Call call_;
};

}  // namespace lockstep
