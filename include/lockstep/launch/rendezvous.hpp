// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks meet: rank 0 opens the store unless the launcher has, all connect, agree on who they
/// are, and leave together.

#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/rendezvous_file.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// A rank's membership in a job, while it lasts. The one that hosts the store stays in its
/// destructor until all others have gone, as long as the job's time limit at most, and not at all
/// when an exception ends it: then the others are to notice.
class Session {
 public:
  Session(Membership membership, Store store, std::unique_ptr<StoreServer> server = nullptr,
          std::optional<RendezvousFile> file = std::nullopt)
      : membership_(std::move(membership)),
        file_(std::move(file)),
        server_(std::move(server)),
        store_(std::make_unique<Store>(std::move(store))) {}

  Session(Session&&) = default;
  Session& operator=(Session&&) = delete;

  ~Session() {
    store_.reset();
    if (server_ && world() > WorldSize{1} && std::uncaught_exceptions() == exceptions_) {
      server_->wait_until_unused(Deadline::after(membership_.timeout));
    }
  }

  const Membership& membership() const { return membership_; }
  Rank rank() const { return membership_.rank; }
  WorldSize world() const { return membership_.world; }
  Store& store() { return *store_; }

  /// The program's arguments without those that were the launcher's, where `launch` was given any.
  const std::vector<std::string>& arguments() const { return arguments_; }
  void set_arguments(std::vector<std::string> arguments) { arguments_ = std::move(arguments); }

 private:
  Membership membership_;
  std::vector<std::string> arguments_;
  int exceptions_ = std::uncaught_exceptions();
  std::optional<RendezvousFile> file_;
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<Store> store_;
};

/// The secret of a rank that lockstep's launcher has started. It comes through a pipe, because an
/// environment is shown in logs and crash reports and is handed on to every program a rank starts.
/// The pipe can be read once; the process remembers.
inline const std::string& inherited_secret(int fd) {
  static const std::string secret = [fd] {
    const Descriptor pipe = inherited_pipe(fd);
    if (!pipe) {
      throw Error("launch", "LOCKSTEP_RANK is set but the pipe from the launcher is not there",
                  "unset LOCKSTEP_RANK where a rank starts another lockstep program");
    }
    return read_all(pipe.get());
  }();
  return secret;
}

/// Where rank 0 listens: on loopback, unless the others were told to look elsewhere. Then on every
/// interface, because the name by which they know this host may lead anywhere on this host.
inline std::unique_ptr<StoreServer> open_store(const RankPlacement& place) {
  const std::string host = is_loopback(place.host) ? place.host : "";
  int error = 0;
  for (std::uint16_t port : place.ports) {
    if (Descriptor listener = try_listen(host, port, error)) {
      return std::make_unique<StoreServer>(place.secret, std::move(listener));
    }
  }
  std::string ports;
  for (std::uint16_t port : place.ports)
    ports += (ports.empty() ? "" : ", ") + std::to_string(port);
  throw Error("join",
              "rank 0 cannot open the job's store on port " + ports + ": " + error_text(error),
              "choose another port (MASTER_PORT or --rendezvous), or end what uses it", place.rank);
}

/// What tells one host from another: containers share a boot id, hosts can share a name. Where that
/// is not how ranks should be told apart, LOCKSTEP_HOST says which host a rank is on.
inline std::string host_identity() {
  if (const char* const told = std::getenv("LOCKSTEP_HOST"); told != nullptr && *told != '\0')
    return told;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return std::string(name) + " " + boot;
}

/// The conversation of all ranks once the store is there. It ends when everyone has come.
inline void introduce(Store& store, Membership& member, bool knows_local_ranks) {
  const std::string rank = std::to_string(member.rank.value());
  const std::string world = std::to_string(member.world.value());
  const std::string first_world = store.compare_set("lockstep/world", "", world);
  if (first_world != world) {
    throw Error("join",
                "this rank was told of a world of " + world + ", another one of " + first_world,
                "start all ranks of a job with the same world size", member.rank);
  }
  if (store.add("lockstep/joined/" + rank, 1) != 1) {
    throw Error("join", "another process has joined as rank " + rank,
                "give every rank its own number, and every job its own port, file or run id",
                member.rank);
  }
  if (member.job.empty()) member.job = store.compare_set("lockstep/job", "", random_id());
  if (!knows_local_ranks) store.set("lockstep/host/" + rank, host_identity());
  store.barrier("rendezvous", member.rank, member.world, member.timeout);
  if (knows_local_ranks) return;
  const std::string here = host_identity();
  member.local_rank = member.local_world = 0;
  for (std::size_t r = 0; r < member.world.value(); ++r) {
    if (store.get("lockstep/host/" + std::to_string(r)) != here) continue;
    if (r < member.rank.value()) ++member.local_rank;
    ++member.local_world;
  }
}

