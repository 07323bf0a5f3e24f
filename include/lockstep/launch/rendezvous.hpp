// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks meet: rank 0 opens the store unless the launcher has, all connect, agree on their
/// numbers, and leave together.

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

namespace detail {
struct StoreHost;
}

/// A rank's membership in a job, while it lasts. The destructor of the rank that hosts the store
/// waits until all others have gone, at most for the job's time limit. When an exception ends the
/// rank it does not wait, so that the others notice.
class Session {
 public:
  Session(Membership membership, Store store);
  Session(Membership membership, Store store, std::unique_ptr<detail::StoreHost> host);
  Session(Session&&) noexcept;
  Session& operator=(Session&&) = delete;
  ~Session();

  const Membership& membership() const { return membership_; }
  Rank rank() const { return membership_.rank; }
  WorldSize world() const { return membership_.world; }
  Store& store() { return *store_; }

  /// The program's arguments without those that were the launcher's, where `launch` was given any.
  const std::vector<std::string>& arguments() const { return arguments_; }
  void set_arguments(std::vector<std::string> arguments);

 private:
  Membership membership_;
  std::vector<std::string> arguments_;
  int exceptions_;  // under way when this session began
  std::unique_ptr<detail::StoreHost> host_;
  std::unique_ptr<Store> store_;
};

namespace detail {

/// A world of one: a rank with a store that no other process uses.
Session join_alone(std::chrono::milliseconds timeout = default_timeout);

}  // namespace detail

/// Joins as PyTorch's init_process_group does: `env://` (MASTER_ADDR, MASTER_PORT),
/// `tcp://host:port`, where rank 0 is or will be, or `file:///path`, which all ranks can reach.
/// Ranks: all must call. Host: blocks until all have come. Stream: none.
Session join(std::string_view init_method, Rank rank, WorldSize world,
             std::chrono::milliseconds timeout = default_timeout);

/// Joins as the rank that the environment says this process is; alone where it says nothing.
Session join(std::chrono::milliseconds timeout = default_timeout);

namespace detail {

/// A text that differs between hosts. It joins boot id and name, because containers share a boot id
/// and hosts can share a name. LOCKSTEP_HOST replaces it.
std::string host_identity();

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/launch/rendezvous.ipp"
#endif
