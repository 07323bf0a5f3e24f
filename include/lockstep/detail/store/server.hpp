// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's server: a table of keys and values, and one epoll thread.

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <map>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/store/protocol.hpp"
#include "lockstep/detail/store/socket.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep::detail {

/// A request of a client, by the client's own numbering.
struct StoreCaller {
  std::uint64_t client = 0;
  std::uint32_t request = 0;

  auto operator<=>(const StoreCaller&) const = default;
};

/// A reply; one that all ranks get is shared.
using StoreAnswer = std::pair<StoreCaller, std::shared_ptr<const std::string>>;

/// The store's data without sockets. Each key or gather lists its pending requests, so that serving
/// one does not depend on how many others are pending. Clients cancel requests by their own clocks.
class StoreTable {
 public:
  /// Serves one request, which can complete pending ones. False if the bytes are no request.
  bool serve(StoreCaller from, std::string_view body) {
    const std::optional<Request> request = Request::from_bytes(body);
    if (!request || waits_.contains(from)) return false;
    const bool is_gather = request->operation == Operation::gather;
    const std::string key = text({is_gather ? "g" : "v", request->key});
    const std::optional<std::string>& value = value_of(key);
    switch (request->operation) {
      case Operation::set:
        answer(from, Status::ok);
        assign(key, request->value);
        return true;
      case Operation::get:
      case Operation::change: {
        Wait wait{key};
        if (request->operation == Operation::change) wait.known = request->value;
        if (!try_answer(from, wait)) hold(from, std::move(wait));
        break;
      }
      case Operation::gather:
        gather(from, key, *request);
        break;
      case Operation::add:
        add(from, key, request->number);
        return true;
      case Operation::compare_set: {
        const bool is_expected = value ? *value == request->expected : request->expected.empty();
        answer(from, Status::ok, is_expected ? request->value : value ? *value : request->expected);
        if (is_expected) assign(key, request->value);
        return true;
      }
      case Operation::erase:
        answer(from, value ? Status::ok : Status::missing);
        if (value) entries_[key].value.reset();
        drop_if_unused(key);
        return true;
      case Operation::cancel:
        cancel({from.client, static_cast<std::uint32_t>(request->number)});
        return true;
      default:
        return false;
    }
    if (!request->waits) cancel(from);
    return true;
  }

  /// Drops the requests of a disconnected client, also from its gathers.
  void forget(std::uint64_t client) {
    auto waiting = waits_.lower_bound({client, 0});
    while (waiting != waits_.end() && waiting->first.client == client) drop(waiting++);
  }

  std::vector<StoreAnswer> take_answers() { return std::exchange(answers_, {}); }

 private:
  using Operation = store_protocol::Operation;
  using Request = store_protocol::Request;
  using Status = store_protocol::Status;

  /// A pending request: for a value other than `known`, or for the other ranks of a gather.
  struct Wait {
    std::string key{};
    std::optional<std::string> known{};
    std::size_t rank = 0;
  };
  using Waits = std::map<StoreCaller, Wait>;

  /// A key, or a gather until all ranks have arrived; the first letter of its key says which.
  struct Entry {
    std::vector<StoreCaller> sleepers{};
    std::optional<std::string> value{};
    std::size_t world = 0;                        // of a gather
    std::map<std::size_t, std::string> pieces{};  // of a gather, by rank
    std::size_t bytes = 0;                        // of all pieces
  };

  void answer(StoreCaller to, const store_protocol::Writer& body) {
    answers_.emplace_back(to, std::make_shared<const std::string>(body.bytes()));
  }
  void answer(StoreCaller to, Status status, std::string_view text = {}) {
    answer(to, store_protocol::Writer{}.byte(static_cast<std::uint8_t>(status)).text(text));
  }

  const std::optional<std::string>& value_of(const std::string& key) const {
    static const std::optional<std::string> none;
    const auto found = entries_.find(key);
    return found == entries_.end() ? none : found->second.value;
  }

