// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gloo's connections: rendezvous, disconnect detection, abortable waits, handshake of calls.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <sched.h>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <map>
#include <mutex>
#include <system_error>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/comm/gloo/library.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/launch/rendezvous.hpp"
#include "lockstep/detail/store/protocol.hpp"
#include "lockstep/detail/store/socket.hpp"

namespace lockstep::detail::over_gloo {

/// The rendezvous of a communicator's ranks, through the job's store. Each rank sets one value, its
/// addresses for all others, and reads those of all: up to `most_gathered` ranks, `set` is
/// therefore a gather. For more ranks, that message is too long: `find` reads value by value.
class RendezvousStore : public ::gloo::rendezvous::Store {
 public:
  static constexpr std::size_t most_gathered = 128;

  RendezvousStore(lockstep::Store& store, std::string prefix, const Membership& member)
      : store_(store), prefix_(std::move(prefix)), member_(member) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const std::string_view value(data.data(), data.size());
    if (member_.world.value() > most_gathered || !known_.empty()) {
      store_.set(prefix_ + key, value);
      return;
    }
    const std::string own = store_protocol::Writer{}.text(key).text(value).bytes();
    for (const std::string& piece :
         store_.gather(prefix_ + "mesh", member_.rank, member_.world, own, member_.timeout)) {
      store_protocol::Reader in(piece);
      std::string name(in.text());
      known_.emplace(std::move(name), in.text());
    }
  }
  std::vector<char> get(const std::string& key) override {
    const std::string& value = find(key);
    return {value.begin(), value.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, member_.timeout); }
  void wait(const std::vector<std::string>& keys, const Milliseconds&) override {
    // Gloo's timeout is meant for connecting. Gloo reads what it waits for: one request does both.
    for (const std::string& key : keys) find(key);
  }

 private:
  const std::string& find(const std::string& key) {
    const auto known = known_.find(key);
    if (known != known_.end()) return known->second;
    return known_.emplace(key, store_.get(prefix_ + key, member_.timeout)).first->second;
  }

  lockstep::Store& store_;
  std::string prefix_;
  const Membership& member_;
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

/// An interface's address: IPv4 if it has one, never link-local IPv6, which needs a scope id.
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

/// The address of the kernel's route to another host; empty if there is none. Nothing is sent.
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

/// The address that peers connect to: that of the interface LOCKSTEP_INTERFACE; else the one that
/// reaches the store's host; else, if that is this host, the one that reaches another rank's host;
/// else loopback. **Ranks** all. **Host** blocks until all have joined.
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

/// Lets the watchdog abort waits: when a connection breaks, Gloo wakes a thread only if no part of
/// its message has been transferred; otherwise it waits until Gloo's timeout, which closes all.
class AbortableTransport : public ::gloo::transport::Context {
  using UnboundBuffer = ::gloo::transport::UnboundBuffer;

 public:
  explicit AbortableTransport(std::shared_ptr<Context> transport)
      : Context(transport->rank, transport->size), transport_(std::move(transport)) {}

  std::unique_ptr<::gloo::transport::Pair>& getPair(int rank) override {
    return transport_->getPair(rank);
  }
  std::unique_ptr<::gloo::transport::Pair>& createPair(int rank) override {
    return transport_->createPair(rank);
  }
  std::unique_ptr<UnboundBuffer> createUnboundBuffer(void* data, std::size_t size) override {
    return std::make_unique<Buffer>(transport_->createUnboundBuffer(data, size), *this);
  }

  /// Aborts every wait, now and from now on.
  void abort() {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    for (UnboundBuffer* buffer : buffers_) {
      buffer->abortWaitRecv();
      buffer->abortWaitSend();
    }
  }

