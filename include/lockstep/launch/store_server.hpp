// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's server: its table of keys, and one thread around epoll, which no client can
/// stop or crash.

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/outcome.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store_protocol.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// A request of one of the clients, which numbers its own.
struct StoreCaller {
  std::uint64_t client = 0;
  std::uint32_t request = 0;

  auto operator<=>(const StoreCaller&) const = default;
};

/// A reply for one of the clients. Replies that all ranks get alike are in memory once.
struct StoreAnswer {
  StoreCaller to;
  std::string own;
  std::shared_ptr<const std::string> shared = nullptr;
};

/// The store's data, apart from sockets: keys, values, barriers, and requests that wait. Requests
/// are served in the order in which they come. What one costs does not depend on how many others
/// wait: each key, barrier and gather has a list of those that wait for it.
class StoreTable {
 public:
  /// Serves one request. It can answer others, which waited for it. False if the bytes are no
  /// request.
  bool serve(StoreCaller from, std::string_view body, std::vector<StoreAnswer>& answers) {
    store_protocol::Reader request(body);
    const auto operation = static_cast<Operation>(request.byte());
    const std::string_view name = request.text();
    if (name.size() > store_protocol::max_key_bytes || waits_.contains(from)) return false;
    const char kind = operation == Operation::barrier  ? 'b'
                      : operation == Operation::gather ? 'g'
                                                       : value_kind;
    const std::string key = kind + std::string(name);
    switch (operation) {
      case Operation::set: {
        const std::string_view value = request.text();
        if (!is_value(request, value)) return false;
        answers.push_back({from, reply(Status::ok)});
        assign(key, value, answers);
        return true;
      }
      case Operation::get:
      case Operation::wait:
      case Operation::change: {
        Wait wait{operation, limit(request.u64())};
        if (operation == Operation::change) wait.known = request.text();
        if (operation != Operation::wait) wait.keys.push_back(key);
        while (operation == Operation::wait && request.ok() && !request.at_end()) {
          wait.keys.push_back(value_kind + std::string(request.text()));
        }
        if (!request.ok()) return false;
        if (!try_answer(from, wait, answers)) hold(from, std::move(wait), answers);
        return true;
      }
      case Operation::barrier:
      case Operation::gather: {
        Wait wait{operation, Deadline::never(), {key}, "", request.u32()};
        const std::uint32_t world = request.u32();
        wait.deadline = limit(request.u64());
        const std::string_view piece = operation == Operation::gather ? request.text() : "";
        if (!is_value(request, piece)) return false;
        if (arrive(from, wait, world, piece, answers)) hold(from, std::move(wait), answers);
        return true;
      }
      case Operation::add: {
        const std::uint64_t delta = request.u64();
        if (!request.ok()) return false;
        add(key, delta, from, answers);
        return true;
      }
      case Operation::compare_set: {
        const std::string_view expected = request.text();
        const std::string_view desired = request.text();
        if (!is_value(request, desired)) return false;
        const std::string* const value = find_value(key);
        const bool is_expected = value == nullptr ? expected.empty() : *value == expected;
        const std::string_view other = value == nullptr ? expected : *value;
        answers.push_back({from, reply(Status::ok, is_expected ? desired : other)});
        if (is_expected) assign(key, desired, answers);
        return true;
      }
      case Operation::erase: {
        if (!request.ok()) return false;
        const auto found = entries_.find(key);
        const bool is_there = found != entries_.end() && found->second.has_value;
        if (is_there) found->second.has_value = false;
        drop_if_unused(found);
        answers.push_back({from, reply(is_there ? Status::ok : Status::absent)});
        return true;
      }
      case Operation::cancel: {
        const auto waiting = waits_.find({from.client, request.u32()});
        if (request.ok() && waiting != waits_.end()) drop(waiting);
        return request.ok();
      }
    }
    return false;
  }

  /// Not after the time of the first request that waits is over.
  Deadline next() const { return next_; }

