// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's server: one thread around epoll, which no client can stop or crash.

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/outcome.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_protocol.hpp"
#include "lockstep/launch/store_table.hpp"

namespace lockstep::detail {

/// Serves keys and values to clients that know the secret. It listens on loopback unless told
/// otherwise; an empty host means every interface, port 0 a free one.
///
/// A connection has `handshake_limit` to prove itself in 24 bytes, is closed at the first wrong
/// one, and at most `max_strangers` unproved ones are open at a time. A broken frame, a reset or
/// the death of a client ends its connection and nothing else. While a client does not read its
/// replies its requests stay in its socket, so the server holds little more than one reply for it.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 1024;

  /// `expected` is how many clients will come: the limit on open files is raised for them.
  explicit StoreServer(const std::string& secret, const std::string& host = "127.0.0.1",
                       std::uint16_t port = 0, std::size_t expected = 0)
      : StoreServer(secret, listen_on(host, port), expected) {}

  /// Serves on a socket that listens already.
  StoreServer(const std::string& secret, Descriptor listener, std::size_t expected = 0)
      : key_(derive_key(secret)),
        listener_(std::move(listener)),
        port_(local_port(listener_.get())),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poll_(::epoll_create1(EPOLL_CLOEXEC)),
        strangers_allowed_(strangers_beside(expected)) {
    if (!wake_ || !poll_ || !observe(wake_.get(), wake_number, EPOLLIN, EPOLL_CTL_ADD) ||
        !observe(listener_.get(), listener_number, 0, EPOLL_CTL_ADD)) {
      fail("store", {"no eventfd or epoll could be made: ", error_text(errno)},
           "raise the limit on open files (ulimit -n)");
    }
    thread_ = Thread(
        ThreadName{"lockstep store", "the thread of the job's store"},
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

  /// How many requests it has served since it began.
  std::uint64_t requests() const { return requests_.load(std::memory_order_relaxed); }

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
  static constexpr std::uint64_t wake_number = 0;
  static constexpr std::uint64_t listener_number = 1;
  /// With more than this to be sent, no further request of a client is read.
  static constexpr std::size_t most_unsent = 256_KiB;
  /// A stranger may be closed for another one after this time: an honest client needs less, unless
  /// a thousand processes start at once on few cores.
  static constexpr std::chrono::milliseconds fair_time{200};

  struct Connection {
    Descriptor socket;
    std::string nonce;
    Deadline::Clock::time_point since;
    bool authenticated = false;
    bool dead = false;
    std::uint32_t observed = 0;  // what epoll was asked for
    std::string input;
    std::deque<std::shared_ptr<const std::string>> output;
    std::size_t sent = 0;  // of the first of them
    std::size_t unsent = 0;

    bool reads() const { return unsent <= most_unsent; }
  };

  /// The room for connections that have not proved themselves, beside the clients.
  static std::size_t strangers_beside(std::size_t expected) {
    if (expected == 0) return max_strangers;
    constexpr std::size_t reserve = 32;  // for what the program opens meanwhile
    allow_open_files(expected + 2 * reserve, "the store of a job of", expected);
    const std::size_t allowed = prefer_open_files(expected + reserve + max_strangers);
    return std::min(allowed - expected - reserve, max_strangers);
  }

  bool observe(int fd, std::uint64_t number, std::uint32_t events, int how) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = number;
    return ::epoll_ctl(poll_.get(), how, fd, &event) == 0;
  }

  void close() {
    listener_.close();
    connections_.clear();
    clients_ = 0;
  }

  void run() {
    std::vector<epoll_event> events(256);
    while (true) {
      Deadline next = sooner(table_.next(), accept_when_allowed());
      if (!strangers_.empty()) {
        next = sooner(next, handshake_deadline(*connections_.at(strangers_.front())));
      }
      const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()),
                                     next.poll_timeout());
      if (count < 0 && errno != EINTR) return;
      for (int i = 0; i < count; ++i) {
        const std::uint64_t number = events[static_cast<std::size_t>(i)].data.u64;
        if (number == wake_number) return;
        if (number == listener_number) {
          accept_some();
        } else if (const auto found = connections_.find(number); found != connections_.end()) {
          attend(number, *found->second, events[static_cast<std::size_t>(i)].events);
        }
      }
      table_.expire(answers_);
      deliver();
      drop_late_strangers();
      bury();
    }
  }

  /// Reads, writes and serves one connection as far as it goes without waiting.
  void attend(std::uint64_t number, Connection& c, std::uint32_t events) {
    if ((events & EPOLLERR) != 0) c.dead = true;
    // A peer that has hung up will not read what it has not read so far.
    if ((events & (EPOLLHUP | EPOLLRDHUP)) != 0 && !c.reads()) c.dead = true;
    if (!c.dead && (events & EPOLLOUT) != 0) {
      send_output(c);
      serve_input(number, c);  // requests that have come before the replies were read
    }
    if (!c.dead && c.reads() && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP)) != 0) {
      receive(number, c);
    }
    deliver();
    settle(number, c);
  }

  /// Asks epoll for what the connection waits for now, and notes that one has ended.
  void settle(std::uint64_t number, Connection& c) {
    if (c.dead) {
      dead_.push_back(number);
      return;
    }
    const std::uint32_t wanted =
        EPOLLRDHUP | (c.reads() ? EPOLLIN : 0u) | (c.unsent > 0 ? EPOLLOUT : 0u);
    if (wanted == c.observed) return;
    observe(c.socket.get(), number, wanted, EPOLL_CTL_MOD);
    c.observed = wanted;
  }

  void receive(std::uint64_t number, Connection& c) {
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
      serve_input(number, c);
    } else if (c.input.size() == store_protocol::answer_bytes) {
      authenticate(number, c);
    }
  }

  void authenticate(std::uint64_t number, Connection& c) {
    const std::string_view client_nonce =
        std::string_view(c.input).substr(0, store_protocol::nonce_bytes);
    const std::string_view proof = std::string_view(c.input).substr(store_protocol::nonce_bytes);
    if (!store_protocol::same_tag(proof,
                                  store_protocol::tag(key_, "client", c.nonce, client_nonce))) {
      c.dead = true;
      return;
    }
    c.authenticated = true;
    std::erase(strangers_, number);
    ++clients_;
    enqueue(c, std::make_shared<const std::string>(
                   store_protocol::tag(key_, "server", c.nonce, client_nonce)));
    send_output(c);
    c.input.clear();
  }

  /// Serves the complete requests that have come.
  void serve_input(std::uint64_t number, Connection& c) {
    std::size_t served = 0;
    while (!c.dead && c.authenticated && c.reads()) {
      const auto frame = store_protocol::Frame::first_of(std::string_view(c.input).substr(served));
      c.dead = frame.is_broken;
      if (frame.bytes == 0) break;
      served += frame.bytes;
      requests_.fetch_add(1, std::memory_order_relaxed);
      if (!table_.serve({number, frame.request}, frame.body, answers_)) c.dead = true;
      deliver();
    }
    c.input.erase(0, served);
  }

  /// Sends the answers that requests have caused.
  void deliver() {
    for (StoreAnswer& answer : answers_) {
      const auto found = connections_.find(answer.to.client);
      if (found == connections_.end() || found->second->dead) continue;
      Connection& c = *found->second;
      const bool was_idle = c.unsent == 0;
      const std::size_t bytes = answer.shared ? answer.shared->size() : answer.own.size();
      std::string head = store_protocol::frame_header(answer.to.request, bytes);
      if (!answer.shared) head += answer.own;
      enqueue(c, std::make_shared<const std::string>(std::move(head)));
      if (answer.shared) enqueue(c, std::move(answer.shared));
      if (was_idle) send_output(c);
      settle(answer.to.client, c);
    }
    answers_.clear();
  }

  static void enqueue(Connection& c, std::shared_ptr<const std::string> bytes) {
    c.unsent += bytes->size();
    c.output.push_back(std::move(bytes));
  }

  static void send_output(Connection& c) {
    while (!c.output.empty()) {
      const std::string& first = *c.output.front();
      const int more = c.output.size() > 1 ? MSG_MORE : 0;
      const ssize_t n =
          ::send(c.socket.get(), first.data() + c.sent, first.size() - c.sent, MSG_NOSIGNAL | more);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno != EAGAIN) c.dead = true;
      if (n < 0) return;
      c.sent += static_cast<std::size_t>(n);
      c.unsent -= static_cast<std::size_t>(n);
      if (c.sent < first.size()) continue;
      c.sent = 0;
      c.output.pop_front();
    }
  }

  /// Removes connections that have ended. Their requests no longer wait.
  void bury() {
    for (const std::uint64_t number : dead_) {
      const auto found = connections_.find(number);
      if (found == connections_.end()) continue;
      table_.forget(number);
      if (found->second->authenticated) --clients_;
      std::erase(strangers_, number);
      connections_.erase(found);
    }
    dead_.clear();
  }

  static Deadline handshake_deadline(const Connection& c) {
    return Deadline::at(c.since + store_protocol::handshake_limit);
  }

  void drop_late_strangers() {
    for (const std::uint64_t number : strangers_) {
      if (!handshake_deadline(*connections_.at(number)).passed()) return;
      dead_.push_back(number);
    }
  }

  /// Listens if there is room for a stranger; otherwise says when to look again. When unproved
  /// connections take all places, the oldest is closed, but not before it had the time that an
  /// honest client needs. So neither idle strangers nor a thousand ranks at once lock ranks out.
  Deadline accept_when_allowed() {
    Deadline again = Deadline::never();
    if (!accept_after_.passed()) {
      again = accept_after_;
    } else if (strangers_.size() >= strangers_allowed_) {
      const std::uint64_t oldest = strangers_.front();
      const Deadline fair = Deadline::at(connections_.at(oldest)->since + fair_time);
      if (fair.passed()) {
        dead_.push_back(oldest);
        bury();
      } else {
        again = fair;
      }
    }
    const bool listens = !again.is_ever();
    if (listens != listens_) {
      observe(listener_.get(), listener_number, listens ? EPOLLIN : 0u, EPOLL_CTL_MOD);
    }
    listens_ = listens;
    return again;
  }

  void accept_some() {
    while (strangers_.size() < strangers_allowed_) {
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
      // A new socket's buffer takes 24 bytes; a peer that has gone already is noticed by epoll.
      [[maybe_unused]] const ssize_t n =
          ::send(c->socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL);
      c->observed = EPOLLIN | EPOLLRDHUP;
      if (!observe(c->socket.get(), next_number_, c->observed, EPOLL_CTL_ADD)) continue;
      strangers_.push_back(next_number_);
      connections_.emplace(next_number_++, std::move(c));
    }
  }

  SipKey key_;
  Descriptor listener_;
  std::uint16_t port_;
  Descriptor wake_;
  Descriptor poll_;
  std::size_t strangers_allowed_;
  std::atomic<std::size_t> clients_{0};
  std::atomic<std::uint64_t> requests_{0};

  // Used by the server's thread only. Connections are numbered in the order in which they came.
  StoreTable table_;
  std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::vector<std::uint64_t> strangers_;  // ascending, a thousand at most
  std::vector<std::uint64_t> dead_;       // may have one twice
  std::vector<StoreAnswer> answers_;
  std::uint64_t next_number_ = listener_number + 1;
  bool listens_ = false;
  Deadline accept_after_ = Deadline::after(std::chrono::milliseconds(0));

  Thread thread_;
};

}  // namespace lockstep::detail
