// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `store.hpp`.

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/store_connection.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

namespace detail {

LOCKSTEP_INLINE void require_key(std::string_view name, std::string_view key) {
  if (key.size() > store_protocol::max_key_bytes)
    fail(name, {"a key of ", key.size(), " bytes"}, "keys have at most 4096");
}

/// A request: the operation, and the key that it is about. `name` is the operation's in messages.
LOCKSTEP_INLINE store_protocol::Writer store_request(store_protocol::Operation operation,
                                                     std::string_view name, std::string_view key) {
  require_key(name, key);
  store_protocol::Writer request;
  request.byte(static_cast<std::uint8_t>(operation)).text(key);
  return request;
}

LOCKSTEP_INLINE std::string_view checked_value(std::string_view name, std::string_view key,
                                               std::string_view value) {
  if (value.size() <= store_protocol::max_value_bytes) return value;
  fail(name, {"a value of ", value.size(), " bytes for key '", key, "'"},
       "values have at most 16 MiB; pass larger data through a communicator");
}

/// A time limit as requests have it.
LOCKSTEP_INLINE std::uint64_t limit_of(std::chrono::milliseconds timeout) {
  return timeout.count() > 0 ? static_cast<std::uint64_t>(timeout.count()) : 0;
}

/// A reply begins with its status; what follows depends on the operation.
LOCKSTEP_INLINE bool is_ok(std::string_view reply) {
  return reply.front() == static_cast<char>(store_protocol::Status::ok);
}
LOCKSTEP_INLINE store_protocol::Reader rest_of(std::string_view reply) {
  return store_protocol::Reader(reply.substr(1));
}
LOCKSTEP_INLINE std::vector<std::string> texts_of(std::string_view reply) {
  std::vector<std::string> all;
  store_protocol::Reader reader = rest_of(reply);
  while (reader.ok() && !reader.at_end()) all.emplace_back(reader.text());
  return all;
}

/// The connection to a store, and requests over it.
class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  StoreClient(const std::string& host, std::span<const std::uint16_t> ports,
              const std::string& secret, Milliseconds timeout)
      : host_(host), key_(derive_key(secret)) {
    const Deadline deadline = Deadline::after(timeout);
    Milliseconds pause{1};
    std::string why = "no port was given";
    do {
      for (std::uint16_t port : ports) {
        if (Descriptor socket = connect_to_store(host_, port, key_, deadline, why)) {
          port_ = port;
          connection_ = std::make_shared<StoreConnection>(std::move(socket));
          return;
        }
      }
      // Ranks that were started together do not try again together.
      const auto chance = static_cast<unsigned char>(random_bytes(1).front());
      sleep_for(pause / 2 + pause * chance / 256);
      pause = std::min(pause * 2, Milliseconds(100));
    } while (!deadline.passed());
    std::string places;
    for (std::uint16_t port : ports) {
      if (!places.empty()) places += " or ";
      places += endpoint_text(host_, port);
    }
    fail("connect",
         {"the job's store did not answer at ", places, " within ", seconds_text(timeout), " (",
          why, ")"},
         "check that rank 0 or the launcher runs there, and that all ranks were given the "
         "same address, port and secret");
  }

  std::uint16_t port() const { return port_; }

  /// Sends a request. `name` is for messages. `number` is set to the one it got.
  std::shared_ptr<StoreConnection> post(std::string_view name,
                                        const store_protocol::Writer& message, Milliseconds timeout,
                                        std::uint32_t& number) {
    if (message.bytes().size() > store_protocol::max_frame_bytes - 4) {
      fail(name, {"a request of ", message.bytes().size(), " bytes"},
           "wait for fewer keys at a time");
    }
    const Deadline deadline = Deadline::after(answer_limit(timeout));
    std::string why;
    std::shared_ptr<StoreConnection> over = connection(deadline, why);
    if (!over) fail_at(name, "cannot be reached: ", why);
    check(over, name, over->post(message.bytes(), number, deadline));
    return over;
  }

  /// Sends a request and returns the reply. The server may hold it back for `waiting`. If no reply
  /// comes within a further while, the server is stopped or unreachable.
  std::string request(std::string_view name, std::string_view key,
                      const store_protocol::Writer& message, Milliseconds timeout,
                      Milliseconds waiting = Milliseconds(0)) {
    const Deadline deadline = waiting > Milliseconds::max() / 2
                                  ? Deadline::never()
                                  : Deadline::after(waiting + answer_limit(timeout - waiting));
    std::uint32_t number = 0;
    const std::shared_ptr<StoreConnection> over = post(name, message, timeout, number);
    std::string reply;
    check(over, name, over->await(number, reply, deadline));
    require_reply(name, key, reply);
    return reply;
  }