  void drop_if_unused(const std::string& key) {
    const auto found = entries_.find(key);
    if (found == entries_.end() || found->second.value || !found->second.sleepers.empty()) return;
    entries_.erase(found);
  }

  void hold(StoreCaller from, Wait wait) {
    entries_[wait.key].sleepers.push_back(from);
    waits_.emplace(from, std::move(wait));
  }

  void drop(Waits::iterator waiting) {
    const Wait wait = std::move(waiting->second);
    Entry& entry = entries_[wait.key];
    std::erase(entry.sleepers, waiting->first);
    waits_.erase(waiting);
    if (const auto piece = entry.pieces.find(wait.rank); piece != entry.pieces.end()) {
      entry.bytes -= piece->second.size();
      entry.pieces.erase(piece);
    }
    drop_if_unused(wait.key);
  }

  /// Answers a pending request with the missing ranks of its gather.
  void cancel(StoreCaller from) {
    const auto waiting = waits_.find(from);
    if (waiting == waits_.end()) return;
    store_protocol::Writer missing;
    missing.byte(static_cast<std::uint8_t>(Status::missing));
    const Entry& entry = entries_[waiting->second.key];
    for (std::size_t r = 0; r < entry.world; ++r) {
      if (!entry.pieces.contains(r)) missing.text(text({r}));
    }
    answer(from, missing);
    drop(waiting);
  }

  void assign(const std::string& key, std::string_view value) {
    Entry& entry = entries_[key];
    entry.value = value;
    std::erase_if(entry.sleepers, [&](const StoreCaller& from) {
      const auto waiting = waits_.find(from);
      if (!try_answer(from, waiting->second)) return false;
      waits_.erase(waiting);
      return true;
    });
  }

  bool try_answer(StoreCaller from, const Wait& wait) {
    const std::optional<std::string>& value = value_of(wait.key);
    if (!value || value == wait.known) return false;
    answer(from, Status::ok, *value);
    return true;
  }

  /// Numbers are stored as text, so that `get` and `compare_set` work on them.
  void add(StoreCaller from, const std::string& key, std::uint64_t delta) {
    std::int64_t number = 0;
    const std::string value = value_of(key).value_or("");
    if (!value.empty() && !read_number(value, number))
      return answer(from, Status::rejected, "its value is not a number");
    const std::string sum =
        text({static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + delta)});
    answer(from, Status::ok, sum);
    assign(key, sum);
  }

  void gather(StoreCaller from, const std::string& key, const Request& request) {
    const std::size_t rank = request.rank;
    const std::size_t world = request.world;
    const auto reject = [&](const std::string& why) {
      answer(from, Status::rejected, why);
      drop_if_unused(key);
    };
    if (rank >= world || world > store_protocol::max_world) {
      return reject(text({"rank ", rank, " is not in a world of ", world}));
    }
    Entry& round = entries_[key];
    if (round.sleepers.empty()) round.world = world;
    if (round.world != world) {
      return reject(text(
          {"others wait in it as a world of ", round.world, ", and this rank counts ", world}));
    }
    if (round.pieces.contains(rank)) return reject(text({"rank ", rank, " waits in it already"}));
    if (round.bytes + request.value.size() > store_protocol::max_gathered_bytes) {
      return reject("all ranks together give it more than 16 MiB");
    }
    round.bytes += request.value.size();
    round.pieces[rank] = request.value;
    hold(from, {key, std::nullopt, rank});
    if (round.sleepers.size() < world) return;
    const auto all = std::make_shared<const std::string>(gathered(round.pieces));
    for (const StoreCaller& each : round.sleepers) {
      waits_.erase(each);
      answers_.emplace_back(each, all);
    }
    entries_.erase(key);
  }

  /// Distinct pieces, and each rank's index unless all are equal; neighbours often give the same.
  static std::string gathered(const std::map<std::size_t, std::string>& pieces) {
    std::vector<std::string_view> different;
    store_protocol::Writer texts;
    store_protocol::Writer positions;
    for (const auto& [rank, piece] : pieces) {
      const std::size_t count = different.size();
      std::size_t at = count < 8 ? 0 : count - 8;
      while (at != count && different[at] != piece) ++at;
      if (at == count) {
        different.push_back(piece);
        texts.text(piece);
      }
      positions.u32(static_cast<std::uint32_t>(at));
    }
    store_protocol::Writer all;
    all.byte(static_cast<std::uint8_t>(Status::ok));
    all.u32(static_cast<std::uint32_t>(different.size())).raw(texts.bytes());
    if (different.size() > 1) all.raw(positions.bytes());
    return all.bytes();
  }

  std::map<std::string, Entry> entries_;
  Waits waits_;
  std::vector<StoreAnswer> answers_;
};