  /// Answers requests whose time is over: they get the keys or ranks that are missing.
  void expire(std::vector<StoreAnswer>& answers) {
    if (!next_.passed()) return;
    next_ = Deadline::never();
    for (auto waiting = waits_.begin(); waiting != waits_.end();) {
      const auto at = waiting++;
      if (at->second.deadline.passed()) {
        answers.push_back({at->first, missing_for(at->second)});
        drop(at);
      } else {
        next_ = sooner(next_, at->second.deadline);
      }
    }
  }

  /// Forgets the requests of a client that has gone: it no longer counts in its barriers.
  void forget(std::uint64_t client) {
    auto waiting = waits_.lower_bound({client, 0});
    while (waiting != waits_.end() && waiting->first.client == client) drop(waiting++);
  }

 private:
  using Operation = store_protocol::Operation;
  using Status = store_protocol::Status;
  static constexpr char value_kind = '=';

  /// A request that waits until keys appear, a barrier fills, or its time is over.
  struct Wait {
    Operation operation{};
    Deadline deadline = Deadline::never();
    /// For get and change the key, for barrier and gather its entry, for wait the keys that have
    /// not been set yet. It is woken by the last of them. Each key is removed once, even if it is
    /// erased later, so that a long list is not searched at every change.
    std::vector<std::string> keys{};
    std::string known{};  // the value that a change differs from
    std::uint32_t rank = 0;

    bool is_round() const {
      return operation == Operation::barrier || operation == Operation::gather;
    }
  };
  using Waits = std::map<StoreCaller, Wait>;

  /// A key; or a barrier or gather, until all ranks have come: names can be used again. The first
  /// letter of its name says which.
  struct Entry {
    std::vector<StoreCaller> sleepers{};
    bool has_value = false;
    std::string value{};
    std::vector<std::string> pieces{};  // of a gather, by rank
    std::vector<char> present{};        // which ranks have come
    std::size_t missing = 0;            // how many have not
    std::size_t bytes = 0;              // of all pieces
  };
  using Entries = std::map<std::string, Entry>;

  static Deadline limit(std::uint64_t milliseconds) {
    const std::uint64_t year = 366ull * 24 * 3600 * 1000;  // beyond it, Deadline says never
    return Deadline::after(std::chrono::milliseconds(milliseconds < year ? milliseconds : year));
  }

  static std::string reply(Status status, std::string_view text = {}) {
    return store_protocol::Writer{}.byte(static_cast<std::uint8_t>(status)).text(text).bytes();
  }

  static bool is_value(const store_protocol::Reader& request, std::string_view value) {
    return request.ok() && value.size() <= store_protocol::max_value_bytes;
  }

  const std::string* find_value(const std::string& key) const {
    const auto found = entries_.find(key);
    return found != entries_.end() && found->second.has_value ? &found->second.value : nullptr;
  }

  void drop_if_unused(Entries::iterator at) {
    if (at == entries_.end()) return;
    const Entry& entry = at->second;
    const bool is_round = entry.missing != entry.present.size();
    if (!entry.has_value && entry.sleepers.empty() && !is_round) entries_.erase(at);
  }

  // Requests that wait

  void hold(StoreCaller from, Wait wait, std::vector<StoreAnswer>& answers) {
    if (wait.deadline.passed()) {
      answers.push_back({from, missing_for(wait)});
      leave_round(wait);
      return;
    }
    entries_[wait.keys.back()].sleepers.push_back(from);
    next_ = sooner(next_, wait.deadline);
    waits_.emplace(from, std::move(wait));
  }

  /// Removes a request that nothing has woken.
  void drop(Waits::iterator waiting) {
    const Wait wait = std::move(waiting->second);
    const auto entry = entries_.find(wait.keys.back());
    std::erase(entry->second.sleepers, waiting->first);
    waits_.erase(waiting);
    if (wait.is_round()) {
      leave_round(wait);
    } else {
      drop_if_unused(entry);
    }
  }