  /// The reply to a request that was posted, if it has come.
  std::optional<std::string> look(std::string_view name, std::string_view key,
                                  const std::shared_ptr<StoreConnection>& over,
                                  std::uint32_t number) {
    std::string reply;
    const Transfer done = over->poll(number, reply);
    if (done == Transfer::timed_out) return std::nullopt;
    check(over, name, done);
    require_reply(name, key, reply);
    return reply;
  }

 private:
  static Milliseconds answer_limit(Milliseconds timeout) {
    return std::clamp(timeout, Milliseconds(500), Milliseconds(5000));
  }

  [[noreturn]] void fail_at(std::string_view operation, std::string_view problem,
                            std::string_view why = {}) const {
    fail(operation, {"the job's store at ", endpoint_text(host_, port_), " ", problem, why},
         "the program that hosts it, rank 0 or the launcher, has ended or is stopped: look at "
         "its output first");
  }

  /// Throws unless the transfer is complete. Later requests then have a new connection: one that is
  /// silent may never be heard of again, although the network is there again. Those that wait for a
  /// reply over the old one still do.
  void check(const std::shared_ptr<StoreConnection>& over, std::string_view name, Transfer done) {
    if (done == Transfer::complete) return;
    {
      const std::lock_guard lock(mutex_);
      if (connection_ == over) connection_.reset();
    }
    fail_at(name, done == Transfer::closed ? "closed the connection" : "does not answer");
  }

  void require_reply(std::string_view name, std::string_view key, std::string_view reply) const {
    if (reply.empty()) fail_at(name, "sent something that is no reply");
    if (reply.front() != static_cast<char>(store_protocol::Status::refused)) return;
    fail(name, {"'", key, "': ", rest_of(reply).text()},
         "use each name for one purpose, from every rank the same way");
  }

  std::shared_ptr<StoreConnection> connection(Deadline deadline, std::string& why) {
    const std::lock_guard lock(mutex_);
    if (!connection_) {
      if (Descriptor socket = connect_to_store(host_, port_, key_, deadline, why)) {
        connection_ = std::make_shared<StoreConnection>(std::move(socket));
      }
    }
    return connection_;
  }

  std::string host_;
  std::uint16_t port_ = 0;
  SipKey key_;
  std::mutex mutex_;
  std::shared_ptr<StoreConnection> connection_;
};

}  // namespace detail

LOCKSTEP_INLINE Store::Store(const std::string& host, std::uint16_t port, const std::string& secret,
                             Milliseconds timeout)
    : Store(host, std::span(&port, 1), secret, timeout) {}

LOCKSTEP_INLINE Store::Store(const std::string& host, std::span<const std::uint16_t> ports,
                             const std::string& secret, Milliseconds timeout)
    : timeout_(timeout),
      client_(std::make_shared<detail::StoreClient>(host, ports, secret, timeout)) {}

LOCKSTEP_INLINE Store::Store(std::shared_ptr<detail::StoreClient> client, Milliseconds timeout)
    : timeout_(timeout), client_(std::move(client)) {}

LOCKSTEP_INLINE Store::Store(Store&&) noexcept = default;
LOCKSTEP_INLINE Store& Store::operator=(Store&&) noexcept = default;
LOCKSTEP_INLINE Store::~Store() = default;

LOCKSTEP_INLINE Store Store::share() const { return {client_, timeout_}; }

LOCKSTEP_INLINE std::uint16_t Store::port() const { return client_->port(); }

LOCKSTEP_INLINE void Store::set(std::string_view key, std::string_view value) {
  auto message = detail::store_request(Operation::set, "set", key);
  message.text(detail::checked_value("set", key, value));
  client_->request("set", key, message, timeout_);
}

LOCKSTEP_INLINE std::string Store::get(std::string_view key, Milliseconds timeout) {
  if (auto value = try_get(key, timeout)) return *std::move(value);
  detail::fail("get", {"key '", key, "' was not set within ", detail::seconds_text(timeout)},
               "check that the rank that sets it is alive, or allow more time");
}

LOCKSTEP_INLINE std::optional<std::string> Store::try_get(std::string_view key,
                                                          Milliseconds timeout) {
  auto message = detail::store_request(Operation::get, "get", key);
  message.u64(detail::limit_of(timeout));
  const std::string reply = client_->request("get", key, message, timeout_, timeout);
  if (!detail::is_ok(reply)) return std::nullopt;
  return std::string(detail::rest_of(reply).text());
}

LOCKSTEP_INLINE void Store::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  auto message = detail::store_request(Operation::wait, "wait", "");
  message.u64(detail::limit_of(timeout));
  // In reverse: the server removes keys from the end of the list, and ranks tend to come in order.
  for (std::size_t i = keys.size(); i-- > 0;) {
    detail::require_key("wait", keys[i]);
    message.text(keys[i]);
  }
  const std::string reply = client_->request("wait", "", message, timeout_, timeout);
  if (detail::is_ok(reply)) return;
  std::vector<std::string> missing = detail::texts_of(reply);
  std::reverse(missing.begin(), missing.end());
  detail::fail("wait",
               {"not set within ", detail::seconds_text(timeout), ": ", detail::listed(missing)},
               "check that the ranks that set them are alive, or allow more time");
}