/// What a process finds at its place: the secret, and the store if it is the one that opens it.
inline std::unique_ptr<StoreServer> settle_at(RankPlacement& place) {
  check_placement(place);
  if (place.secret_fd >= 0) place.secret = inherited_secret(place.secret_fd);
  if (place.hosted || place.rank != Rank{0}) return nullptr;
  std::unique_ptr<StoreServer> server = open_store(place);
  place.ports = {server->port()};
  // Its own host, by whatever name the others know it.
  if (!is_loopback(place.host)) place.host = "127.0.0.1";
  return server;
}

/// Meets the others as one of the ranks of a place. Where the place says nothing of local ranks,
/// neither does `member`: they find out.
inline Session meet_at(const RankPlacement& place, Membership member,
                       std::unique_ptr<StoreServer> server = nullptr) {
  try {
    Store store(place.host, place.ports, place.secret, member.timeout);
    member.port = store.port();
    introduce(store, member, place.local_world > 0);
    return Session(std::move(member), std::move(store), std::move(server));
  } catch (const Error& error) {
    throw error.on(member.rank);
  }
}

/// Joins the job at a place.
/// Ranks: all must call. Host: blocks until all have come. Stream: none.
inline Session join(RankPlacement place, std::chrono::milliseconds timeout = default_timeout) {
  const std::string host = place.host;
  std::unique_ptr<StoreServer> server = settle_at(place);
  Membership member{place.rank, place.world,  place.local_rank, place.local_world, host, 0,
                    place.job,  place.secret, timeout};
  return meet_at(place, std::move(member), std::move(server));
}

/// A world of one: a rank with a store that nobody else will use.
inline Session join_alone(std::chrono::milliseconds timeout = default_timeout) {
  RankPlacement place;
  place.launcher = "the program";
  place.world = WorldSize{1};
  place.local_world = 1;
  place.ports = {0};
  place.secret = random_id();
  return join(place, timeout);
}

/// Joins through a file; see `RendezvousFile`.
inline Session join_by_file(std::string_view text, Rank rank, WorldSize world,
                            std::chrono::milliseconds timeout) {
  const auto [path, host] = RendezvousFile::parse(text);
  RankPlacement place;
  place.launcher = "the program";
  place.rank = rank;
  place.world = world;
  check_placement(place);
  if (rank != Rank{0}) {
    RendezvousFile::Contents found = RendezvousFile::wait(path, rank, timeout);
    place.host = found.host;
    place.ports = {found.port};
    place.secret = found.secret;
    return join(place, timeout);
  }
  RendezvousFile::check_unused(path);
  const std::string secret = random_id();
  auto server = std::make_unique<StoreServer>(secret, is_loopback(host) ? host : "");
  RendezvousFile file(path, {host, server->port(), secret});
  Store store(is_loopback(host) ? host : "127.0.0.1", server->port(), secret, timeout);
  Membership member{rank, world, 0, 0, host, server->port(), "", secret, timeout};
  introduce(store, member, false);
  return Session(std::move(member), std::move(store), std::move(server), std::move(file));
}

/// Joins as PyTorch's init_process_group does: `env://` (MASTER_ADDR, MASTER_PORT),
/// `tcp://host:port`, where rank 0 is or will be, or `file:///path`, which all ranks can reach.
/// Ranks: all must call. Host: blocks until all have come. Stream: none.
inline Session join(std::string_view init_method, Rank rank, WorldSize world,
                    std::chrono::milliseconds timeout = default_timeout) {
  if (init_method == "env://") return join(environment().meeting_place(rank, world), timeout);
  if (init_method.starts_with("file://")) {
    return join_by_file(init_method.substr(7), rank, world, timeout);
  }
  if (init_method.starts_with("tcp://")) {
    const Endpoint store = parse_endpoint("the init method", init_method.substr(6));
    RankPlacement place;
    place.launcher = "the program";
    place.rank = rank;
    place.world = world;
    place.host = store.host;
    place.ports = {store.port};
    place.secret = derived_secret("", store.port, environment().secret());
    return join(place, timeout);
  }
  throw Error("join", "'" + std::string(init_method) + "' is not an init method",
              "use env://, tcp://host:port or file:///path", rank);
}

/// Joins as whoever the environment says this process is; alone where it says nothing.
inline Session join(std::chrono::milliseconds timeout = default_timeout) {
  auto place = environment().placement();
  return place ? join(*std::move(place), timeout) : join_alone(timeout);
}

}  // namespace lockstep
