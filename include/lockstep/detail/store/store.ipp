// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `store.hpp`.

#include <cstdlib>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/store/connection.hpp"
#include "lockstep/detail/store/store.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

LOCKSTEP_INLINE bool is_ok(std::string_view reply) {
  return reply.front() == static_cast<char>(store_protocol::Status::ok);
}
LOCKSTEP_INLINE store_protocol::Reader rest_of(std::string_view reply) {
  return store_protocol::Reader(reply.substr(1));
}

class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Request = store_protocol::Request;

  StoreClient(const std::string& host, std::span<const std::uint16_t> ports,
              const std::string& secret, Milliseconds timeout)
      : host_(host), connection_(connect(ports, derive_key(secret), timeout)) {}

  std::uint16_t port() const { return port_; }

  /// Sends a request and returns its number. `name` is the operation in messages.
  std::uint32_t post(std::string_view name, const Request& request, Milliseconds timeout) {
    if (request.key.size() > store_protocol::max_key_bytes)
      fail(name, {"a key of ", request.key.size(), " bytes"}, "keys have at most 4096");
    const std::size_t bytes = std::max(request.value.size(), request.expected.size());
    if (bytes > store_protocol::max_value_bytes) {
      fail(name, {"a value of ", bytes, " bytes for key '", request.key, "'"},
           "values have at most 16 MiB; pass larger data through a communicator");
    }
    std::uint32_t number = 0;
    const Deadline deadline = Deadline::after(answer_limit(timeout, bytes));
    check(name, connection_.post(request.bytes(), number, deadline));
    return number;
  }

  /// Returns the reply. Cancels after `waiting`; if then none comes, the server is unreachable.
  std::string request(std::string_view name, Request request, Milliseconds timeout,
                      Milliseconds waiting = Milliseconds(0)) {
    request.waits = waiting.count() > 0;
    const std::uint32_t number = post(name, request, timeout);
    std::string reply;
    Transfer done = Transfer::timed_out;
    if (request.waits) {
      done = connection_.await(number, reply, Deadline::after(waiting));
      if (done == Transfer::timed_out) connection_.cancel(number);
    }
    // As long as a large reply is under way, the server is there.
    std::uint64_t before = ~std::uint64_t{0};
    while (done == Transfer::timed_out && connection_.received() != before) {
      before = connection_.received();
      const Milliseconds limit = answer_limit(timeout - waiting, request.value.size());
      done = connection_.await(number, reply, Deadline::after(limit));
    }
    if (done == Transfer::timed_out) connection_.forget(number);
    return checked(name, request.key, done, std::move(reply));
  }

  /// Cancels a posted request, whose reply is dropped.
  void cancel(std::uint32_t number) {
    connection_.forget(number);
    connection_.cancel(number);
  }

  /// A barrier is a gather of empty values, in a namespace of its own.
  std::vector<std::string> gather(std::string_view operation, std::string_view name, Rank rank,
                                  WorldSize world, std::string_view value, Milliseconds timeout,
                                  Milliseconds waiting) {
    const std::string key = text({operation, "/", name});
    const std::string reply = request(
        operation,
        {store_protocol::Operation::gather, key, value, "", 0,
         static_cast<std::uint32_t>(rank.value()), static_cast<std::uint32_t>(world.value())},
        timeout, waiting);
    store_protocol::Reader in = rest_of(reply);
    std::vector<std::string> all;
    if (!is_ok(reply)) {
      while (in.ok() && !in.at_end()) all.emplace_back(in.text());
      fail(operation,
           {listed_ranks(all), " did not come to '", name, "' within ", seconds_text(waiting)},
           all.size() == 1 ? "look at what that rank is doing, or allow more time"
                           : "look at what those ranks are doing, or allow more time",
           rank);
    }
    std::vector<std::string_view> different(std::min<std::size_t>(in.u32(), world.value()));
    for (std::string_view& piece : different) piece = in.text();
    all.reserve(world.value());
    for (std::size_t r = 0; r < world.value(); ++r) {
      const std::size_t which = different.size() == 1 ? 0 : in.u32();
      if (!in.ok() || which >= different.size())
        fail(operation, {"the reply for '", name, "' is broken"}, "start the job again", rank);
      all.emplace_back(different[which]);
    }
    return all;
  }

  /// The reply to a posted request, if it has come.
  std::optional<std::string> look(std::string_view name, std::string_view key,
                                  std::uint32_t number) {
    std::string reply;
    const Transfer done = connection_.await(number, reply, Deadline::after(Milliseconds(0)));
    if (done == Transfer::timed_out) return std::nullopt;
    return checked(name, key, done, std::move(reply));
  }

 private:
  StoreSocket connect(std::span<const std::uint16_t> ports, SipKey key, Milliseconds timeout) {
    const Deadline deadline = Deadline::after(timeout);
    Milliseconds pause{1};
    std::string why = "no port was given";
    do {
      for (std::uint16_t port : ports) {
        port_ = port;
        if (StoreSocket socket = connect_to_store(host_, port, key, deadline, why)) return socket;
      }
      // Random backoff, because ranks start together.
      const auto chance = static_cast<unsigned char>(random_bytes(1).front());
      sleep_for(pause / 2 + pause * chance / 256);
      pause = std::min(pause * 2, Milliseconds(100));
    } while (!deadline.passed());
    std::string endpoints;
    for (std::uint16_t port : ports) {
      if (!endpoints.empty()) endpoints += " or ";
      endpoints += endpoint_text(host_, port);
    }
    fail("connect",
         {"the job's store did not answer at ", endpoints, " within ", seconds_text(timeout), " (",
          why, ")"},
         "check that rank 0 or the launcher runs there, and that all ranks were given the "
         "same address, port and secret");
  }

  /// How long a server may take for a message. Both sides hash a large one, maybe on a busy
  /// machine.
  static Milliseconds answer_limit(Milliseconds timeout, std::size_t bytes) {
    return std::clamp(timeout, Milliseconds(500), Milliseconds(5000)) +
           Milliseconds(1000) * (bytes >> 20);
  }

  [[noreturn]] void fail_at(std::string_view operation, std::string_view problem) const {
    fail(operation, {"the job's store at ", endpoint_text(host_, port_), " ", problem},
         "the program that hosts it, rank 0 or the launcher, has ended or is stopped: look at "
         "its output first");
  }

  void check(std::string_view name, Transfer done) const {
    if (done == Transfer::complete) return;
    if (done == Transfer::forged) {
      fail(name,
           {"the job's store at ", endpoint_text(host_, port_),
            " answered with a frame that was altered or replayed on its way"},
           "run the job in a private network or a tunnel");
    }
    fail_at(name, done == Transfer::closed ? "closed the connection" : "does not answer");
  }

  /// The reply, unless it is missing or rejects the request.
  std::string checked(std::string_view name, std::string_view key, Transfer done,
                      std::string reply) const {
    check(name, done);
    if (reply.empty()) fail_at(name, "sent something that is no reply");
    if (reply.front() != static_cast<char>(store_protocol::Status::rejected)) return reply;
    // Without the prefix that `gather` adds.
    if (key.starts_with(text({name, "/"}))) key.remove_prefix(name.size() + 1);
    fail(name, {"'", key, "': ", rest_of(reply).text()},
         "use each name for one purpose, from every rank the same way");
  }

  std::string host_;
  std::uint16_t port_ = 0;
  StoreConnection connection_;
};

}  // namespace detail

