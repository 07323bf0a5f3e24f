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

/// A request, and its name for messages. All but `wait` are about one key.
class StoreRequest : public store_protocol::Writer {
 public:
  StoreRequest(store_protocol::Operation operation, std::string_view name, std::string_view key)
      : name_(name), key_(key) {
    check_key(key);
    byte(static_cast<std::uint8_t>(operation));
    text(key);
  }

  std::string_view name() const { return name_; }
  std::string_view key() const { return key_; }

  void check_key(std::string_view key) const {
    if (key.size() <= store_protocol::max_key_bytes) return;
    fail(name_, {"a key of ", key.size(), " bytes"}, "keys have at most 4096");
  }
  StoreRequest& value(std::string_view value) {
    if (value.size() > store_protocol::max_value_bytes) {
      fail(name_, {"a value of ", value.size(), " bytes for key '", key_, "'"},
           "values have at most 16 MiB; pass larger data through a communicator");
    }
    text(value);
    return *this;
  }
  StoreRequest& limit(std::chrono::milliseconds timeout) {
    u64(timeout.count() > 0 ? static_cast<std::uint64_t>(timeout.count()) : 0);
    return *this;
  }

 private:
  std::string_view name_;
  std::string_view key_;
};

struct StoreReply {
  store_protocol::Status status{};
  std::string body;

  bool is_ok() const { return status == store_protocol::Status::ok; }
  std::vector<std::string> texts() const {
    std::vector<std::string> all;
    store_protocol::Reader reader = rest();
    while (reader.ok() && !reader.at_end()) all.emplace_back(reader.text());
    return all;
  }
  std::string text() const { return std::string(rest().text()); }

  /// What follows the status.
  store_protocol::Reader rest() const {
    return store_protocol::Reader(std::string_view(body).substr(1));
  }
};

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

  /// A request that has been sent.
  struct Posted {
    std::shared_ptr<StoreConnection> connection;
    std::uint32_t number = 0;
  };

  Posted post(const StoreRequest& message, Milliseconds timeout) {
    if (message.bytes().size() > store_protocol::max_frame_bytes - 4) {
      fail(message.name(), {"a request of ", message.bytes().size(), " bytes"},
           "wait for fewer keys at a time");
    }
    const Deadline deadline = Deadline::after(answer_limit(timeout));
    std::string why;
    Posted posted{connection(deadline, why)};
    if (!posted.connection) fail_at(message.name(), "cannot be reached: ", why);
    check(posted, message, posted.connection->post(message.bytes(), posted.number, deadline));
    return posted;
  }

  /// Sends a request and reads the reply. The server may hold it back for `waiting`. If no reply
  /// comes within a further while, the server is stopped or unreachable.
  StoreReply request(const StoreRequest& message, Milliseconds timeout,
                     Milliseconds waiting = Milliseconds(0)) {
    const Deadline deadline = waiting > Milliseconds::max() / 2
                                  ? Deadline::never()
                                  : Deadline::after(waiting + answer_limit(timeout - waiting));
    const Posted posted = post(message, timeout);
    std::string body;
    check(posted, message, posted.connection->await(posted.number, body, deadline));
    return understood(message, std::move(body));
  }

  /// The reply to a request, if it has come.
  std::optional<StoreReply> look(const StoreRequest& message, const Posted& posted) {
    std::string body;
    const Transfer done = posted.connection->poll(posted.number, body);
    if (done == Transfer::timed_out) return std::nullopt;
    check(posted, message, done);
    return understood(message, std::move(body));
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
  void check(const Posted& posted, const StoreRequest& message, Transfer done) {
    if (done == Transfer::complete) return;
    {
      const std::lock_guard lock(mutex_);
      if (connection_ == posted.connection) connection_.reset();
    }
    if (done == Transfer::closed) fail_at(message.name(), "closed the connection");
    fail_at(message.name(), "does not answer");
  }

  StoreReply understood(const StoreRequest& message, std::string body) const {
    if (body.empty()) fail_at(message.name(), "sent something that is no reply");
    StoreReply reply{static_cast<store_protocol::Status>(body.front()), std::move(body)};
    if (reply.status == store_protocol::Status::refused) {
      fail(message.name(), {"'", message.key(), "': ", reply.text()},
           "use each name for one purpose, from every rank the same way");
    }
    return reply;
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
  detail::StoreRequest message(detail::store_protocol::Operation::set, "set", key);
  client_->request(message.value(value), timeout_);
}

LOCKSTEP_INLINE std::string Store::get(std::string_view key, Milliseconds timeout) {
  if (auto value = try_get(key, timeout)) return *std::move(value);
  detail::fail("get", {"key '", key, "' was not set within ", detail::seconds_text(timeout)},
               "check that the rank that sets it is alive, or allow more time");
}

LOCKSTEP_INLINE std::optional<std::string> Store::try_get(std::string_view key,
                                                          Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::get, "get", key);
  const detail::StoreReply reply = client_->request(message.limit(timeout), timeout_, timeout);
  if (!reply.is_ok()) return std::nullopt;
  return reply.text();
}

