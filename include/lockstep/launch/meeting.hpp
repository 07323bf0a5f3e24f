// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The steps by which a rank joins its job at a place that is known.

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/launch/placement.hpp"
#include "lockstep/launch/rendezvous_file.hpp"
#include "lockstep/launch/session.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_server.hpp"

namespace lockstep::detail {

/// The store of a job whose launcher has opened none, and the rendezvous file with its address.
struct StoreHost {
  StoreServer server;
  std::optional<RendezvousFile> file = std::nullopt;
};

/// The secret of a rank that lockstep's launcher has started. It comes through a pipe, because an
/// environment is shown in logs and crash reports and is handed on to every program a rank starts.
/// The pipe can be read once; the process remembers.
inline const std::string& inherited_secret(int fd) {
  static const std::string secret = [fd] {
    const Descriptor pipe = inherited_pipe(fd);
    if (!pipe) {
      fail("launch", {"LOCKSTEP_RANK is set but the pipe from the launcher is not there"},
           "unset LOCKSTEP_RANK where a rank starts another lockstep program");
    }
    return read_all(pipe.get());
  }();
  return secret;
}

/// The socket on which rank 0 listens: on loopback, or on every interface if the others were given
/// another name, because that name may lead to any address of this host.
inline Descriptor listen_at(const RankPlacement& place) {
  const std::string host = is_loopback(place.host) ? place.host : "";
  int error = 0;
  std::string ports;
  for (std::uint16_t port : place.ports) {
    if (Descriptor listener = try_listen(host, port, error)) return listener;
    ports += text({ports.empty() ? "" : ", ", port});
  }
  fail("join", {"rank 0 cannot open the job's store on port ", ports, ": ", error_text(error)},
       "choose another port (MASTER_PORT or --rendezvous), or end what uses it", place.rank);
}

/// Ranks introduce themselves through the store when they join. It ends when all have come.
inline void introduce(Store& store, Membership& member, bool knows_local_ranks) {
  const std::string rank = text({member.rank});
  const std::string world = text({member.world});
  const std::string first_world = store.compare_set("lockstep/world", "", world);
  if (first_world != world) {
    fail("join", {"this rank was told of a world of ", world, ", another one of ", first_world},
         "start all ranks of a job with the same world size", member.rank);
  }
  if (store.add(text({"lockstep/joined/", rank}), 1) != 1) {
    fail("join", {"another process has joined as rank ", rank},
         "give every rank its own number, and every job its own port, file or run id", member.rank);
  }
  if (member.job.empty()) member.job = store.compare_set("lockstep/job", "", random_id());
  const std::string here = host_identity();
  const std::vector<std::string> hosts =
      store.gather("rendezvous", member.rank, member.world, here, member.timeout);
  if (knows_local_ranks) return;
  member.local_rank = member.local_world = 0;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] != here) continue;
    if (r < member.rank.value()) ++member.local_rank;
    ++member.local_world;
  }
}

/// How often this process has joined at this place as this rank before. A rank that joins again
/// must not meet the store of its earlier job, which waits until all ranks have left it; so each
/// join has a secret of its own, which the earlier store does not know.
inline std::size_t earlier_joins(const RankPlacement& place) {
  static std::mutex mutex;
  static std::map<std::string, std::size_t> joins;
  const std::lock_guard lock(mutex);
  return joins[text({place.rank, " ", place.host, ":", place.ports.front()})]++;
}

/// How many clients the store of a place will have: each rank, or each thread of it, is one.
inline std::size_t clients_of(const RankPlacement& place) {
  return place.world.value() * place.threads;
}

/// Completes a place: reads the secret, and opens the store if that is this process's part.
inline std::unique_ptr<StoreHost> settle_at(RankPlacement& place) {
  check_placement(place);
  if (place.secret_fd >= 0) place.secret = inherited_secret(place.secret_fd);
  if (!place.hosted && place.world > WorldSize{1}) {
    if (const std::size_t earlier = earlier_joins(place)) place.secret += text({"/", earlier});
  }
  if (place.hosted || place.rank != Rank{0}) return nullptr;
  std::unique_ptr<StoreHost> host(
      new StoreHost{StoreServer(place.secret, listen_at(place), clients_of(place))});
  place.ports = {host->server.port()};
  // This is its own host, whatever name the others use.
  if (!is_loopback(place.host)) place.host = "127.0.0.1";
  return host;
}

/// Meets the others as one of the ranks of a place. Ranks find out which are local if it does not
/// say.
inline Session meet_at(const RankPlacement& place, Membership member,
                       std::unique_ptr<StoreHost> host = nullptr) {
  try {
    Store store(place.host, place.ports, place.secret, member.timeout);
    member.port = store.port();
    introduce(store, member, place.local_world > 0);
    return Session(std::move(member), std::move(store), std::move(host));
  } catch (const Error& error) {
    throw error.on(member.rank);
  }
}

/// Joins the job at a place.
/// Ranks: all must call. Host: blocks until all have come. Stream: none.
inline Session join_at(RankPlacement place, std::chrono::milliseconds timeout = default_timeout) {
  const std::string name = place.host;
  std::unique_ptr<StoreHost> host = settle_at(place);
  Membership member{place.rank, place.world,  place.local_rank, place.local_world, name, 0,
                    place.job,  place.secret, timeout};
  return meet_at(place, std::move(member), std::move(host));
}

/// The place of a rank that the program itself has chosen.
inline RankPlacement chosen_place(Rank rank, WorldSize world) {
  RankPlacement place;
  place.launcher = "the program";
  place.rank = rank;
  place.world = world;
  return place;
}

/// Joins through a file; see `RendezvousFile`.
inline Session join_by_file(std::string_view method, Rank rank, WorldSize world,
                            std::chrono::milliseconds timeout) {
  const auto [path, name] = RendezvousFile::parse(method);
  RankPlacement place = chosen_place(rank, world);
  check_placement(place);
  if (rank != Rank{0}) {
    const RendezvousFile::Contents found = RendezvousFile::wait(path, rank, timeout);
    place.host = found.host;
    place.ports = {found.port};
    place.secret = found.secret;
    place.hosted = true;  // by rank 0, which has made up the secret of this join
    return join_at(place, timeout);
  }
  RendezvousFile::check_unused(path);
  const std::string secret = random_id();
  std::unique_ptr<StoreHost> host(
      new StoreHost{StoreServer(secret, is_loopback(name) ? name : "", 0, world.value())});
  const std::uint16_t port = host->server.port();
  host->file.emplace(path, RendezvousFile::Contents{name, port, secret});
  Store store(is_loopback(name) ? name : "127.0.0.1", port, secret, timeout);
  Membership member{rank, world, 0, 0, name, port, "", secret, timeout};
  introduce(store, member, false);
  return Session(std::move(member), std::move(store), std::move(host));
}

}  // namespace lockstep::detail

#include "lockstep/launch/rendezvous.hpp"  // defines what is declared in session.hpp