LOCKSTEP_INLINE std::int64_t Store::add(std::string_view key, std::int64_t delta) {
  auto message = detail::store_request(Operation::add, "add", key);
  message.u64(static_cast<std::uint64_t>(delta));
  const std::string reply = client_->request("add", key, message, timeout_);
  return std::strtoll(std::string(detail::rest_of(reply).text()).c_str(), nullptr, 10);
}

LOCKSTEP_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                               std::string_view desired) {
  auto message = detail::store_request(Operation::compare_set, "compare_set", key);
  message.text(detail::checked_value("compare_set", key, expected));
  message.text(detail::checked_value("compare_set", key, desired));
  const std::string reply = client_->request("compare_set", key, message, timeout_);
  return std::string(detail::rest_of(reply).text());
}

LOCKSTEP_INLINE bool Store::erase(std::string_view key) {
  return detail::is_ok(client_->request(
      "erase", key, detail::store_request(Operation::erase, "erase", key), timeout_));
}

namespace detail {

/// Comes to a barrier or gather, and throws for ranks that did not come in time. Returns the reply.
LOCKSTEP_INLINE std::string meet_in_store(StoreClient& client, store_protocol::Writer& message,
                                          std::string_view operation, std::string_view name,
                                          Rank rank, Store::Milliseconds limit,
                                          Store::Milliseconds timeout) {
  std::string reply = client.request(operation, name, message, limit, timeout);
  if (is_ok(reply)) return reply;
  const std::vector<std::string> missing = texts_of(reply);
  fail(operation,
       {listed_ranks(missing), " did not come to '", name, "' within ", seconds_text(timeout)},
       missing.size() == 1 ? "look at what that rank is doing, or allow more time"
                           : "look at what those ranks are doing, or allow more time",
       rank);
}

}  // namespace detail

LOCKSTEP_INLINE void Store::barrier(std::string_view name, Rank rank, WorldSize world,
                                    Milliseconds timeout) {
  auto message = detail::store_request(Operation::barrier, "barrier", name);
  message.u32(static_cast<std::uint32_t>(rank.value()));
  message.u32(static_cast<std::uint32_t>(world.value())).u64(detail::limit_of(timeout));
  detail::meet_in_store(*client_, message, "barrier", name, rank, timeout_, timeout);
}

LOCKSTEP_INLINE std::vector<std::string> Store::gather(std::string_view name, Rank rank,
                                                       WorldSize world, std::string_view value,
                                                       Milliseconds timeout) {
  auto message = detail::store_request(Operation::gather, "gather", name);
  message.u32(static_cast<std::uint32_t>(rank.value()));
  message.u32(static_cast<std::uint32_t>(world.value())).u64(detail::limit_of(timeout));
  message.text(detail::checked_value("gather", name, value));
  const std::string reply =
      detail::meet_in_store(*client_, message, "gather", name, rank, timeout_, timeout);
  detail::store_protocol::Reader in = detail::rest_of(reply);
  std::vector<std::string_view> different(std::min<std::size_t>(in.u32(), world.value()));
  for (std::string_view& text : different) text = in.text();
  std::vector<std::string> all;
  all.reserve(world.value());
  for (std::size_t r = 0; r < world.value(); ++r) {
    const std::size_t which = in.u32();
    if (which >= different.size()) {
      detail::fail("gather", {"the reply for '", name, "' is broken"}, "start the job again", rank);
    }
    all.emplace_back(different[which]);
  }
  return all;
}

namespace detail {

LOCKSTEP_INLINE StoreWatch::StoreWatch(const Store& store, std::string key)
    : key_(std::move(key)), timeout_(store.timeout()), client_(store.client_) {}

LOCKSTEP_INLINE StoreWatch::~StoreWatch() {
  if (connection_) connection_->cancel(number_);
}

LOCKSTEP_INLINE void StoreWatch::ask() {
  using store_protocol::Operation;
  auto message = store_request(known_ ? Operation::change : Operation::get, "watch", key_);
  message.u64(limit_of(std::chrono::milliseconds::max()));
  if (known_) message.text(*known_);
  connection_ = client_->post("watch", message, timeout_, number_);
}

LOCKSTEP_INLINE std::optional<std::string> StoreWatch::news() {
  if (!connection_) ask();
  std::optional<std::string> reply;
  try {
    reply = client_->look("watch", key_, connection_, number_);
  } catch (...) {
    connection_.reset();  // the next call asks again
    throw;
  }
  if (!reply) return std::nullopt;
  connection_.reset();
  known_ = std::string(rest_of(*reply).text());
  ask();
  return known_;
}

}  // namespace detail

}  // namespace lockstep

LOCKSTEP_COLD_END
