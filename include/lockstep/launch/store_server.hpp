// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's server: one thread around poll(), which no client can stop, crash or fill.

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/launch/random.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_protocol.hpp"
#include "lockstep/launch/store_table.hpp"

namespace lockstep {

/// Serves keys and values to those who know the secret. It listens on loopback unless told
/// otherwise; an empty host means every interface, port 0 a free one.
///
/// Strangers cost little: a connection has `handshake_limit` to prove itself in 24 bytes, is closed
/// at the first wrong one, and at most `max_strangers` are open at a time. Clients are trusted not
/// to fill the memory, but not to be well: a broken frame, a reset or a death ends that connection
/// and nothing else. A connection has one request in progress; what it sends meanwhile stays in
/// its socket, so nobody can make the server hold more than one request and one reply for them.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 64;

  explicit StoreServer(const std::string& secret, const std::string& host = "127.0.0.1",
                       std::uint16_t port = 0)
      : StoreServer(secret, listen_on(host, port)) {}

  /// On a socket that listens already.
  StoreServer(const std::string& secret, Descriptor listener)
      : key_(derive_key(secret)),
        listener_(std::move(listener)),
        port_(local_port(listener_.get())),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) {
      throw Error("store", "no eventfd could be made: " + error_text(errno),
                  "raise the limit on open files (ulimit -n)");
    }
    // Signals are the program's business: none may be delivered to a thread it does not know of.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] {
      run();
      listener_.close();
      connections_.clear();
      clients_ = 0;
    });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  ~StoreServer() {
    shut_down();
    thread_.join();
  }

  std::uint16_t port() const { return port_; }

  /// Connections that have proved themselves.
  std::size_t clients() const { return clients_.load(); }

  /// Closes every connection, so that all who wait for a key or in a barrier stop waiting. From any
  /// thread; the server is of no use afterwards.
  void shut_down() {
    const std::uint64_t one = 1;
    // It fails only when the counter is full: then the thread has been woken before.
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }

  /// Waits until every client has gone: who hosts the store must not leave before the others have.
  bool wait_until_unused(Deadline deadline) const {
    while (clients() > 0) {
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

 private:
  struct Connection {
    Descriptor socket;
    std::string nonce;
    Deadline::Clock::time_point since;
    bool authenticated = false;
    bool dead = false;
    std::string input;
    std::string output;
    std::optional<ParkedRequest> parked;

    bool is_busy() const { return parked.has_value() || !output.empty(); }
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
        if (c.parked) next = sooner(next, c.parked->deadline);
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

  /// Serves the requests that are complete, one at a time: the next waits for the last's reply.
  void serve_input(Connection& c) {
    while (!c.dead && !c.is_busy() && c.input.size() >= 4) {
      const std::size_t size = store_protocol::Reader(c.input).u32();
      if (size > store_protocol::max_frame_bytes) {
        c.dead = true;
        return;
      }
      if (c.input.size() - 4 < size) return;
      const auto reply = table_.serve(std::string_view(c.input).substr(4, size), c.parked);
      c.input.erase(0, 4 + size);
      if (reply) {
        c.output = store_protocol::frame(*reply);
        send_output(c);
      } else if (!c.parked) {
        c.dead = true;
      }
    }
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

  /// After every round: who waited and need not any more, whose time is over, who has gone. Replies
  /// can let the next request of a connection through, which can change the table again.
  void settle() {
    for (bool again = true; again;) {
      again = false;
      for (const auto& connection : connections_) {
        Connection& c = *connection;
        if (c.dead || !c.parked) continue;
        auto reply = table_.answer(*c.parked);
        if (!reply && c.parked->deadline.passed()) reply = table_.give_up(*c.parked);
        if (!reply) continue;
        c.parked.reset();
        c.output = store_protocol::frame(*reply);
        send_output(c);
        serve_input(c);
        again = true;
      }
    }
    for (const auto& connection : connections_) {
      Connection& c = *connection;
      if (!c.authenticated && handshake_deadline(c).passed()) c.dead = true;
      if (!c.dead) continue;
      if (c.parked) table_.withdraw(*c.parked);
      if (c.authenticated) --clients_;
    }
    std::erase_if(connections_, [](const auto& c) { return c->dead; });
  }

  static Deadline handshake_deadline(const Connection& c) {
    return Deadline::at(c.since + store_protocol::handshake_limit);
  }

  std::size_t strangers() const { return connections_.size() - clients_.load(); }

  /// When strangers take all places, the oldest makes room, but not before it had the time that an
  /// honest client needs. So neither idle strangers nor a thousand ranks at once lock ranks out.
  bool may_accept(Deadline& next) {
    if (accept_pause_ && !accept_pause_->passed()) {
      next = sooner(next, *accept_pause_);
      return false;
    }
    accept_pause_.reset();
    if (strangers() < max_strangers) return true;
    const auto oldest = std::find_if(connections_.begin(), connections_.end(),
                                     [](const auto& c) { return !c->authenticated; });
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
        if (errno != EAGAIN) accept_pause_ = Deadline::after(std::chrono::milliseconds(50));
        return;
      }
      auto c = std::make_unique<Connection>();
      c->socket = std::move(socket);
      c->nonce = random_bytes(store_protocol::nonce_bytes);
      c->since = Deadline::Clock::now();
      const std::string hello = std::string(store_protocol::magic) + c->nonce;
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

  // The thread's own.
  StoreTable table_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::optional<Deadline> accept_pause_;

  std::thread thread_;
};

}  // namespace lockstep