LOCKSTEP_INLINE Store::Store(const std::string& host, std::uint16_t port, const std::string& secret,
                             Milliseconds timeout)
    : Store(host, std::span(&port, 1), secret, timeout) {}

LOCKSTEP_INLINE Store::Store(const std::string& host, std::span<const std::uint16_t> ports,
                             const std::string& secret, Milliseconds timeout)
    : timeout_(timeout),
      client_(std::make_shared<detail::StoreClient>(host, ports, secret, timeout)) {}

LOCKSTEP_INLINE std::uint16_t Store::port() const { return client_->port(); }

LOCKSTEP_INLINE void Store::set(std::string_view key, std::string_view value) {
  client_->request("set", {Operation::set, key, value}, timeout_);
}

LOCKSTEP_INLINE std::string Store::get(std::string_view key, std::optional<Milliseconds> limit) {
  const Milliseconds waiting = limit.value_or(timeout_);
  if (auto value = try_get(key, waiting)) return *std::move(value);
  detail::fail("get", {"key '", key, "' was not set within ", detail::seconds_text(waiting)},
               "check that the rank that sets it is alive, or allow more time");
}

LOCKSTEP_INLINE std::optional<std::string> Store::try_get(std::string_view key,
                                                          Milliseconds limit) {
  const std::string reply = client_->request("get", {Operation::get, key}, timeout_, limit);
  if (!detail::is_ok(reply)) return std::nullopt;
  return std::string(detail::rest_of(reply).text());
}

