// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's membership in a job. `rendezvous.ipp` has its definitions.

#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/end_of_scope.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

namespace detail {

struct StoreHost;

/// A text that differs between hosts. It joins boot id and name, because containers share a boot id
/// and hosts can share a name. LOCKSTEP_HOST replaces it.
std::string host_identity();

}  // namespace detail

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
  detail::EndOfScope scope_;
  std::unique_ptr<detail::StoreHost> host_;
  std::unique_ptr<Store> store_;
};

}  // namespace lockstep
