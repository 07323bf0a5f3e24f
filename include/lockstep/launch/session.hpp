// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's membership in a job. `rendezvous.ipp` has its definitions.

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/program_options.hpp"
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
  /// Options are asked for before the store is first used, as groups use it.
  Store& store() {
    if (!options_.is_left_to_job()) options_.close(ProgramOptions::Readers::some);
    return *store_;
  }

  /// An option of the program's own: `session.option("updates", 60)` is 60, or what follows
  /// `--updates`. See `ProgramOptions::option`.
  template <class T>
  auto option(std::string_view name, T otherwise, std::string_view help = {}) {
    return options_.option(name, otherwise, help);
  }
  /// The program's words that no option has taken, its name first, without the launcher's options
  /// and without `--`.
  const std::vector<std::string>& arguments() const { return options_.arguments(); }
  ProgramOptions& options() { return options_; }
  /// `arguments` are what the launcher has left: the program's name first, and `--` where it was
  /// given.
  void set_arguments(const std::vector<std::string>& arguments, bool asks_for_help = false);

 private:
  Membership membership_;
  ProgramOptions options_;
  detail::EndOfScope scope_;
  std::unique_ptr<detail::StoreHost> host_;
  std::unique_ptr<Store> store_;
};

}  // namespace lockstep