 private:
  /// A buffer that must not outlive its transport. The watchdog replaces Gloo's timeout.
  class Buffer : public UnboundBuffer {
   public:
    Buffer(std::unique_ptr<UnboundBuffer> buffer, AbortableTransport& transport)
        : UnboundBuffer(buffer->ptr, buffer->size),
          buffer_(std::move(buffer)),
          transport_(transport) {
      const std::lock_guard lock(transport_.mutex_);
      transport_.buffers_.push_back(this);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() override {
      const std::lock_guard lock(transport_.mutex_);
      std::erase(transport_.buffers_, this);
    }

    bool waitRecv(int* rank, Milliseconds) override {
      return going_on().waitRecv(rank, for_ever) || raise();
    }
    bool waitSend(int* rank, Milliseconds) override {
      return going_on().waitSend(rank, for_ever) || raise();
    }
    void abortWaitRecv() override { buffer_->abortWaitRecv(); }
    void abortWaitSend() override { buffer_->abortWaitSend(); }

    void send(int to, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
      going_on().send(to, slot, offset, bytes);
    }
    void recv(int from, std::uint64_t slot, std::size_t offset, std::size_t bytes) override {
      going_on().recv(from, slot, offset, bytes);
    }
    void recv(std::vector<int> from, std::uint64_t slot, std::size_t offset,
              std::size_t bytes) override {
      going_on().recv(std::move(from), slot, offset, bytes);
    }

   private:
    static constexpr Milliseconds for_ever = std::chrono::hours(24 * 365);

    /// Gloo's buffer. Throws out of Gloo's algorithms once waits are aborted.
    UnboundBuffer& going_on() const {
      const std::lock_guard lock(transport_.mutex_);
      if (transport_.aborted_) raise();
      return *buffer_;
    }
    [[noreturn]] static bool raise() { throw std::runtime_error("the wait was ended"); }

    std::unique_ptr<UnboundBuffer> buffer_;
    AbortableTransport& transport_;
  };

