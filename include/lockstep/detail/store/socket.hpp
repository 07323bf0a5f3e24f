// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file TCP with deadlines. Every socket is non-blocking and close-on-exec.

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/utility.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

inline std::string endpoint_text(const std::string& host, std::uint16_t port) {
  const bool bare_v6 = host.find(':') != std::string::npos;
  return bare_v6 ? text({"[", host, "]:", port}) : text({host, ":", port});
}

/// Tests the text: a lookup of a host's own name often gives 127.0.1.1, but only on that host.
inline bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

/// The addresses of a host, of every interface if it is empty; `why` on failure. No deadline.
inline Addresses resolve(const std::string& host, std::uint16_t port, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int status =
      ::getaddrinfo(host.empty() ? nullptr : host.c_str(), text({port}).c_str(), &hints, &found);
  if (status != 0) {
    why = text({"host ", host, ": ", ::gai_strerror(status)});
    found = nullptr;
  }
  return {found, [](addrinfo* list) { ::freeaddrinfo(list); }};
}

/// Disables Nagle's delay, and detects a vanished host within a minute.
inline void tune_connection(int fd) {
  const auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

/// A listening socket, or the reason in `error`. An empty host is every interface, IPv6 and IPv4.
inline Descriptor try_listen(const std::string& host, std::uint16_t port, int& error) {
  std::string why;
  const auto addresses = resolve(host, port, why);
  error = EADDRNOTAVAIL;
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      if (a->ai_family != family) continue;
      Descriptor fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      if (!fd) {
        error = errno;
        continue;
      }
      const int on = 1;
      const int off = 0;
      ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (family == AF_INET6) {
        ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
      }
      if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) {
        return fd;
      }
      error = errno;
    }
  }
  return {};
}

inline Descriptor listen_on(const std::string& host, std::uint16_t port) {
  int error = 0;
  Descriptor fd = try_listen(host, port, error);
  if (fd) return fd;
  fail("listen",
       {"port ", port, " of ", host.empty() ? "this host" : host.c_str(),
        " cannot be listened on: ", error_text(error)},
       error == EADDRINUSE ? "choose another port, or end the program that has this one"
                           : "give an address of this host and a port it may use");
}

inline std::uint16_t local_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(address).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
}

inline Descriptor accept_now(int listener) {
  Descriptor fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (fd) tune_connection(fd.get());
  return fd;
}

/// On loopback, a client that retries an unused port may get that port and connect to itself.
inline bool is_self_connected(int fd) {
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_size = sizeof here;
  socklen_t there_size = sizeof there;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size);
  ::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size);
  return here_size == there_size && std::memcmp(&here, &there, here_size) == 0;
}

/// One attempt over all addresses of `host`. Empty on failure, with the reason in `why`.
inline Descriptor try_connect(const std::string& host, std::uint16_t port, Deadline deadline,
                              std::string& why) {
  const auto addresses = resolve(host, port, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Descriptor fd(::socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) {
      why = error_text(errno);
      continue;
    }
    int error = ::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      if (!wait_ready(fd.get(), POLLOUT, deadline)) {
        error = ETIMEDOUT;
      } else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
        error = errno;
      }
    }
    if (error == 0 && is_self_connected(fd.get())) error = ECONNREFUSED;
    if (error == 0) {
      tune_connection(fd.get());
      return fd;
    }
    why = error_text(error);
  }
  return {};
}

/// `forged`: the data that came are not the peer's.
enum class Transfer { complete, closed, timed_out, forged };

/// Transfers `size` bytes by `move(done)`, a recv or send. A reset connection counts as closed.
inline Transfer transfer(int fd, short events, std::size_t size, Deadline deadline,
                         FunctionRef<ssize_t(std::size_t done)> move) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = move(done);
    if (n > 0) {
      done += static_cast<std::size_t>(n);
    } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
      return Transfer::closed;
    } else if (errno == EAGAIN && !wait_ready(fd, events, deadline)) {
      return Transfer::timed_out;
    }
  }
  return Transfer::complete;
}

inline Transfer read_exact(int fd, char* data, std::size_t size, Deadline deadline) {
  return transfer(fd, POLLIN, size, deadline,
                  [&](std::size_t done) { return ::recv(fd, data + done, size - done, 0); });
}

/// Never raises SIGPIPE.
inline Transfer write_exact(int fd, const char* data, std::size_t size, Deadline deadline) {
  return transfer(fd, POLLOUT, size, deadline, [&](std::size_t done) {
    return ::send(fd, data + done, size - done, MSG_NOSIGNAL);
  });
}

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
