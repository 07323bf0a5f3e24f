// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store as a rank sees it: keys and values that all ranks of a job share.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/names.hpp"
#include "lockstep/launch/store_connection.hpp"

namespace lockstep {

/// A client of the job's store. Any number of threads may use one: each request takes a connection
/// of its own for as long as it lasts, an idle one or a new one. A wait is then a request like any
/// other, answered by the server the moment it can be, and never keeps another thread from its
/// request; polling in slices over one connection would cost either latency or fairness.
///
/// A request is never repeated by itself: after an error nobody knows whether an `add` was done.
class Store {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Connects, trying again until the store is there or the time is over. `timeout` is also the
  /// limit for whatever is not given its own.
  Store(const std::string& host, std::uint16_t port, const std::string& secret,
        Milliseconds timeout)
      : Store(host, std::span(&port, 1), secret, timeout) {}

  /// The same with several ports, of which one is the store's; the others are refused, silent, or
  /// do not know the secret, and are skipped.
  Store(std::string host, std::span<const std::uint16_t> ports, const std::string& secret,
        Milliseconds timeout)
      : host_(std::move(host)),
        key_(derive_key(secret)),
        timeout_(timeout),
        pool_(std::make_unique<Pool>()) {
    const Deadline deadline = Deadline::after(timeout);
    Milliseconds pause{1};
    std::string why = "no port was given";
    do {
      for (std::uint16_t port : ports) {
        if (Descriptor socket = connect_to_store(host_, port, key_, deadline, why)) {
          port_ = port;
          pool_->idle.push_back(std::move(socket));
          return;
        }
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, Milliseconds(100));
    } while (!deadline.passed());
    std::string places;
    for (std::uint16_t port : ports) {
      places += (places.empty() ? "" : " or ") + endpoint_text(host_, port);
    }
    throw Error("connect",
                "the job's store did not answer at " + places + " within " + seconds_text(timeout) +
                    " (" + why + ")",
                "check that rank 0 or the launcher runs there, and that all ranks were given the "
                "same address, port and secret");
  }

  std::uint16_t port() const { return port_; }
  Milliseconds timeout() const { return timeout_; }
  /// For requests to come. The shorter, the sooner a store that does not answer is an error.
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// Stores a value, over whatever was there.
  void set(const std::string& key, std::string_view value) {
    check_size("set", key, value);
    request("set", key, Message(Operation::set, key).text(value));
  }

  /// The value of a key, as soon as somebody has set it.
  std::string get(const std::string& key) { return get(key, timeout_); }
  std::string get(const std::string& key, Milliseconds timeout) {
    if (auto value = lookup(key, timeout)) return *std::move(value);
    throw Error("get", "key '" + key + "' was not set within " + seconds_text(timeout),
                "check that the rank that sets it is alive, or allow more time");
  }

  /// The value of a key if it has one now.
  std::optional<std::string> try_get(const std::string& key) {
    return lookup(key, Milliseconds(0));
  }

  /// The value of a key if it gets one in that time.
  std::optional<std::string> try_get(const std::string& key, Milliseconds timeout) {
    return lookup(key, timeout);
  }