  /// Sets a value, and answers those that wait for it.
  void assign(const std::string& key, std::string_view value, std::vector<StoreAnswer>& answers) {
    Entry& entry = entries_[key];
    entry.value = value;
    entry.has_value = true;
    for (const StoreCaller& from : std::exchange(entry.sleepers, {})) {
      const auto waiting = waits_.find(from);
      Wait wait = std::move(waiting->second);
      waits_.erase(waiting);
      if (!try_answer(from, wait, answers)) hold(from, std::move(wait), answers);
    }
  }

  /// Answers a get, wait or change if that can be done now.
  bool try_answer(StoreCaller from, Wait& wait, std::vector<StoreAnswer>& answers) const {
    const std::string* value = nullptr;
    if (wait.operation == Operation::wait) {
      while (!wait.keys.empty() && find_value(wait.keys.back()) != nullptr) wait.keys.pop_back();
      if (!wait.keys.empty()) return false;
    } else {
      value = find_value(wait.keys.front());
      if (value == nullptr) return false;
      if (wait.operation == Operation::change && *value == wait.known) return false;
    }
    answers.push_back({from, reply(Status::ok, value == nullptr ? "" : std::string_view(*value))});
    return true;
  }

  std::string missing_for(const Wait& wait) const {
    store_protocol::Writer out;
    out.byte(static_cast<std::uint8_t>(Status::missing));
    if (wait.is_round()) {
      const auto round = entries_.find(wait.keys.back());
      for (std::size_t r = 0; round != entries_.end() && r < round->second.present.size(); ++r) {
        if (round->second.present[r] == 0) out.text(text({r}));
      }
    } else {
      for (const std::string& key : wait.keys) {
        if (find_value(key) == nullptr) out.text(std::string_view(key).substr(1));
      }
    }
    return out.bytes();
  }