LOCKSTEP_INLINE void Store::wait(const std::vector<std::string>& keys,
                                 std::optional<Milliseconds> limit) {
  const Milliseconds waiting = limit.value_or(timeout_);
  const auto deadline = detail::Deadline::after(waiting);
  std::vector<std::string> missing;
  for (const std::string& key : keys) {
    const Milliseconds left = deadline.is_ever() ? Milliseconds(deadline.poll_timeout()) : waiting;
    if (!try_get(key, left)) missing.push_back(key);
  }
  if (missing.empty()) return;
  detail::fail("wait",
               {"not set within ", detail::seconds_text(waiting), ": ", detail::listed(missing)},
               "check that the ranks that set them are alive, or allow more time");
}

LOCKSTEP_INLINE std::int64_t Store::add(std::string_view key, std::int64_t delta) {
  const auto number = static_cast<std::uint64_t>(delta);
  const std::string reply =
      client_->request("add", {Operation::add, key, "", "", number}, timeout_);
  return std::strtoll(std::string(detail::rest_of(reply).text()).c_str(), nullptr, 10);
}

LOCKSTEP_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                               std::string_view desired) {
  const std::string reply =
      client_->request("compare_set", {Operation::compare_set, key, desired, expected}, timeout_);
  return std::string(detail::rest_of(reply).text());
}

LOCKSTEP_INLINE bool Store::erase(std::string_view key) {
  return detail::is_ok(client_->request("erase", {Operation::erase, key}, timeout_));
}

LOCKSTEP_INLINE void Store::barrier(std::string_view name, Rank rank, WorldSize world,
                                    std::optional<Milliseconds> limit) {
  client_->gather("barrier", name, rank, world, "", timeout_, limit.value_or(timeout_));
}

LOCKSTEP_INLINE std::vector<std::string> Store::gather(std::string_view name, Rank rank,
                                                       WorldSize world, std::string_view value,
                                                       std::optional<Milliseconds> limit) {
  return client_->gather("gather", name, rank, world, value, timeout_, limit.value_or(timeout_));
}

namespace detail {

LOCKSTEP_INLINE StoreWatch::StoreWatch(const Store& store, std::string key)
    : key_(std::move(key)), store_(store.share()) {}

LOCKSTEP_INLINE StoreWatch::~StoreWatch() {
  if (pending_) store_.client_->cancel(*pending_);
}

LOCKSTEP_INLINE std::uint32_t StoreWatch::ask() {
  using store_protocol::Operation;
  store_protocol::Request request{Operation::get, key_};
  if (known_) request.operation = Operation::change;
  if (known_) request.value = *known_;
  request.waits = true;
  return pending_.emplace(store_.client_->post("watch", request, store_.timeout()));
}

LOCKSTEP_INLINE std::optional<std::string> StoreWatch::news() {
  const std::uint32_t pending = pending_ ? *pending_ : ask();
  const std::optional<std::string> reply = store_.client_->look("watch", key_, pending);
  if (!reply) return std::nullopt;
  pending_.reset();
  known_ = std::string(rest_of(*reply).text());
  ask();
  return known_;
}

}  // namespace detail

}  // namespace lockstep

LOCKSTEP_COLD_END
