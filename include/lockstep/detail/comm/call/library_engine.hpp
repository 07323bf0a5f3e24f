// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The common base of the engines of Gloo, MPI and NCCL.

#include "lockstep/detail/comm/call/watchdog.hpp"

namespace lockstep::detail {

/// One rank's end of a communicator that a library connects: what the engines of all libraries
/// have.
class LibraryEngine {
 public:
  Rank rank() const { return member_.rank; }
  std::size_t world() const { return member_.world.value(); }
  const Membership& member() const { return member_; }
  /// Unique in the job, the same on all ranks.
  const std::string& name() const { return name_; }
  Milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Milliseconds timeout) { timeout_.store(timeout, std::memory_order_relaxed); }
  PendingCalls& pending() { return pending_; }
  bool is_broken() const { return pending_.is_broken(); }
  /// The name of the next communicator that is made of this one's ranks.
  std::string next_group_name(std::size_t group) {
    return text({name_, "/", groups_++, ".", group});
  }
  /// This rank's membership in another communicator.
  Membership beside(Rank rank, WorldSize world) const {
    Membership member = in_group(member_, rank, world);
    member.timeout = timeout();
    return member;
  }

 protected:
  LibraryEngine(std::string_view backend, const Membership& member, std::string name)
      : member_(member),
        name_(std::move(name)),
        timeout_(member.timeout),
        pending_(backend, group_member(member, name_)) {}

  /// Names the ranks that are not there; if all are, the network is late.
  Error time_is_over(const Call& call, const std::vector<std::string>& missing) const {
    return detail::time_is_over(
        call.text(), timeout(),
        missing.empty() ? std::string("the network; all ranks are there") : listed_ranks(missing),
        rank());
  }

  Membership member_;
  std::string name_;
  std::atomic<Milliseconds> timeout_;
  PendingCalls pending_;

 private:
  std::size_t groups_ = 0;
};

}  // namespace lockstep::detail
