// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks that exchange over sockets, through a store that their parent hosts.

#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/detail/comm/gloo/communicator.hpp"
#include "lockstep/detail/comm/hierarchical/gloo.hpp"
#include "lockstep/detail/store/server.hpp"
#include "lockstep/detail/store/store.hpp"
#include "ranks.hpp"

namespace ranks {

/// The store listens before there are ranks and answers once they have been started: a parent that
/// forks has no threads.
class Sockets {
 public:
  explicit Sockets(std::size_t)
      : listener_(lockstep::detail::listen_on("127.0.0.1", 0)),
        port_(lockstep::detail::local_port(listener_.get())) {}

  void begin() {
    server_ = std::make_unique<lockstep::detail::StoreServer>(secret, std::move(listener_));
  }

  GlooCommunicator<> join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const Membership member = membership(rank, world, timeout);
    Store store(member.host, member.port, member.secret, 20s);
    return make_gloo_communicator(member, store);
  }

  /// All on one host.
  Membership membership(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    return {rank, world, rank.value(), world.value(), "127.0.0.1", port_, "job", secret, timeout};
  }

 private:
  static constexpr const char* secret = "only this test knows";

  lockstep::detail::Descriptor listener_;
  std::uint16_t port_;
  std::unique_ptr<lockstep::detail::StoreServer> server_;
};

/// Several hosts on one machine, for LOCKSTEP_HOST says so: two where the ranks can be divided in
/// half, else one for each rank.
class EmulatedHosts : public Sockets {
 public:
  using Sockets::Sockets;

  auto join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const std::size_t on_each = world.value() % 2 == 0 ? world.value() / 2 : 1;
    return join_on(rank.value() / on_each, rank, world, timeout);
  }

 protected:
  HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>> join_on(
      std::size_t host, Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    setenv("LOCKSTEP_HOST", std::to_string(host).c_str(), 1);
    const Membership member = membership(rank, world, timeout);
    Store store(member.host, member.port, member.secret, 20s);
    return make_hierarchical_communicator(member, store);
  }
};

}  // namespace ranks