LOCKSTEP_INLINE void Store::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::wait, "wait", "");
  message.limit(timeout);
  // In reverse: the server removes keys from the end of the list, and ranks tend to come in order.
  for (std::size_t i = keys.size(); i-- > 0;) {
    message.check_key(keys[i]);
    message.text(keys[i]);
  }
  const detail::StoreReply reply = client_->request(message, timeout_, timeout);
  if (reply.is_ok()) return;
  std::vector<std::string> missing = reply.texts();
  std::reverse(missing.begin(), missing.end());
  detail::fail("wait",
               {"not set within ", detail::seconds_text(timeout), ": ", detail::listed(missing)},
               "check that the ranks that set them are alive, or allow more time");
}

LOCKSTEP_INLINE std::int64_t Store::add(std::string_view key, std::int64_t delta) {
  detail::StoreRequest message(detail::store_protocol::Operation::add, "add", key);
  message.u64(static_cast<std::uint64_t>(delta));
  return std::strtoll(client_->request(message, timeout_).text().c_str(), nullptr, 10);
}

LOCKSTEP_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                               std::string_view desired) {
  detail::StoreRequest message(detail::store_protocol::Operation::compare_set, "compare_set", key);
  return client_->request(message.value(expected).value(desired), timeout_).text();
}

LOCKSTEP_INLINE bool Store::erase(std::string_view key) {
  const detail::StoreRequest message(detail::store_protocol::Operation::erase, "erase", key);
  return client_->request(message, timeout_).is_ok();
}

namespace detail {

/// Throws for ranks that did not come to a barrier or gather in time.
LOCKSTEP_INLINE void require_all(const StoreReply& reply, const StoreRequest& message, Rank rank,
                                 std::chrono::milliseconds timeout) {
  if (reply.is_ok()) return;
  const std::vector<std::string> missing = reply.texts();
  fail(message.name(),
       {listed_ranks(missing), " did not come to '", message.key(), "' within ",
        seconds_text(timeout)},
       missing.size() == 1 ? "look at what that rank is doing, or allow more time"
                           : "look at what those ranks are doing, or allow more time",
       rank);
}

}  // namespace detail

LOCKSTEP_INLINE void Store::barrier(std::string_view name, Rank rank, WorldSize world,
                                    Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::barrier, "barrier", name);
  message.u32(static_cast<std::uint32_t>(rank.value()));
  message.u32(static_cast<std::uint32_t>(world.value()));
  message.limit(timeout);
  detail::require_all(client_->request(message, timeout_, timeout), message, rank, timeout);
}

LOCKSTEP_INLINE std::vector<std::string> Store::gather(std::string_view name, Rank rank,
                                                       WorldSize world, std::string_view value,
                                                       Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::gather, "gather", name);
  message.u32(static_cast<std::uint32_t>(rank.value()));
  message.u32(static_cast<std::uint32_t>(world.value()));
  message.limit(timeout).value(value);
  const detail::StoreReply reply = client_->request(message, timeout_, timeout);
  detail::require_all(reply, message, rank, timeout);
  detail::store_protocol::Reader in = reply.rest();
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
  StoreRequest message(known_ ? Operation::change : Operation::get, "watch", key_);
  message.limit(std::chrono::milliseconds::max());
  if (known_) message.value(*known_);
  StoreClient::Posted posted = client_->post(message, timeout_);
  connection_ = std::move(posted.connection);
  number_ = posted.number;
}

LOCKSTEP_INLINE std::optional<std::string> StoreWatch::news() {
  if (!connection_) ask();
  const StoreRequest message(store_protocol::Operation::get, "watch", key_);
  std::optional<StoreReply> reply;
  try {
    reply = client_->look(message, {connection_, number_});
  } catch (...) {
    connection_.reset();  // the next call asks again
    throw;
  }
  if (!reply) return std::nullopt;
  connection_.reset();
  known_ = reply->text();
  ask();
  return known_;
}

}  // namespace detail

}  // namespace lockstep

LOCKSTEP_COLD_END
