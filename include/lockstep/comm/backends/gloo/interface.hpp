// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which of a host's addresses its ranks listen on.

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::over_gloo {

/// An address as text, such as `192.168.0.7` or `fe80::1`; empty if it is neither IPv4 nor IPv6.
inline std::string numeric_address(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET) {
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text,
                sizeof text);
  } else if (address->sa_family == AF_INET6) {
    ::inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text,
                sizeof text);
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
