// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's server: one thread around poll(), which no client can stop or crash.

#include <sys/eventfd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/random.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_protocol.hpp"
#include "lockstep/launch/store_table.hpp"

namespace lockstep::detail {

/// Serves keys and values to clients that know the secret. It listens on loopback unless told
/// otherwise; an empty host means every interface, port 0 a free one.
///
/// A connection has `handshake_limit` to prove itself in 24 bytes, is closed at the first wrong
/// one, and at most `max_strangers` unproved ones are open at a time. A broken frame, a reset or
/// the death of a client ends its connection and nothing else. A connection has one request in
/// progress; later bytes stay in its socket, so the server holds at most one request and one reply
/// for each client.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 64;

  explicit StoreServer(const std::string& secret, const std::string& host = "127.0.0.1",
                       std::uint16_t port = 0)
      : StoreServer(secret, listen_on(host, port)) {}

  /// Serves on a socket that listens already.
  StoreServer(const std::string& secret, Descriptor listener)
      : key_(derive_key(secret)),
        listener_(std::move(listener)),
        port_(local_port(listener_.get())),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) {
      fail("store", {"no eventfd could be made: ", error_text(errno)},
           "raise the limit on open files (ulimit -n)");
    }
    thread_ = Thread(
        "lockstep store",
        [this] {
          run();
          close();
        },
        [this](const std::exception_ptr& thrown) {  // ranks then find the store closed
          write_all(2,
                    text({"lockstep: the job's store ended: ", Failure::of(thrown).problem, "\n"}));
          close();
        });
  }

  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  ~StoreServer() { shut_down(); }

  std::uint16_t port() const { return port_; }

  /// The number of connections that have proved themselves.
  std::size_t clients() const { return clients_.load(); }

  /// Closes every connection, which ends all waits of clients. Any thread may call it; the server
  /// is of no use afterwards.
  void shut_down() {
    const std::uint64_t one = 1;
    // This fails only when the counter is full, and then the thread has been woken before.
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }

  /// Waits until every client has gone: the process that hosts the store must not leave before the
  /// others have.
  bool wait_until_unused(Deadline deadline) const {
    while (clients() > 0) {
      if (deadline.passed()) return false;
      sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

 private:
  void close() {
    listener_.close();
    connections_.clear();
    clients_ = 0;
  }

  struct Connection {
    Descriptor socket;
    std::string nonce;
    Deadline::Clock::time_point since;
    bool authenticated = false;
    bool dead = false;
    std::string input;
    std::string output;
    StoreWait wait;

    bool is_busy() const { return wait.is_waiting || !output.empty(); }
  };

  void run() {
    std::vector<pollfd> polled;
    while (true) {
      polled.assign({{wake_.get(), POLLIN, 0}, {listener_.get(), 0, 0}});
      Deadline next = Deadline::never();
      if (may_accept(next)) polled[1].events = POLLIN;
      for (const auto& connection : connections_) {
        const Connection& c = *connection;
        short events = POLLRDHUP;
        if (!c.output.empty()) events |= POLLOUT;
        if (!c.is_busy()) events |= POLLIN;
        polled.push_back({c.socket.get(), events, 0});
        if (!c.authenticated) next = sooner(next, handshake_deadline(c));
        if (c.wait.is_waiting) next = sooner(next, c.wait.deadline);
      }
      if (::poll(polled.data(), polled.size(), next.poll_timeout()) < 0 && errno != EINTR) return;
      if (polled[0].revents != 0) return;
      for (std::size_t i = 0; i < connections_.size(); ++i) {
        if (polled[i + 2].revents != 0) attend(*connections_[i], polled[i + 2].revents);
      }
      if (polled[1].revents != 0) accept_some();
      settle();
    }
  }

  /// Reads, writes and serves one connection as far as it goes without waiting.
  void attend(Connection& c, short events) {
    if ((events & (POLLERR | POLLNVAL)) != 0) c.dead = true;
    // A peer that has hung up while its request waits will not read the reply.
    if ((events & (POLLHUP | POLLRDHUP)) != 0 && c.is_busy()) c.dead = true;
    if (!c.dead && (events & POLLOUT) != 0) send_output(c);
    if (!c.dead && !c.is_busy() && (events & (POLLIN | POLLRDHUP | POLLHUP)) != 0) receive(c);
  }

  void receive(Connection& c) {
    char buffer[65536];
    const std::size_t wanted =
        c.authenticated ? sizeof buffer : store_protocol::answer_bytes - c.input.size();
    const ssize_t n = ::recv(c.socket.get(), buffer, wanted, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
      c.dead = true;
      return;
    }
    c.input.append(buffer, static_cast<std::size_t>(n));
    if (c.authenticated) {
      serve_input(c);
    } else if (c.input.size() == store_protocol::answer_bytes) {
      authenticate(c);
    }
  }

  void authenticate(Connection& c) {
    const std::string_view client_nonce =
        std::string_view(c.input).substr(0, store_protocol::nonce_bytes);
    const std::string_view proof = std::string_view(c.input).substr(store_protocol::nonce_bytes);
    if (!store_protocol::same_tag(proof,
                                  store_protocol::tag(key_, "client", c.nonce, client_nonce))) {
      c.dead = true;
      return;
    }
    c.authenticated = true;
    ++clients_;
    c.output = store_protocol::tag(key_, "server", c.nonce, client_nonce);
    c.input.clear();
    send_output(c);
  }

  /// Serves complete requests, one at a time: the next one waits for the reply to the one before.
  void serve_input(Connection& c) {
    while (!c.dead && !c.is_busy() && c.input.size() >= 4) {
      const std::size_t size = store_protocol::Reader(c.input).u32();
      if (size > store_protocol::max_frame_bytes) {
        c.dead = true;
        return;
      }
      if (c.input.size() - 4 < size) return;
      std::string reply;
      table_.serve(std::string_view(c.input).substr(4, size), reply, c.wait);
      c.input.erase(0, 4 + size);
      if (!c.wait.is_waiting) send_reply(c, reply);
    }
  }

  void send_reply(Connection& c, const std::string& reply) {
    c.dead = reply.empty();
    c.output = store_protocol::frame(reply);
    if (!c.dead) send_output(c);
  }

  void send_output(Connection& c) {
    std::size_t sent = 0;
    while (sent < c.output.size()) {
      const ssize_t n =
          ::send(c.socket.get(), c.output.data() + sent, c.output.size() - sent, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno != EAGAIN) c.dead = true;
      if (n < 0) break;
      sent += static_cast<std::size_t>(n);
    }
    c.output.erase(0, sent);
  }

  /// After every round: answers requests that need not wait any more or whose time is over, and
  /// drops connections that have gone. Replies can let the next request of a connection through,
  /// which can change the table again.
  void settle() {
    for (bool again = true; again;) {
      again = false;
      for (const auto& connection : connections_) {
        Connection& c = *connection;
        if (c.dead || !c.wait.is_waiting) continue;
        std::string reply;
        table_.try_answer(reply, c.wait);
        if (c.wait.is_waiting) continue;
        send_reply(c, reply);
        serve_input(c);
        again = true;
      }
    }
    std::size_t kept = 0;
    for (auto& connection : connections_) {
      Connection& c = *connection;
      if (!c.authenticated && handshake_deadline(c).passed()) c.dead = true;
      if (c.dead && c.wait.is_waiting) table_.withdraw(c.wait);
      if (c.dead && c.authenticated) --clients_;
      if (!c.dead) std::swap(connections_[kept++], connection);
    }
    while (connections_.size() > kept) connections_.pop_back();
  }

  static Deadline handshake_deadline(const Connection& c) {
    return Deadline::at(c.since + store_protocol::handshake_limit);
  }

  std::size_t strangers() const { return connections_.size() - clients_.load(); }

  /// When unproved connections take all places, the oldest is closed, but not before it had the
  /// time that an honest client needs. So neither idle strangers nor a thousand ranks at once lock
  /// ranks out.
  bool may_accept(Deadline& next) {
    if (!accept_after_.passed()) {
      next = sooner(next, accept_after_);
      return false;
    }
    if (strangers() < max_strangers) return true;
    auto oldest = connections_.begin();
    while ((*oldest)->authenticated) ++oldest;
    const Deadline fair = Deadline::at((*oldest)->since + std::chrono::milliseconds(200));
    if (!fair.passed()) {
      next = sooner(next, fair);
      return false;
    }
    connections_.erase(oldest);
    return true;
  }

  void accept_some() {
    while (strangers() < max_strangers) {
      Descriptor socket = accept_now(listener_.get());
      if (!socket) {
        // Out of descriptors: the listener stays readable, so look again later instead of spinning.
        if (errno != EAGAIN) accept_after_ = Deadline::after(std::chrono::milliseconds(50));
        return;
      }
      auto c = std::make_unique<Connection>();
      c->socket = std::move(socket);
      c->nonce = random_bytes(store_protocol::nonce_bytes);
      c->since = Deadline::Clock::now();
      const std::string hello = text({store_protocol::magic, c->nonce});
      // A new socket's buffer takes 24 bytes; a peer that has gone already is noticed by poll().
      [[maybe_unused]] const ssize_t n =
          ::send(c->socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL);
      connections_.push_back(std::move(c));
    }
  }

  SipKey key_;
  Descriptor listener_;
  std::uint16_t port_;
  Descriptor wake_;
  std::atomic<std::size_t> clients_{0};

  // Used by the server's thread only.
  StoreTable table_;
  std::vector<std::unique_ptr<Connection>> connections_;
  Deadline accept_after_ = Deadline::after(std::chrono::milliseconds(0));

  Thread thread_;
};

}  // namespace lockstep::detail
