// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How Gloo's ranks find each other: the addresses that they listen on, and their
/// exchange in the job's store.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <cstddef>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/library.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail::over_gloo {

/// The part of the job's store in which the ranks of one communicator leave their addresses.
///
/// Each rank sets one value, an address for every other rank, and then waits for and reads those of
/// all. In communicators of up to `most_gathered` ranks setting a value is therefore a gather,
/// which brings all of them. In larger ones that would be too long a message for the store; there a
/// rank reads one value after the other.
class MeetingStore : public ::gloo::rendezvous::Store {
 public:
  using Milliseconds = std::chrono::milliseconds;
  static constexpr std::size_t most_gathered = 128;

  MeetingStore(lockstep::Store& store, std::string prefix, Rank rank, WorldSize world,
               Milliseconds timeout)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), world_(world), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const std::string_view value(data.data(), data.size());
    if (world_.value() > most_gathered || !known_.empty()) {
      store_.set(prefix_ + key, value);
      return;
    }
    const std::string own = store_protocol::Writer{}.text(key).text(value).bytes();
    for (const std::string& piece : store_.gather(prefix_ + "mesh", rank_, world_, own, timeout_)) {
      store_protocol::Reader in(piece);
      std::string name(in.text());
      known_.emplace(std::move(name), in.text());
    }
  }
  std::vector<char> get(const std::string& key) override {
    const std::string& value = find(key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override {
    // Gloo's limit is meant for connecting, not for meeting, and is not used here. It reads what it
    // has waited for: one request does both.
    for (const std::string& key : keys) find(key);
  }

 private:
  const std::string& find(const std::string& key) {
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    return known_.emplace(key, store_.get(prefix_ + key, timeout_)).first->second;
  }

  lockstep::Store& store_;
  std::string prefix_;
  Rank rank_;
  WorldSize world_;
  Milliseconds timeout_;
  std::map<std::string, std::string> known_;
};

/// An address as text, such as `192.168.0.7` or `fe80::1`; empty if it is neither IPv4 nor IPv6.
inline std::string numeric_address(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  const bool is_v4 = address->sa_family == AF_INET;
  if (is_v4 || address->sa_family == AF_INET6) {
    ::getnameinfo(address, is_v4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6), text, sizeof text,
                  nullptr, 0, NI_NUMERICHOST);
  }
  return text;
}

/// The address of a network interface: IPv4 where it has one, and never a link-local IPv6 address,
/// which needs the interface's number beside it.
inline std::string address_of_interface(const std::string& name, Rank rank) {
  ifaddrs* first = nullptr;
  static_cast<void>(::getifaddrs(&first));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> all(first, ::freeifaddrs);
  std::string found;
  std::string names;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr) continue;
    const std::string address = numeric_address(i->ifa_addr);
    if (address.empty() || address.starts_with("fe80:")) continue;
    if (i->ifa_addr->sa_family == AF_INET)
      names += (names.empty() ? "" : ", ") + std::string(i->ifa_name);
    if (name != i->ifa_name) continue;
    if (i->ifa_addr->sa_family == AF_INET) return address;
    if (found.empty()) found = address;
  }
  if (!found.empty()) return found;
  throw Error("Backend<Gloo>", "this host has no interface '" + name + "' with an address",
              "set LOCKSTEP_INTERFACE to one of its own: " + names, rank);
}

/// The address from which this host reaches another one; empty where it does not. Nothing is sent:
/// the kernel is only asked for the route.
inline std::string address_towards(const std::string& host) {
  std::string why;
  const auto addresses = resolve(host, 9, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    const Descriptor fd(::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd || ::connect(fd.get(), a->ai_addr, a->ai_addrlen) != 0) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) continue;
    return numeric_address(reinterpret_cast<const sockaddr*>(&own));
  }
  return "";
}

/// The address that this rank's peers connect to: that of the interface LOCKSTEP_INTERFACE; else
/// the one from which this host reaches the store's host; else, where the store is on this host,
/// the one from which it reaches another rank's host. Ranks of one host meet on loopback. **Ranks**
/// all. **Host** blocks until all have come.
inline std::string listening_address(const Membership& member, Store& store,
                                     const std::string& prefix) {
  const char* const chosen = std::getenv("LOCKSTEP_INTERFACE");
  const bool is_chosen = chosen != nullptr && *chosen != '\0';
  std::string own =
      is_chosen ? address_of_interface(chosen, member.rank) : address_towards(member.host);
  const auto all =
      store.gather(prefix + "addresses", member.rank, member.world, own, member.timeout);
  if (is_chosen || !is_loopback(own)) return own;
  for (const std::string& other : all)
    if (!other.empty() && !is_loopback(other)) return address_towards(other);
  return own;
}

}  // namespace lockstep::detail::over_gloo