  std::shared_ptr<Context> transport_;
  std::mutex mutex_;  // for what follows
  std::vector<UnboundBuffer*> buffers_;
  bool aborted_ = false;
};

/// Throws if the program calls the Gloo inside LibTorch, whose version differs: it would crash.
inline void require_own_library(Rank rank) {
  // gloo::transport::tcp::CreateDevice, which both have
  void* const found = ::dlsym(RTLD_DEFAULT, "_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE");
  Dl_info info{};
  if (found == nullptr || ::dladdr(found, &info) == 0 || info.dli_fname == nullptr) return;
  const std::string_view file = info.dli_fname;
  if (file.find("libtorch") == std::string_view::npos) return;
  throw Error("Backend<Gloo>", "the program calls the Gloo inside " + std::string(file),
              "link Gloo before LibTorch (-Wl,--no-as-needed -lgloo -ltorch ...), or with CMake's "
              "lockstep::gloo",
              rank);
}

/// Tags of lockstep's own messages. Those of Gloo's algorithms begin with small numbers.
enum class OwnSlot : std::uint64_t {
  hello = 0xf1ull << 56,
  disconnect_watch = 0xf2ull << 56,
  message = 0xf3ull << 56,
  piece = 0xf4ull << 56,  // of a collective that is made of messages
};

/// Does `f()` throw? Gloo reports a lost connection so.
template <class F>
bool throws(const F& f) {
  try {
    f();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

/// RAII: blocks SIGPIPE, which Gloo's writes raise when a peer is gone, and removes a pending one.
class BrokenPipesBlocked {
 public:
  BrokenPipesBlocked() {
    sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::sigemptyset(&pipe_);
    ::sigaddset(&pipe_, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  BrokenPipesBlocked(const BrokenPipesBlocked&) = delete;
  BrokenPipesBlocked& operator=(const BrokenPipesBlocked&) = delete;
  ~BrokenPipesBlocked() {
    const timespec at_once{};
    while (!was_pending_ && ::sigtimedwait(&pipe_, nullptr, &at_once) == -1 && errno == EINTR) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t pipe_;
  sigset_t before_;
  bool was_pending_;
};

/// RAII: threads that are started meanwhile are scheduled as SCHED_BATCH: when they wake up, they
/// do not take the core from the thread that runs there. Gloo's thread would, often while that
/// thread holds a connection's lock, in the very call that woke it; it would then spin for the lock
/// until the scheduler's next tick, for milliseconds. On an idle core it still runs at once.
class StartedAsBatch {
 public:
  StartedAsBatch() : changed_(::sched_getscheduler(0) == SCHED_OTHER) { set(SCHED_BATCH); }
  StartedAsBatch(const StartedAsBatch&) = delete;
  StartedAsBatch& operator=(const StartedAsBatch&) = delete;
  ~StartedAsBatch() { set(SCHED_OTHER); }

 private:
  /// Where this is not allowed, jobs are slower and no less right.
  void set(int policy) const {
    const sched_param parameters{};
    if (changed_) static_cast<void>(::sched_setscheduler(0, policy, &parameters));
  }

  bool changed_;
};

/// Gloo's device: a thread that serves sockets, which listen on `address`.
inline std::shared_ptr<::gloo::transport::Device> make_device(const std::string& address,
                                                              Rank rank) {
  require_own_library(rank);
  try {
    const StartedAsBatch batch;
    ::gloo::transport::tcp::attr attributes;
    attributes.hostname = address;
    return without_signals([&] { return ::gloo::transport::tcp::CreateDevice(attributes); });
  } catch (const std::system_error& error) {  // of its thread; all else is an exception of Gloo's
    fail_to_start("Gloo's thread for sockets", error.what());
  } catch (const std::exception& error) {
    throw Error("Backend<Gloo>", "cannot listen on '" + address + "': " + error.what(),
                "set LOCKSTEP_INTERFACE to an interface that the other ranks can reach", rank);
  }
}

/// Does Gloo respect its timeout for connecting? Releases without `isConnected` exceed it fivefold.
template <class Pair>
concept KeepsLimits = requires(Pair& pair) { pair.isConnected(); };

class Connections : public ::gloo::rendezvous::Context {
 public:
  Connections(Rank rank, WorldSize world)
      : Context(static_cast<int>(rank.value()), static_cast<int>(world.value())) {}

  /// **Ranks** all, at about the same time. **Host** blocks until all are connected.
  template <class RendezvousStoreType>
  void connect(const std::shared_ptr<RendezvousStoreType>& rendezvous,
               std::shared_ptr<::gloo::transport::Device> device, Milliseconds timeout) {
    const BrokenPipesBlocked blocked;
    setTimeout(
        std::max(Milliseconds(1), KeepsLimits<::gloo::transport::Pair> ? timeout : timeout / 5));
    if constexpr (requires { this->connectFullMesh(*rendezvous, device); }) {
      this->connectFullMesh(*rendezvous, device);
    } else {
      this->connectFullMesh(rendezvous, device);
    }
    transport_ = transportContext_;
    abortable_ = std::make_shared<AbortableTransport>(transport_);
    transportContext_ = abortable_;
    watch_disconnects();
  }

  /// Aborts all waits and closes all connections. Thread-safe.
  void abort() {
    const BrokenPipesBlocked blocked;
    abortable_->abort();
    // Gloo closes all connections only when a wait times out.
    std::uint8_t nothing = 0;
    const auto buffer = transport_->createUnboundBuffer(&nothing, sizeof nothing);
    static_cast<void>(throws([&] { buffer->waitRecv(nullptr, Milliseconds(1)); }));
  }

  /// Is the connection to another rank lost? One thread at a time may ask.
  bool is_lost(std::size_t peer) const {
    if (static_cast<int>(peer) == rank) return false;
    if (disconnect_watches_[peer] == nullptr) return true;  // it had ended before the watch began
    disconnect_watches_[peer]->abortWaitRecv();             // so that this wait returns at once
    return throws([&] { disconnect_watches_[peer]->waitRecv(nullptr, Milliseconds(1'000)); });
  }

 private:
  /// Disconnect detection: a receive of a message that is never sent fails when a connection ends.
  void watch_disconnects() {
    disconnect_watches_.resize(static_cast<std::size_t>(size));
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      auto& wire = disconnect_watches_[static_cast<std::size_t>(peer)];
      wire = transport_->createUnboundBuffer(&never_written_, sizeof never_written_);
      const auto slot = static_cast<std::uint64_t>(OwnSlot::disconnect_watch);
      if (throws([&] { wire->recv(peer, slot, 0, sizeof never_written_); })) wire.reset();
    }
  }

  std::shared_ptr<::gloo::transport::Context> transport_;
  std::shared_ptr<AbortableTransport> abortable_;
  std::uint8_t never_written_ = 0;
  std::vector<std::unique_ptr<::gloo::transport::UnboundBuffer>> disconnect_watches_;
};

struct Hello {
  enum class State : std::uint64_t { calls, leaves, gave_up };

  std::uint64_t number = 0;  // of the call, from 1; a rank that leaves has made all before it
  State state = State::calls;
  std::uint64_t sent = 0;      // all messages that a rank that leaves has sent to the one it tells
  std::uint64_t received = 0;  // and all that it has received from that one
  Call call;
  std::uint64_t checksum = 0;  // of all but the call

  std::uint64_t computed_checksum() const {
    return Hash{}
        .number(number)
        .number(static_cast<std::uint64_t>(state))
        .number(sent)
        .number(received)
        .value();
  }
};

/// The handshake before every collective: each rank sends all others the description of its call,
/// because Gloo would combine unrelated data or write past a buffer. A hello is one small message
/// whose receive was posted in advance: it costs one network latency. Hellos are the barrier too,
/// and what a rank gives to a small collective travels with its hello, so that it needs no more.
class Handshake {
 public:
  explicit Handshake(Connections& connections)
      : connections_(connections),
        own_(static_cast<std::size_t>(connections.rank)),
        messages_(static_cast<std::size_t>(connections.size)),
        most_carried_(align_up(carried_by_all / messages_.size())),
        last_said_(messages_.size()),
        said_(room()),
        outgoing_(connections.createUnboundBuffer(said_.data(), said_.size())),
        shutdown_(
            connections.createUnboundBuffer(last_said_.data(), last_said_.size() * sizeof(Hello))) {
    for (std::size_t parity = 0; parity < 2; ++parity) {
      heard_[parity].resize(messages_.size() * room());
      incoming_[parity] =
          connections.createUnboundBuffer(heard_[parity].data(), heard_[parity].size());
    }
    const BrokenPipesBlocked blocked;
    // A rank may have died since all were connected; the first call then names it.
    for_peers([&](int peer) { static_cast<void>(throws([&] { listen_to(peer, number()); })); });
  }

  /// How many bytes a rank may give to a call with its hello.
  std::size_t most_carried() const { return most_carried_; }

  /// Every rank's hello, by rank, with which this rank's carries `data`. **Ranks** all. **Host**
  /// blocks until all have arrived.
  std::vector<Hello> exchange(const Call& call, std::span<const std::byte> data = {}) {
    const std::uint64_t number = this->number();
    // A rank that has this rank's hello may make its next call, or leave, and say so at once: the
    // receive of that is posted first.
    for_peers([&](int peer) { listen_to(peer, number + 1); });
    Hello said{number, Hello::State::calls, 0, 0, call};
    said.checksum = said.computed_checksum();
    const std::size_t bytes = sizeof said + data.size();
    std::memcpy(said_.data(), &said, sizeof said);
    if (!data.empty()) std::memcpy(said_.data() + sizeof said, data.data(), data.size());
    std::memcpy(heard_[number % 2].data() + own_ * room(), said_.data(), bytes);
    for_peers([&](int peer) { outgoing_->send(peer, slot, 0, bytes); });
    for_peers([&](int) { incoming_[number % 2]->waitRecv(); });
    for_peers([&](int) { outgoing_->waitSend(); });
    std::vector<Hello> all;
    all.reserve(messages_.size());
    for (std::size_t w = 0; w < messages_.size(); ++w)
      all.push_back(hello_of(heard_[number % 2], w));
    const auto calls = [](const Hello& one) { return one.state == Hello::State::calls; };
    if (std::all_of(all.begin(), all.end(), calls))
      next_.store(number + 1, std::memory_order_relaxed);
    return all;
  }

  /// What a rank gave to the last call with its hello, until the next call but one.
  const std::byte* carried_by(std::size_t w) const {
    return heard_[(number() - 1) % 2].data() + w * room() + sizeof(Hello);
  }

  /// The number of the current or next call.
  std::uint64_t number() const { return next_.load(std::memory_order_relaxed); }

  /// Counts a message to or from a rank, and returns its number, from 1. Thread-safe.
  std::uint64_t count_message(CollectiveKind kind, Rank peer) {
    MessageCounts& counts = messages_[peer.value()];
    return ++(kind == CollectiveKind::send ? counts.sent : counts.received);
  }

  /// Sends the shutdown message, after which this rank makes no call, and waits for the others'
  /// hellos. Returns the ranks that sent none. **Ranks** this one, outside of `exchange`.
  std::vector<Rank> send_shutdown(Hello::State state, Milliseconds limit) {
    const BrokenPipesBlocked blocked;
    for_peers([&](int peer) {
      const auto to = static_cast<std::size_t>(peer);
      Hello& said = last_said_[to];
      said = Hello{number(), state, messages_[to].sent, messages_[to].received, Call{}};
      said.checksum = said.computed_checksum();
      static_cast<void>(
          throws([&] { shutdown_->send(peer, slot, to * sizeof(Hello), sizeof(Hello)); }));
    });
    const Deadline deadline = Deadline::after(limit);
    while (!silent().empty() && !deadline.passed()) sleep_for(Milliseconds(1));
    return silent();
  }

  /// The ranks whose hello for the current or next call has not arrived.
  std::vector<Rank> silent() const {
    const std::uint64_t number = this->number();
    std::vector<Rank> ranks;
    for (std::size_t w = 0; w < messages_.size(); ++w) {
      const auto hello = arrived(hello_of(heard_[number % 2], w));
      if (w != own_ && (!hello || hello->number != number)) ranks.emplace_back(w);
    }
    return ranks;
  }

  /// The last hello of a rank that has left. It may arrive before this rank has come to the end of
  /// `exchange`, and the hello's numbers say which calls and messages that rank has made.
  std::optional<Hello> shutdown_of(std::size_t peer) const {
    for (const std::vector<std::byte>& heard : heard_) {
      const auto hello = arrived(hello_of(heard, peer));
      if (peer != own_ && hello && hello->state == Hello::State::leaves) return hello;
    }
    return std::nullopt;
  }

 private:
  struct MessageCounts {
    std::atomic<std::uint64_t> sent = 0;
    std::atomic<std::uint64_t> received = 0;
  };

  static constexpr auto slot = static_cast<std::uint64_t>(OwnSlot::hello);

  /// All ranks together give a rank at most so many bytes with their hellos.
  static constexpr std::size_t carried_by_all = 32 << 10;

  /// A hello and what it carries.
  std::size_t room() const { return sizeof(Hello) + most_carried_; }
  const Hello& hello_of(const std::vector<std::byte>& heard, std::size_t w) const {
    return *reinterpret_cast<const Hello*>(heard.data() + w * room());
  }

  /// A hello without its call; nothing if it has not arrived whole. Gloo's thread may be writing
  /// it, in any order: numbers of two hellos do not have the checksum.
  static std::optional<Hello> arrived(const Hello& heard) {
    const auto read = [](const auto& number) {  // atomic_ref takes no const, and only reads here
      using Number = std::remove_cvref_t<decltype(number)>;
      return std::atomic_ref(const_cast<Number&>(number)).load(std::memory_order_relaxed);
    };
    const Hello hello{
        read(heard.number),  read(heard.state), read(heard.sent), read(heard.received), Call{},
        read(heard.checksum)};
    return hello.checksum == hello.computed_checksum() ? std::optional(hello) : std::nullopt;
  }

  /// Posts the receive of a rank's hello of call `number`. Throws if that rank is gone.
  void listen_to(int peer, std::uint64_t number) {
    incoming_[number % 2]->recv(peer, slot, static_cast<std::size_t>(peer) * room(), room());
  }

  template <class F>
  void for_peers(const F& f) const {
    for (int i = 1; i < connections_.size; ++i) f((connections_.rank + i) % connections_.size);
  }

  Connections& connections_;
  std::size_t own_;
  std::vector<MessageCounts> messages_;  // by rank
  std::size_t most_carried_;
  std::atomic<std::uint64_t> next_ = 1;
  std::array<std::vector<std::byte>, 2> heard_;  // of calls with even and odd numbers, by rank
  std::vector<Hello> last_said_;
  std::vector<std::byte> said_;
  // Declared after the memory that Gloo's thread writes, to be destroyed first.
  std::array<std::unique_ptr<::gloo::transport::UnboundBuffer>, 2> incoming_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> outgoing_;
  std::unique_ptr<::gloo::transport::UnboundBuffer> shutdown_;
};

}  // namespace lockstep::detail::over_gloo
