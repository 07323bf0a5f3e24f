// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `store.hpp`.

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/names.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/store_connection.hpp"

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
  std::vector<std::string> texts;

  bool is_ok() const { return status == store_protocol::Status::ok; }
  std::string text() const { return texts.empty() ? std::string() : texts.front(); }
};

/// Connections to a store, and requests over them.
class StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  StoreClient(const std::string& host, std::span<const std::uint16_t> ports,
              const std::string& secret, Milliseconds timeout)
      : timeout_(timeout), host_(host), key_(derive_key(secret)) {
    const Deadline deadline = Deadline::after(timeout);
    Milliseconds pause{1};
    std::string why = "no port was given";
    do {
      for (std::uint16_t port : ports) {
        if (Descriptor socket = connect_to_store(host_, port, key_, deadline, why)) {
          port_ = port;
          idle_.push_back(std::move(socket));
          return;
        }
      }
      sleep_for(pause);
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
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// Sends a request and reads the reply. The server may hold it back for `waiting`. If no reply
  /// comes within a further while, the server is stopped or unreachable.
  StoreReply request(const StoreRequest& message, Milliseconds waiting = Milliseconds(0)) {
    if (message.bytes().size() > store_protocol::max_frame_bytes) {
      fail(message.name(), {"a request of ", message.bytes().size(), " bytes"},
           "wait for fewer keys at a time");
    }
    const Milliseconds beyond =
        std::clamp(timeout_ - waiting, Milliseconds(500), Milliseconds(5000));
    const Deadline deadline =
        waiting > Milliseconds::max() / 2 ? Deadline::never() : Deadline::after(waiting + beyond);
    std::string why;
    Descriptor socket = take_connection(deadline, why);
    if (!socket) fail_at(message.name(), "cannot be reached: ", why);
    std::string body;
    const Transfer done = exchange(socket.get(), message.bytes(), body, deadline);
    if (done == Transfer::closed) fail_at(message.name(), "closed the connection");
    if (done == Transfer::timed_out) fail_at(message.name(), "does not answer");
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(socket));
    }
    StoreReply reply;
    store_protocol::Reader reader(body);
    reply.status = static_cast<store_protocol::Status>(reader.byte());
    while (reader.ok() && !reader.at_end()) reply.texts.emplace_back(reader.text());
    if (!reader.ok()) fail_at(message.name(), "sent something that is no reply");
    if (reply.status == store_protocol::Status::refused) {
      fail(message.name(), {"'", message.key(), "': ", reply.text()},
           "use each name for one purpose, from every rank the same way");
    }
    return reply;
  }

 private:
  [[noreturn]] void fail_at(std::string_view operation, std::string_view problem,
                            std::string_view why = {}) const {
    fail(operation, {"the job's store at ", endpoint_text(host_, port_), " ", problem, why},
         "the program that hosts it, rank 0 or the launcher, has ended or is stopped: look at "
         "its output first");
  }

  Descriptor take_connection(Deadline deadline, std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        Descriptor socket = std::move(idle_.back());
        idle_.pop_back();
        return socket;
      }
    }
    return connect_to_store(host_, port_, key_, deadline, why);
  }

  Milliseconds timeout_;
  std::string host_;
  std::uint16_t port_ = 0;
  SipKey key_;
  std::mutex mutex_;
  std::vector<Descriptor> idle_;
};

}  // namespace detail

LOCKSTEP_INLINE Store::Store(const std::string& host, std::uint16_t port, const std::string& secret,
                             Milliseconds timeout)
    : Store(host, std::span(&port, 1), secret, timeout) {}

LOCKSTEP_INLINE Store::Store(const std::string& host, std::span<const std::uint16_t> ports,
                             const std::string& secret, Milliseconds timeout)
    : client_(std::make_unique<detail::StoreClient>(host, ports, secret, timeout)) {}

LOCKSTEP_INLINE Store::Store(Store&&) noexcept = default;
LOCKSTEP_INLINE Store& Store::operator=(Store&&) noexcept = default;
LOCKSTEP_INLINE Store::~Store() = default;

LOCKSTEP_INLINE std::uint16_t Store::port() const { return client_->port(); }
LOCKSTEP_INLINE Store::Milliseconds Store::timeout() const { return client_->timeout(); }
LOCKSTEP_INLINE void Store::set_timeout(Milliseconds timeout) { client_->set_timeout(timeout); }

LOCKSTEP_INLINE void Store::set(std::string_view key, std::string_view value) {
  detail::StoreRequest message(detail::store_protocol::Operation::set, "set", key);
  client_->request(message.value(value));
}

LOCKSTEP_INLINE std::string Store::get(std::string_view key, Milliseconds timeout) {
  if (auto value = try_get(key, timeout)) return *std::move(value);
  detail::fail("get", {"key '", key, "' was not set within ", detail::seconds_text(timeout)},
               "check that the rank that sets it is alive, or allow more time");
}

LOCKSTEP_INLINE std::optional<std::string> Store::try_get(std::string_view key,
                                                          Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::get, "get", key);
  const detail::StoreReply reply = client_->request(message.limit(timeout), timeout);
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
  const detail::StoreReply reply = client_->request(message, timeout);
  if (reply.is_ok()) return;
  std::vector<std::string> missing;
  for (std::size_t i = reply.texts.size(); i-- > 0;) missing.push_back(reply.texts[i]);
  detail::fail("wait",
               {"not set within ", detail::seconds_text(timeout), ": ", detail::listed(missing)},
               "check that the ranks that set them are alive, or allow more time");
}

LOCKSTEP_INLINE std::int64_t Store::add(std::string_view key, std::int64_t delta) {
  detail::StoreRequest message(detail::store_protocol::Operation::add, "add", key);
  message.u64(static_cast<std::uint64_t>(delta));
  return std::strtoll(client_->request(message).text().c_str(), nullptr, 10);
}

LOCKSTEP_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                               std::string_view desired) {
  detail::StoreRequest message(detail::store_protocol::Operation::compare_set, "compare_set", key);
  return client_->request(message.value(expected).value(desired)).text();
}

LOCKSTEP_INLINE bool Store::erase(std::string_view key) {
  return client_->request({detail::store_protocol::Operation::erase, "erase", key}).is_ok();
}

LOCKSTEP_INLINE void Store::barrier(std::string_view name, Rank rank, WorldSize world,
                                    Milliseconds timeout) {
  detail::StoreRequest message(detail::store_protocol::Operation::barrier, "barrier", name);
  message.u32(static_cast<std::uint32_t>(rank.value()));
  message.u32(static_cast<std::uint32_t>(world.value()));
  const detail::StoreReply reply = client_->request(message.limit(timeout), timeout);
  if (reply.is_ok()) return;
  detail::fail("barrier",
               {detail::listed_ranks(reply.texts), " did not come to '", name, "' within ",
                detail::seconds_text(timeout)},
               reply.texts.size() == 1 ? "look at what that rank is doing, or allow more time"
                                       : "look at what those ranks are doing, or allow more time",
               rank);
}

}  // namespace lockstep
