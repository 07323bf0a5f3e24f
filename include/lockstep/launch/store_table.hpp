// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the store does with requests, apart from sockets: keys, values, barriers, and
/// requests that wait.

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/launch/deadline.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep {

/// A request that was put aside until keys appear, a barrier fills, or its time is over.
struct ParkedRequest {
  store_protocol::Operation operation{};
  Deadline deadline = Deadline::never();
  /// get: the one key. wait: those not seen yet; each is taken off once, whatever happens to it
  /// later, so that a long list costs its length and not its length at every change.
  std::vector<std::string> keys;
  std::string barrier;
  std::uint32_t rank = 0;
};

class StoreTable {
 public:
  /// The reply, or nothing when the request has to wait: then `parked` says for what. Nothing and
  /// no `parked` is for requests that are no requests; their sender is not worth an answer.
  std::optional<std::string> serve(std::string_view body, std::optional<ParkedRequest>& parked) {
    using enum store_protocol::Operation;
    store_protocol::Reader request(body);
    const auto operation = static_cast<store_protocol::Operation>(request.byte());
    const std::string key(request.text());
    if (!request.ok() || key.size() > store_protocol::max_key_bytes) return std::nullopt;
    switch (operation) {
      case set: {
        std::string value(request.text());
        if (!request.ok() || value.size() > store_protocol::max_value_bytes) return std::nullopt;
        values_[key] = std::move(value);
        return reply(Status::ok);
      }
      case get: {
        ParkedRequest wish{operation, limit(request.u64()), {key}, {}, 0};
        if (!request.ok()) return std::nullopt;
        return answer_or_park(std::move(wish), parked);
      }
      case wait: {
        ParkedRequest wish{operation, limit(request.u64()), {}, {}, 0};
        while (request.ok() && !request.at_end()) wish.keys.emplace_back(request.text());
        if (!request.ok()) return std::nullopt;
        return answer_or_park(std::move(wish), parked);
      }
      case add: {
        const auto delta = request.u64();
        if (!request.ok()) return std::nullopt;
        return added(key, delta);
      }
      case compare_set: {
        const std::string_view expected = request.text();
        const std::string_view desired = request.text();
        if (!request.ok() || desired.size() > store_protocol::max_value_bytes) return std::nullopt;
        return compared(key, expected, desired);
      }
      case erase:
        return reply(values_.erase(key) > 0 ? Status::ok : Status::absent);
      case barrier: {
        const std::uint32_t rank = request.u32();
        const std::uint32_t world = request.u32();
        ParkedRequest wish{operation, limit(request.u64()), {}, key, rank};
        if (!request.ok()) return std::nullopt;
        return arrived(std::move(wish), world, parked);
      }
    }
    return std::nullopt;
  }

  /// The reply to a request that waits, if it can be given now.
  std::optional<std::string> answer(ParkedRequest& wish) {
    using enum store_protocol::Operation;
    if (wish.operation == get) {
      const auto found = values_.find(wish.keys.front());
      if (found != values_.end()) return reply(Status::ok, found->second);
    } else if (wish.operation == wait) {
      while (!wish.keys.empty() && values_.contains(wish.keys.back())) wish.keys.pop_back();
      if (wish.keys.empty()) return reply(Status::ok);
    } else if (!is_waiting(wish)) {
      return reply(Status::ok);
    }
    return std::nullopt;
  }

  /// The reply to a request whose time is over: what it still misses. A barrier goes on without it.
  std::string give_up(const ParkedRequest& wish) {
    store_protocol::Writer out;
    out.byte(static_cast<std::uint8_t>(Status::missing));
    if (wish.operation == store_protocol::Operation::barrier) {
      const Barrier& open = barriers_.at(wish.barrier);
      for (std::size_t r = 0; r < open.arrived.size(); ++r) {
        if (!open.arrived[r]) out.text(std::to_string(r));
      }
      withdraw(wish);
    } else {
      for (const std::string& key : wish.keys) {
        if (!values_.contains(key)) out.text(key);
      }
    }
    return out.bytes();
  }

  /// Forgets a waiting request whose client has gone: it no longer counts in its barrier.
  void withdraw(const ParkedRequest& wish) {
    if (wish.operation != store_protocol::Operation::barrier || !is_waiting(wish)) return;
    Barrier& open = barriers_.at(wish.barrier);
    open.arrived[wish.rank] = false;
    if (--open.count == 0) barriers_.erase(wish.barrier);
  }

 private:
  using Status = store_protocol::Status;

  /// A barrier that some have reached. It exists only until all have: names can be used again.
  struct Barrier {
    std::vector<bool> arrived;
    std::size_t count = 0;
  };

  static Deadline limit(std::uint64_t milliseconds) {
    const std::uint64_t year = 366ull * 24 * 3600 * 1000;  // beyond it, Deadline says never
    return Deadline::after(
        std::chrono::milliseconds(static_cast<std::int64_t>(std::min(milliseconds, year))));
  }

  static std::string reply(Status status, std::string_view text = {}) {
    return store_protocol::Writer{}.byte(static_cast<std::uint8_t>(status)).text(text).bytes();
  }

  std::optional<std::string> answer_or_park(ParkedRequest wish,
                                            std::optional<ParkedRequest>& parked) {
    if (auto now = answer(wish)) return now;
    if (wish.deadline.passed()) return give_up(wish);
    parked = std::move(wish);
    return std::nullopt;
  }

  /// Numbers are kept as text, so that `get` and `compare_set` see them too.
  std::string added(const std::string& key, std::uint64_t delta) {
    std::string& value = values_[key];
    std::int64_t number = 0;
    if (!value.empty()) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
      if (error != std::errc{} || end != value.data() + value.size()) {
        return reply(Status::refused, "its value is not a number");
      }
    }
    value = std::to_string(static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + delta));
    return reply(Status::ok, value);
  }

  std::string compared(const std::string& key, std::string_view expected,
                       std::string_view desired) {
    const auto found = values_.find(key);
    if (found == values_.end()) {
      if (!expected.empty()) return reply(Status::ok, expected);
      values_.emplace(key, desired);
      return reply(Status::ok, desired);
    }
    if (found->second == expected) found->second = desired;
    return reply(Status::ok, found->second);
  }

  std::optional<std::string> arrived(ParkedRequest wish, std::uint32_t world,
                                     std::optional<ParkedRequest>& parked) {
    if (wish.rank >= world || world > max_world) {
      return reply(Status::refused, "rank " + std::to_string(wish.rank) + " is not in a world of " +
                                        std::to_string(world));
    }
    Barrier& open = barriers_[wish.barrier];
    if (open.count == 0) open.arrived.assign(world, false);
    if (open.arrived.size() != world) {
      return reply(Status::refused, "others wait in it as a world of " +
                                        std::to_string(open.arrived.size()) +
                                        ", and this rank counts " + std::to_string(world));
    }
    if (open.arrived[wish.rank]) {
      return reply(Status::refused, "rank " + std::to_string(wish.rank) + " waits in it already");
    }
    open.arrived[wish.rank] = true;
    if (++open.count == world) {
      barriers_.erase(wish.barrier);
      return reply(Status::ok);
    }
    if (wish.deadline.passed()) return give_up(wish);
    parked = std::move(wish);
    return std::nullopt;
  }

  /// Whether the barrier this request waits in is still open.
  bool is_waiting(const ParkedRequest& wish) const {
    const auto open = barriers_.find(wish.barrier);
    return open != barriers_.end() && open->second.arrived.size() > wish.rank &&
           open->second.arrived[wish.rank];
  }

  static constexpr std::uint32_t max_world = 1u << 20;

  std::unordered_map<std::string, std::string> values_;
  std::map<std::string, Barrier> barriers_;
};

}  // namespace lockstep
