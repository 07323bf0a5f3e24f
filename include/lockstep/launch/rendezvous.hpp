// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A rank's membership in a job, and how ranks meet: rank 0 opens the store unless the
/// launcher has, all connect, agree on their numbers, and leave together.

#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/program_options.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// How long ranks wait for each other unless they are told otherwise.
inline constexpr std::chrono::milliseconds default_timeout{300'000};

/// A rank's place in its job: its number, the world, and where the store is.
struct Membership {
  Rank rank;
  WorldSize world;
  /// This rank's place among the ranks of its host, and how many those are.
  std::size_t local_rank = 0;
  std::size_t local_world = 1;
  /// Where the job's store listens.
  std::string host = "127.0.0.1";
  std::uint16_t port = 0;
  /// The job's id, which keeps jobs on one host apart. It can be part of a file name.
  std::string job{};
  /// The secret that a client of the store must know.
  std::string secret{};
  /// The time limit of rendezvous, and of collectives without another limit.
  std::chrono::milliseconds timeout{default_timeout};
  /// How many of the job's ranks are threads of this process, neighbours by number.
  std::size_t process_ranks = 1;
};

namespace detail {
struct StoreHost;
}

/// A rank's membership in a job, while it lasts. The destructor of the rank that hosts the store
/// waits until all others have gone, at most for the job's time limit. When an exception ends the
/// rank it does not wait, so that the others notice.
class Session {
 public:
  /// `host` is the job's store, where this process has it.
  Session(Membership membership, Store store, std::shared_ptr<detail::StoreHost> host = nullptr)
      : membership_(std::move(membership)), host_(std::move(host)), store_(std::move(store)) {}
  Session(Session&&) noexcept = default;
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
  void set_arguments(const std::vector<std::string>& arguments, bool asks_for_help = false) {
    options_ = ProgramOptions(arguments, rank() == Rank{0}, asks_for_help);
  }

 private:
  Membership membership_;
  ProgramOptions options_;
  detail::EndOfScope scope_;
  std::shared_ptr<detail::StoreHost> host_;
  std::optional<Store> store_;
};

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

/// `name` and a number, from 1: the second communicator of one name must not find the keys of the
/// first. Each rank counts its own meetings; all ranks make communicators of one name in the same
/// order.
inline std::string numbered_meeting(Store& store, Rank rank, std::string_view backend,
                                    std::string_view name) {
  const std::string counter = text({"lockstep/", backend, "/", name, "/joined/", rank.value()});
  return text({name, ".", static_cast<std::size_t>(store.add(counter, 1))});
}

/// A world of one: a rank with a store that no other process uses.
Session join_alone(std::chrono::milliseconds timeout = default_timeout);

}  // namespace detail

}  // namespace lockstep