  /// Numbers are kept as text, so that `get` and `compare_set` see them too.
  void add(const std::string& key, std::uint64_t delta, StoreCaller from,
           std::vector<StoreAnswer>& answers) {
    std::int64_t number = 0;
    const std::string* const value = find_value(key);
    if (value != nullptr && !value->empty()) {
      const char* const last = value->data() + value->size();
      const auto [end, error] = std::from_chars(value->data(), last, number);
      if (error != std::errc{} || end != last) {
        answers.push_back({from, reply(Status::refused, "its value is not a number")});
        return;
      }
    }
    const std::string sum =
        text({static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + delta)});
    answers.push_back({from, reply(Status::ok, sum)});
    assign(key, sum, answers);
  }

  // Rounds: barriers and gathers

  /// Notes a rank's arrival; true if it has to wait. The last one to come answers all.
  bool arrive(StoreCaller from, const Wait& wait, std::size_t world, std::string_view piece,
              std::vector<StoreAnswer>& answers) {
    const auto refuse = [&](const std::string& why) {
      answers.push_back({from, reply(Status::refused, why)});
      return false;
    };
    if (wait.rank >= world || world > store_protocol::max_world) {
      return refuse(text({"rank ", wait.rank, " is not in a world of ", world}));
    }
    Entry& round = entries_[wait.keys.back()];
    if (round.present.empty()) {
      round.present.assign(world, 0);
      round.pieces.resize(wait.operation == Operation::gather ? world : 0);
      round.missing = world;
    }
    if (round.present.size() != world) {
      return refuse(text({"others wait in it as a world of ", round.present.size(),
                          ", and this rank counts ", world}));
    }
    if (round.present[wait.rank] != 0) {
      return refuse(text({"rank ", wait.rank, " waits in it already"}));
    }
    if (round.bytes + piece.size() > store_protocol::max_gathered_bytes) {
      drop_if_unused(entries_.find(wait.keys.back()));
      return refuse("all ranks together give it more than 16 MiB");
    }
    round.present[wait.rank] = 1;
    round.bytes += piece.size();
    if (!round.pieces.empty()) round.pieces[wait.rank] = piece;
    if (--round.missing > 0) return true;
    const auto all = std::make_shared<const std::string>(
        round.pieces.empty() ? reply(Status::ok) : gathered(round.pieces));
    answers.push_back({from, "", all});
    for (const StoreCaller& other : round.sleepers) {
      waits_.erase(other);
      answers.push_back({other, "", all});
    }
    entries_.erase(wait.keys.back());
    return false;
  }

  /// All pieces, and which of them every rank gave. Neighbours often give the same, as ranks of one
  /// host do: a piece that is one of the last few is not repeated.
  static std::string gathered(const std::vector<std::string>& pieces) {
    std::vector<std::string_view> different;
    store_protocol::Writer texts;
    store_protocol::Writer places;
    for (const std::string& piece : pieces) {
      const std::size_t count = different.size();
      std::size_t at = count < 8 ? 0 : count - 8;
      while (at != count && different[at] != piece) ++at;
      if (at == count) {
        different.push_back(piece);
        texts.text(piece);
      }
      places.u32(static_cast<std::uint32_t>(at));
    }
    return store_protocol::Writer{}
        .byte(static_cast<std::uint8_t>(Status::ok))
        .u32(static_cast<std::uint32_t>(different.size()))
        .raw(texts.bytes())
        .raw(places.bytes())
        .bytes();
  }

  /// A rank that has given up no longer counts in its round.
  void leave_round(const Wait& wait) {
    const auto found = entries_.find(wait.keys.back());
    if (!wait.is_round() || found == entries_.end()) return;
    Entry& round = found->second;
    round.present[wait.rank] = 0;
    ++round.missing;
    if (!round.pieces.empty()) {
      round.bytes -= round.pieces[wait.rank].size();
      round.pieces[wait.rank].clear();
    }
    drop_if_unused(found);
  }

  Entries entries_;
  Waits waits_;
  Deadline next_ = Deadline::never();
};

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
    std::uint64_t number = 0;
    Descriptor socket;
    std::string nonce;
    Deadline::Clock::time_point since;
    bool authenticated = false;
    bool dead = false;
    std::uint32_t observed = 0;  // what epoll was asked for
    std::string input;
    std::vector<std::shared_ptr<const std::string>> output;  // few
    std::size_t sent = 0;                                    // of the first of them
    std::size_t unsent = 0;

    bool reads() const { return unsent <= most_unsent; }
  };
  using Connections = std::vector<std::unique_ptr<Connection>>;

  /// Where the connection of a number is, or would be.
  Connections::iterator place_of(std::uint64_t number) {
    auto first = connections_.begin();
    auto last = connections_.end();
    while (first != last) {
      const auto middle = first + (last - first) / 2;
      if ((*middle)->number < number) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    return first;
  }
  Connection* find(std::uint64_t number) {
    const auto place = place_of(number);
    return place != connections_.end() && (*place)->number == number ? place->get() : nullptr;
  }

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
        next = sooner(next, handshake_deadline(*find(strangers_.front())));
      }
      const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()),
                                     next.poll_timeout());
      if (count < 0 && errno != EINTR) return;
      for (int i = 0; i < count; ++i) {
        const std::uint64_t number = events[static_cast<std::size_t>(i)].data.u64;
        if (number == wake_number) return;
        if (number == listener_number) {
          accept_some();
        } else if (Connection* const found = find(number)) {
          attend(*found, events[static_cast<std::size_t>(i)].events);
        }
      }
      table_.expire(answers_);
      deliver();
      drop_late_strangers();
      bury();
    }
  }

  /// Reads, writes and serves one connection as far as it goes without waiting.
  void attend(Connection& c, std::uint32_t events) {
    if ((events & EPOLLERR) != 0) c.dead = true;
    // A peer that has hung up will not read what it has not read so far.
    if ((events & (EPOLLHUP | EPOLLRDHUP)) != 0 && !c.reads()) c.dead = true;
    if (!c.dead && (events & EPOLLOUT) != 0) {
      send_output(c);
      serve_input(c);  // requests that have come before the replies were read
    }
    if (!c.dead && c.reads() && (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP)) != 0) {
      receive(c);
    }
    deliver();
    settle(c);
  }

  /// Asks epoll for what the connection waits for now, and notes that one has ended.
  void settle(Connection& c) {
    if (c.dead) {
      dead_.push_back(c.number);
      return;
    }
    const std::uint32_t wanted =
        EPOLLRDHUP | (c.reads() ? EPOLLIN : 0u) | (c.unsent > 0 ? EPOLLOUT : 0u);
    if (wanted == c.observed) return;
    observe(c.socket.get(), c.number, wanted, EPOLL_CTL_MOD);
    c.observed = wanted;
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
    std::erase(strangers_, c.number);
    ++clients_;
    enqueue(c, std::make_shared<const std::string>(
                   store_protocol::tag(key_, "server", c.nonce, client_nonce)));
    send_output(c);
    c.input.clear();
  }

  /// Serves the complete requests that have come.
  void serve_input(Connection& c) {
    std::size_t served = 0;
    while (!c.dead && c.authenticated && c.reads()) {
      const auto frame = store_protocol::Frame::first_of(std::string_view(c.input).substr(served));
      c.dead = frame.is_broken;
      if (frame.bytes == 0) break;
      served += frame.bytes;
      requests_.fetch_add(1, std::memory_order_relaxed);
      if (!table_.serve({c.number, frame.request}, frame.body, answers_)) c.dead = true;
      deliver();
    }
    c.input.erase(0, served);
  }

  /// Sends the answers that requests have caused.
  void deliver() {
    for (StoreAnswer& answer : answers_) {
      Connection* const found = find(answer.to.client);
      if (found == nullptr || found->dead) continue;
      Connection& c = *found;
      const bool was_idle = c.unsent == 0;
      const std::size_t bytes = answer.shared ? answer.shared->size() : answer.own.size();
      std::string head = store_protocol::frame_header(answer.to.request, bytes);
      if (!answer.shared) head += answer.own;
      enqueue(c, std::make_shared<const std::string>(std::move(head)));
      if (answer.shared) enqueue(c, std::move(answer.shared));
      if (was_idle) send_output(c);
      settle(c);
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
      c.output.erase(c.output.begin());
    }
  }

  /// Removes connections that have ended. Their requests no longer wait.
  void bury() {
    for (const std::uint64_t number : dead_) {
      const auto place = place_of(number);
      if (place == connections_.end() || (*place)->number != number) continue;
      table_.forget(number);
      if ((*place)->authenticated) --clients_;
      std::erase(strangers_, number);
      connections_.erase(place);
    }
    dead_.clear();
  }

  static Deadline handshake_deadline(const Connection& c) {
    return Deadline::at(c.since + store_protocol::handshake_limit);
  }

  void drop_late_strangers() {
    for (const std::uint64_t number : strangers_) {
      if (!handshake_deadline(*find(number)).passed()) return;
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
      const Deadline fair = Deadline::at(find(oldest)->since + fair_time);
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
      c->number = next_number_;
      if (!observe(c->socket.get(), c->number, c->observed, EPOLL_CTL_ADD)) continue;
      strangers_.push_back(next_number_++);
      connections_.push_back(std::move(c));
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
  Connections connections_;               // ascending
  std::vector<std::uint64_t> strangers_;  // ascending, a thousand at most
  std::vector<std::uint64_t> dead_;       // may have one twice
  std::vector<StoreAnswer> answers_;
  std::uint64_t next_number_ = listener_number + 1;
  bool listens_ = false;
  Deadline accept_after_ = Deadline::after(std::chrono::milliseconds(0));

  Thread thread_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