  /// Waits until all keys have been set.
  void wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, Milliseconds timeout) {
    Message message(Operation::wait, "");
    message.u64(count(timeout));
    // The server takes keys off the end of the list; ranks tend to come in order.
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      check_size("wait", *key, {});
      message.text(*key);
    }
    const Reply reply = request("wait", "", message, timeout);
    if (reply.status == Status::ok) return;
    std::vector<std::string> missing = reply.texts;
    std::reverse(missing.begin(), missing.end());
    throw Error("wait", "not set within " + seconds_text(timeout) + ": " + listed(missing),
                "check that the ranks that set them are alive, or allow more time");
  }

  /// Adds to a number, which begins at 0, in one indivisible step; what it is then.
  std::int64_t add(const std::string& key, std::int64_t delta) {
    const Reply reply =
        request("add", key, Message(Operation::add, key).u64(static_cast<std::uint64_t>(delta)));
    return std::stoll(reply.text());
  }

  /// Sets `desired` if the value is `expected`, or if there is none and `expected` is empty, in one
  /// indivisible step. The value now stored; `expected` where none was and none was set.
  std::string compare_set(const std::string& key, std::string_view expected,
                          std::string_view desired) {
    check_size("compare_set", key, desired);
    check_size("compare_set", key, expected);
    return request("compare_set", key,
                   Message(Operation::compare_set, key).text(expected).text(desired))
        .text();
  }

  /// Removes a key; whether it was there.
  bool erase(const std::string& key) {
    return request("erase", key, Message(Operation::erase, key)).status == Status::ok;
  }

  /// Waits until all ranks of the world have come to the barrier of this name, which can then be
  /// used again. A rank whose time is over, or that dies, no longer counts as having come. Ranks:
  /// all must call. Host: blocks. Stream: none.
  void barrier(const std::string& name, Rank rank, WorldSize world) {
    barrier(name, rank, world, timeout_);
  }
  void barrier(const std::string& name, Rank rank, WorldSize world, Milliseconds timeout) {
    const Reply reply = request("barrier", name,
                                Message(Operation::barrier, name)
                                    .u32(static_cast<std::uint32_t>(rank.value()))
                                    .u32(static_cast<std::uint32_t>(world.value()))
                                    .u64(count(timeout)),
                                timeout);
    if (reply.status == Status::ok) return;
    const bool one = reply.texts.size() == 1;
    throw Error("barrier",
                listed_ranks(reply.texts) + " did not come to '" + name + "' within " +
                    seconds_text(timeout),
                one ? "look at what that rank is doing, or allow more time"
                    : "look at what those ranks are doing, or allow more time",
                rank);
  }

 private:
  using Operation = store_protocol::Operation;
  using Status = store_protocol::Status;
  using Writer = store_protocol::Writer;

  struct Pool {
    std::mutex mutex;
    std::vector<Descriptor> idle;
  };

  struct Message : Writer {
    Message(Operation operation, std::string_view key) {
      byte(static_cast<std::uint8_t>(operation));
      text(key);
    }
  };

  struct Reply {
    Status status{};
    std::vector<std::string> texts;

    std::string text() const { return texts.empty() ? std::string() : texts.front(); }
  };

  /// Beyond the time a request may wait at the server: when this has passed too, the server is
  /// stopped or unreachable. Who has waited for the whole limit already is told soon after it.
  Milliseconds answer_limit(Milliseconds waiting) const {
    constexpr Milliseconds most{5000};
    constexpr Milliseconds least{500};
    return std::clamp(timeout_ - waiting, least, most);
  }

  static std::uint64_t count(Milliseconds timeout) {
    return static_cast<std::uint64_t>(std::max<std::int64_t>(timeout.count(), 0));
  }

  static void check_size(const char* operation, const std::string& key, std::string_view value) {
    if (key.size() > store_protocol::max_key_bytes) {
      throw Error(operation, "a key of " + std::to_string(key.size()) + " bytes",
                  "keys have at most 4096");
    }
    if (value.size() > store_protocol::max_value_bytes) {
      throw Error(operation,
                  "a value of " + std::to_string(value.size()) + " bytes for key '" + key + "'",
                  "values have at most 16 MiB; pass larger data through a communicator");
    }
  }

  std::optional<std::string> lookup(const std::string& key, Milliseconds timeout) {
    check_size("get", key, {});
    const Reply reply =
        request("get", key, Message(Operation::get, key).u64(count(timeout)), timeout);
    if (reply.status != Status::ok) return std::nullopt;
    return reply.text();
  }

  Descriptor take_connection(Deadline deadline, std::string& why) {
    {
      const std::lock_guard lock(pool_->mutex);
      if (!pool_->idle.empty()) {
        Descriptor socket = std::move(pool_->idle.back());
        pool_->idle.pop_back();
        return socket;
      }
    }
    return connect_to_store(host_, port_, key_, deadline, why);
  }

  Reply request(const char* operation, const std::string& key, const Writer& message) {
    return request(operation, key, message, Milliseconds(0));
  }

  /// Sends a request and reads the reply; `waiting` is how long the server may hold it back.
  Reply request(const char* operation, const std::string& key, const Writer& message,
                Milliseconds waiting) {
    const auto fail = [&](const std::string& problem) -> Error {
      return {operation, "the job's store at " + endpoint_text(host_, port_) + " " + problem,
              "the program that hosts it, rank 0 or the launcher, has ended or is stopped: look at "
              "its output first"};
    };
    if (message.bytes().size() > store_protocol::max_frame_bytes) {
      throw Error(operation, "a request of " + std::to_string(message.bytes().size()) + " bytes",
                  "wait for fewer keys at a time");
    }
    const Deadline deadline = waiting > Milliseconds::max() / 2
                                  ? Deadline::never()
                                  : Deadline::after(waiting + answer_limit(waiting));
    std::string why;
    Descriptor socket = take_connection(deadline, why);
    if (!socket) throw fail("cannot be reached: " + why);
    std::string body;
    const Transfer done = exchange(socket.get(), message.bytes(), body, deadline);
    if (done == Transfer::closed) throw fail("closed the connection");
    if (done == Transfer::timed_out) throw fail("does not answer");
    {
      const std::lock_guard lock(pool_->mutex);
      pool_->idle.push_back(std::move(socket));
    }
    Reply reply;
    store_protocol::Reader reader(body);
    reply.status = static_cast<Status>(reader.byte());
    while (reader.ok() && !reader.at_end()) reply.texts.emplace_back(reader.text());
    if (!reader.ok()) throw fail("sent something that is no reply");
    if (reply.status == Status::refused) {
      throw Error(operation, "'" + key + "': " + reply.text(),
                  "use each name for one purpose, from every rank the same way");
    }
    return reply;
  }

  std::string host_;
  std::uint16_t port_ = 0;
  SipKey key_;
  Milliseconds timeout_;
  std::unique_ptr<Pool> pool_;
};

}  // namespace lockstep