/// Serves keys and values to clients that know the secret, on loopback by default; an empty host
/// means every interface, port 0 a free one. A connection has `handshake_limit` to authenticate
/// with 24 bytes; the oldest stranger makes room where `max_strangers` and the expected clients are
/// connected. A malformed or forged frame, a reset or the death of a client ends only its
/// connection. The server reads no more requests of a client that does not read its replies.
class StoreServer {
 public:
  static constexpr std::size_t max_strangers = 1024;

  /// The limit on open files is raised for the `expected` number of clients.
  explicit StoreServer(const std::string& secret, const std::string& host = "127.0.0.1",
                       std::uint16_t port = 0, std::size_t expected = 0)
      : StoreServer(secret, listen_on(host, port), expected) {}

  StoreServer(const std::string& secret, Descriptor listener, std::size_t expected = 0)
      : key_(derive_key(secret)),
        listener_(std::move(listener)),
        port_(local_port(listener_.get())),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        poll_(::epoll_create1(EPOLL_CLOEXEC)),
        most_connections_(most_connections(expected)) {
    // Edge-triggered: `accept_some` accepts all, or has run out of descriptors and tries again.
    if (!wake_ || !poll_ || !observe(wake_.get(), wake_number, EPOLLIN, EPOLL_CTL_ADD) ||
        !observe(listener_.get(), listener_number, EPOLLIN | EPOLLET, EPOLL_CTL_ADD)) {
      fail("store", {"no eventfd or epoll could be made: ", error_text(errno)},
           "raise the limit on open files (ulimit -n)");
    }
    thread_ = Thread(
        ThreadName{"lockstep store", "the thread of the job's store"},
        [this] {
          run();
          close();
        },
        [this](const std::exception_ptr& thrown) {  // ranks then see a closed store
          write_all(2,
                    text({"lockstep: the job's store ended: ", error_of(thrown).problem(), "\n"}));
          close();
        });
  }

  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  ~StoreServer() { shut_down(); }

  std::uint16_t port() const { return port_; }

  /// The number of authenticated connections.
  std::size_t clients() const { return clients_.load(); }

  std::uint64_t requests() const { return requests_.load(std::memory_order_relaxed); }

