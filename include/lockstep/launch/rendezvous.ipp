// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `rendezvous.hpp`.

#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/environment.hpp"
#include "lockstep/launch/launch_count.hpp"
#include "lockstep/launch/meeting.hpp"
#include "lockstep/launch/rendezvous.hpp"

namespace lockstep {

LOCKSTEP_INLINE Session::Session(Membership membership, Store store)
    : Session(std::move(membership), std::move(store), nullptr) {}

LOCKSTEP_INLINE Session::Session(Membership membership, Store store,
                                 std::unique_ptr<detail::StoreHost> host)
    : membership_(std::move(membership)),
      host_(std::move(host)),
      store_(std::make_unique<Store>(std::move(store))) {}

LOCKSTEP_INLINE Session::Session(Session&&) noexcept = default;

LOCKSTEP_INLINE Session::~Session() {
  store_.reset();
  if (host_ && world() > WorldSize{1} && !scope_.is_failure()) {
    host_->server.wait_until_unused(detail::Deadline::after(membership_.timeout));
  }
}

LOCKSTEP_INLINE void Session::set_arguments(const std::vector<std::string>& arguments,
                                            bool asks_for_help) {
  options_ = ProgramOptions(arguments, rank() == Rank{0}, asks_for_help);
}

namespace detail {

LOCKSTEP_INLINE Session join_alone(std::chrono::milliseconds timeout) {
  RankPlacement place = chosen_place(Rank{0}, WorldSize{1});
  place.local_world = 1;
  place.ports = {0};
  place.secret = random_id();
  return join_at(std::move(place), timeout);
}

}  // namespace detail

LOCKSTEP_INLINE Session join(std::string_view init_method, Rank rank, WorldSize world,
                             std::chrono::milliseconds timeout) {
  if (init_method == "env://") {
    return detail::join_at(detail::environment().meeting_place(rank, world), timeout);
  }
  if (init_method.starts_with("file://")) {
    return detail::join_by_file(init_method.substr(7), rank, world, timeout);
  }
  if (init_method.starts_with("tcp://")) {
    const auto store = detail::parse_endpoint("the init method", init_method.substr(6));
    detail::RankPlacement place = detail::chosen_place(rank, world);
    place.host = store.host;
    place.ports = {store.port};
    place.secret = detail::derived_secret("", store.port, detail::environment().secret());
    return detail::join_at(std::move(place), timeout);
  }
  detail::fail("join", {"'", init_method, "' is not an init method"},
               "use env://, tcp://host:port or file:///path", rank);
}

LOCKSTEP_INLINE Session join(std::chrono::milliseconds timeout) {
  if (detail::LaunchCount::is_under_way()) {
    throw Error("join", "launch has joined this process to its job already",
                "inside launch use the session that it gives: ProcessGroup group(session)");
  }
  auto place = detail::environment().placement();
  if (place) return detail::join_at(*std::move(place), timeout);
  // The words of a command line end with zeros.
  const std::string words = '\0' + detail::read_file("/proc/self/cmdline");
  if (words.find(std::string_view("\0--ranks", 8)) != std::string::npos) {
    throw Error("join", "the program was given --ranks, and only launch starts ranks",
                "call launch(argc, argv, f) in main, or start the program with torchrun, mpirun or "
                "srun");
  }
  return detail::join_alone(timeout);
}

namespace detail {

LOCKSTEP_INLINE std::string host_identity() {
  if (const char* const told = std::getenv("LOCKSTEP_HOST"); told != nullptr && *told != '\0')
    return told;
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  const std::string boot = read_file("/proc/sys/kernel/random/boot_id");
  return text({name, " ", std::string_view(boot).substr(0, boot.find('\n'))});
}

}  // namespace detail

}  // namespace lockstep
