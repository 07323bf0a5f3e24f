// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Membership in a job, and the rendezvous through the store of rank 0 or the launcher.

#include "lockstep/detail/launch/program_options.hpp"
#include "lockstep/detail/store/store.hpp"

namespace lockstep {

/// How long ranks wait for each other by default.
inline constexpr std::chrono::milliseconds default_timeout{300'000};

/// A rank's placement in its job, and the address of the store.
struct Membership {
  Rank rank;
  WorldSize world;
  std::size_t local_rank = 0;      ///< among the ranks of its host
  std::size_t local_world = 1;     ///< the number of ranks of its host
  std::string host = "127.0.0.1";  ///< the address of the job's store
  std::uint16_t port = 0;
  std::string job{};     ///< the job's id, which is unique and can be part of a file name
  std::string secret{};  ///< that clients of the store have to know
  /// The time limit of the rendezvous, and of collectives without a limit of their own.
  std::chrono::milliseconds timeout{default_timeout};
  /// How many of the job's ranks are threads of this process, with consecutive numbers.
  std::size_t process_ranks = 1;
  /// The GPUs of the host's ranks, by local rank; where none are chosen, GPU i is local rank i's.
  std::vector<std::size_t> devices{};
  std::optional<Rank> job_rank{};  ///< of a member of a group, whose `rank` is its number there
};

namespace detail {
struct StoreHost;

inline Membership as_rank(Membership member, Rank rank, WorldSize world) {
  member.rank = rank;
  member.world = world;
  return member;
}
/// The rank as a member of a group, or of another communicator, of its job.
inline Membership in_group(const Membership& member, Rank rank, WorldSize world) {
  Membership own = as_rank(member, rank, world);
  own.job_rank = member.job_rank.value_or(member.rank);
  return own;
}
}  // namespace detail

/// RAII membership of a rank in a job. The destructor on the rank that hosts the store waits until
/// all others have left, at most for the job's time limit, unless a failure unwinds it.
class Session {
 public:
  Session(Membership membership, Store store, std::shared_ptr<detail::StoreHost> host = nullptr)
      : membership_(std::move(membership)), host_(std::move(host)), store_(std::move(store)) {}
  Session(Session&&) noexcept = default;
  Session& operator=(Session&&) = delete;
  ~Session();

  const Membership& membership() const { return membership_; }
  /// Chooses GPUs as `--devices` does: local rank i has the i-th. All ranks of a host give the same
  /// list, before they make groups or jobs of this session.
  void set_devices(std::vector<std::size_t> devices) { membership_.devices = std::move(devices); }
  Rank rank() const { return membership_.rank; }
  WorldSize world() const { return membership_.world; }
  /// The first use ends the reading of options, unless a job does that.
  Store& store() {
    if (!options_.is_left_to_job()) options_.close(ProgramOptions::Readers::some);
    return *store_;  // NOLINT(bugprone-unchecked-optional-access): a joined session has one
  }

  /// `session.option("updates", 60)` is the value of `--updates`, or 60. See `ProgramOptions`.
  template <class T>
  auto option(std::string_view name, T otherwise, std::string_view help = {}) {
    return options_.option(name, otherwise, help);
  }
  /// The program's name and the arguments that no option has taken, without `--`.
  const std::vector<std::string>& arguments() const { return options_.arguments(); }
  ProgramOptions& options() { return options_; }
  /// `arguments` are what the launcher has left: the program's name, and `--` where it was given.
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

/// Joins as PyTorch's init_process_group: `env://` (MASTER_ADDR, MASTER_PORT), `tcp://host:port` of
/// rank 0, or `file:///path`. **Ranks** all. **Host** blocks until all join. **Stream** none.
Session join(std::string_view init_method, Rank rank, WorldSize world,
             std::chrono::milliseconds timeout = default_timeout);

/// Joins as the rank that the environment describes; as a world of one where it describes none.
Session join(std::chrono::milliseconds timeout = default_timeout);

namespace detail {

/// Unique to a host: its name (containers share a boot id) and boot id, or LOCKSTEP_HOST.
std::string host_identity();

/// `name` with a number from 1, so that the second communicator of one name does not find the keys
/// of the first. Ranks count separately: all create communicators of one name in the same order.
inline std::string numbered_rendezvous(Store& store, Rank rank, std::string_view backend,
                                       std::string_view name) {
  const std::string counter = text({"lockstep/", backend, "/", name, "/joined/", rank.value()});
  return text({name, ".", static_cast<std::size_t>(store.add(counter, 1))});
}

/// A world of one, with a private store.
Session join_alone(std::chrono::milliseconds timeout = default_timeout);

}  // namespace detail

}  // namespace lockstep