  /// Makes the server's thread close every connection, which ends all waits. Thread-safe.
  void shut_down() {
    const std::uint64_t one = 1;
    // The write fails only if the counter is full, and then the thread is awake.
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof one);
  }

  /// Waits until every client has left, as the process that hosts the store has to.
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
  /// The server stops reading a client's requests while more than this is unsent.
  static constexpr std::size_t most_unsent = 256_KiB;

  struct Connection {
    std::uint64_t number = 0;
    Descriptor socket;
    std::string nonce;
    Deadline handshake_ends = Deadline::after(store_protocol::handshake_limit);
    bool authenticated = false;
    bool dead = false;
    std::uint32_t observed = 0;  // the events epoll reports
    std::string input{};
    store_protocol::FrameKey receives{};  // once it is authenticated
    store_protocol::FrameKey sends{};
    std::vector<std::shared_ptr<const std::string>> output{};  // few
    std::size_t sent = 0;                                      // of the first of them
    std::size_t unsent = 0;

    bool reads() const { return unsent <= most_unsent; }
  };

  Connection* find(std::uint64_t number) {
    const auto found = connections_.find(number);
    return found == connections_.end() ? nullptr : &found->second;
  }

  static std::size_t most_connections(std::size_t expected) {
    if (expected == 0) return max_strangers;
    constexpr std::size_t reserve = 32;  // for files that the program opens meanwhile
    allow_open_files(expected + 2 * reserve, "the store of a job of", expected);
    const std::size_t most = expected + max_strangers;
    return std::min(prefer_open_files(most + reserve) - reserve, most);
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
      Deadline next = accept_again_;
      if (!strangers_.empty()) next = sooner(next, find(strangers_.front())->handshake_ends);
      const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()),
                                     next.poll_timeout());
      if (count < 0 && errno != EINTR) return;
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<std::size_t>(i)];
        if (event.data.u64 == wake_number) return;
        if (event.data.u64 == listener_number) {
          accept_some();
        } else if (Connection* const found = find(event.data.u64)) {
          attend(*found, event.events);
        }
      }
      if (accept_again_.passed()) accept_some();
      for (const std::uint64_t number : strangers_) {
        Connection& stranger = *find(number);
        if (!stranger.handshake_ends.passed()) break;
        end(stranger);
      }
      bury();
    }
  }

  /// Serves one connection without blocking.
  void attend(Connection& c, std::uint32_t events) {
    // A peer that has hung up reads no more replies.
    const bool hung_up = (events & (EPOLLHUP | EPOLLRDHUP)) != 0;
    if ((events & EPOLLERR) != 0 || (hung_up && !c.reads())) end(c);
    if (!c.dead && (events & EPOLLOUT) != 0) {
      send_output(c);
      serve_input(c);  // requests that came before the replies were read
    }
    if (!c.dead && c.reads() && (hung_up || (events & EPOLLIN) != 0)) receive(c);
    update_events(c);
  }

  /// Updates the events that epoll reports for the connection.
  void update_events(Connection& c) {
    const std::uint32_t wanted =
        EPOLLRDHUP | (c.reads() ? EPOLLIN : 0u) | (c.unsent > 0 ? EPOLLOUT : 0u);
    if (c.dead || wanted == c.observed) return;
    observe(c.socket.get(), c.number, wanted, EPOLL_CTL_MOD);
    c.observed = wanted;
  }

  void receive(Connection& c) {
    char buffer[65536];
    const std::size_t wanted =
        c.authenticated ? sizeof buffer : store_protocol::answer_bytes - c.input.size();
    const ssize_t n = ::recv(c.socket.get(), buffer, wanted, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) return end(c);
    c.input.append(buffer, static_cast<std::size_t>(n));
    if (c.authenticated) {
      serve_input(c);
    } else if (c.input.size() == store_protocol::answer_bytes) {
      authenticate(c);
    }
  }

  void authenticate(Connection& c) {
    const std::string nonce = c.input.substr(0, store_protocol::nonce_bytes);
    store_protocol::Reader proof(std::string_view(c.input).substr(store_protocol::nonce_bytes));
    if (proof.u64() != store_protocol::tag(key_, "client", c.nonce, nonce)) return end(c);
    c.authenticated = true;
    c.receives = store_protocol::FrameKey(key_, "client", c.nonce, nonce);
    c.sends = store_protocol::FrameKey(key_, "server", c.nonce, nonce);
    c.input.clear();
    std::erase(strangers_, c.number);
    ++clients_;
    const std::uint64_t own = store_protocol::tag(key_, "server", c.nonce, nonce);
    send(c, store_protocol::Writer{}.u64(own).bytes());
  }

  void serve_input(Connection& c) {
    if (!c.authenticated || !c.reads()) return;
    const auto serve = [&](std::uint32_t request, std::string_view body) {
      requests_.fetch_add(1, std::memory_order_relaxed);
      if (!table_.serve({c.number, request}, body)) end(c);
      deliver();
      return !c.dead && c.reads();
    };
    if (!c.receives.take_frames(c.input, serve)) end(c);
  }

  void deliver() {
    const std::string* hashed = nullptr;  // ranks of a gather share one body
    std::uint64_t digest = 0;
    for (auto& [to, body] : table_.take_answers()) {
      Connection* const c = find(to.client);
      if (c == nullptr || c->dead) continue;
      if (body.get() != std::exchange(hashed, body.get())) digest = c->sends.digest(*body);
      std::string head = c->sends.header(to.request, body->size(), digest);
      const bool is_small = body->size() < 1_KiB;
      if (is_small) head += *body;
      send(*c, std::move(head), is_small ? nullptr : std::move(body));
      update_events(*c);
    }
  }

  void send(Connection& c, std::string head, std::shared_ptr<const std::string> body = nullptr) {
    const bool was_idle = c.unsent == 0;
    c.unsent += head.size() + (body ? body->size() : 0);
    c.output.push_back(std::make_shared<const std::string>(std::move(head)));
    if (body) c.output.push_back(std::move(body));
    if (was_idle) send_output(c);
  }

  void send_output(Connection& c) {
    while (!c.output.empty()) {
      const std::string& first = *c.output.front();
      const int more = c.output.size() > 1 ? MSG_MORE : 0;
      const ssize_t n =
          ::send(c.socket.get(), first.data() + c.sent, first.size() - c.sent, MSG_NOSIGNAL | more);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno != EAGAIN) end(c);
      if (n < 0) return;
      c.sent += static_cast<std::size_t>(n);
      c.unsent -= static_cast<std::size_t>(n);
      if (c.sent < first.size()) continue;
      c.sent = 0;
      c.output.erase(c.output.begin());
    }
  }

  void end(Connection& c) {
    if (!std::exchange(c.dead, true)) dead_.push_back(c.number);
  }

  void bury() {
    for (const std::uint64_t number : std::exchange(dead_, {})) {
      table_.forget(number);
      if (find(number)->authenticated) --clients_;
      std::erase(strangers_, number);
      connections_.erase(number);
    }
  }

  void accept_some() {
    accept_again_ = Deadline::never();
    while (true) {
      Descriptor socket = accept_now(listener_.get());
      if (!socket) {
        if (errno != EAGAIN) accept_again_ = Deadline::after(std::chrono::milliseconds(50));
        return;
      }
      if (connections_.size() >= most_connections_ && !strangers_.empty()) {
        end(*find(strangers_.front()));
        bury();
      }
      Connection c{next_number_++, std::move(socket), random_bytes(store_protocol::nonce_bytes)};
      c.observed = EPOLLIN | EPOLLRDHUP;
      if (!observe(c.socket.get(), c.number, c.observed, EPOLL_CTL_ADD)) continue;
      strangers_.push_back(c.number);
      const auto added = connections_.emplace(c.number, std::move(c)).first;
      send(added->second, text({store_protocol::magic, added->second.nonce}));
    }
  }

  SipKey key_;
  Descriptor listener_;
  std::uint16_t port_;
  Descriptor wake_;
  Descriptor poll_;
  std::size_t most_connections_;
  std::atomic<std::size_t> clients_{0};
  std::atomic<std::uint64_t> requests_{0};

  // Used by the server's thread only. Connections are numbered in order of arrival.
  StoreTable table_;
  std::map<std::uint64_t, Connection> connections_;
  std::vector<std::uint64_t> strangers_;  // ascending
  std::vector<std::uint64_t> dead_;
  std::uint64_t next_number_ = listener_number + 1;
  Deadline accept_again_ = Deadline::never();

  Thread thread_;
};

}  // namespace lockstep::detail

LOCKSTEP_COLD_END
