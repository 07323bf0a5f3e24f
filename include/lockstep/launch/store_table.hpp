// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's data, apart from sockets: keys, values, barriers, and requests that wait.

#include <charconv>
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/text.hpp"
#include "lockstep/launch/deadline.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail {

/// A client's request, as long as the client waits until keys appear, a barrier fills, or its time
/// is over.
struct StoreWait {
  store_protocol::Operation operation{};
  Deadline deadline = Deadline::never();
  /// For get the key, for barrier its name, for wait the keys that have not been set yet. Each key
  /// is removed once, even if it is erased later, so that a long list is not searched at every
  /// change.
  std::vector<std::string> keys;
  std::uint32_t rank = 0;
  bool is_waiting = false;
};

class StoreTable {
 public:
  /// Writes the reply. It stays empty if `wish` has to wait, or if the bytes are no request.
  void serve(std::string_view body, std::string& reply, StoreWait& wish) {
    store_protocol::Reader request(body);
    wish.operation = static_cast<Operation>(request.byte());
    const std::string key(request.text());
    if (key.size() > store_protocol::max_key_bytes) return;
    switch (wish.operation) {
      case Operation::set: {
        const std::string_view value = request.text();
        if (!is_value(request, value)) return;
        values_[key] = value;
        return answer(reply, Status::ok);
      }
      case Operation::get:
      case Operation::wait:
      case Operation::barrier: {
        const std::uint32_t world = read_rank(request, wish);
        wish.deadline = limit(request.u64());
        wish.keys.clear();
        if (wish.operation != Operation::wait) wish.keys.push_back(key);
        while (request.ok() && !request.at_end()) wish.keys.emplace_back(request.text());
        if (!request.ok()) return;
        if (wish.operation == Operation::barrier && !arrive(wish, world, reply)) return;
        return try_answer(reply, wish);
      }
      case Operation::add: {
        const std::uint64_t delta = request.u64();
        if (request.ok()) add_to(values_[key], delta, reply);
        return;
      }
      case Operation::compare_set: {
        const std::string_view expected = request.text();
        const std::string_view desired = request.text();
        if (is_value(request, desired)) compare_and_set(key, expected, desired, reply);
        return;
      }
      case Operation::erase:
        if (!request.ok()) return;
        return answer(reply, values_.erase(key) > 0 ? Status::ok : Status::absent);
    }
  }

  /// Answers a request that waits, if that can be done now or its time is over.
  void try_answer(std::string& reply, StoreWait& wish) {
    wish.is_waiting = false;
    if (wish.operation == Operation::barrier) {
      if (!is_open(wish)) return answer(reply, Status::ok);
    } else if (wish.operation == Operation::get) {
      const auto found = values_.find(wish.keys.front());
      if (found != values_.end()) return answer(reply, Status::ok, found->second);
    } else {
      while (!wish.keys.empty() && values_.contains(wish.keys.back())) wish.keys.pop_back();
      if (wish.keys.empty()) return answer(reply, Status::ok);
    }
    wish.is_waiting = !wish.deadline.passed();
    if (!wish.is_waiting) give_up(reply, wish);
  }

  /// Forgets a waiting request whose client has gone: it no longer counts in its barrier.
  void withdraw(const StoreWait& wish) {
    if (wish.operation != Operation::barrier || !is_open(wish)) return;
    const auto open = barriers_.find(wish.keys.front());
    open->second[wish.rank] = absent;
    if (open->second.find(present) == std::string::npos) barriers_.erase(open);
  }

 private:
  using Operation = store_protocol::Operation;
  using Status = store_protocol::Status;

  /// The marks of a barrier's ranks.
  static constexpr char absent = '-';
  static constexpr char present = '+';

  static Deadline limit(std::uint64_t milliseconds) {
    const std::uint64_t year = 366ull * 24 * 3600 * 1000;  // beyond it, Deadline says never
    return Deadline::after(std::chrono::milliseconds(milliseconds < year ? milliseconds : year));
  }

  static void answer(std::string& reply, Status status, std::string_view text = {}) {
    reply = store_protocol::Writer{}.byte(static_cast<std::uint8_t>(status)).text(text).bytes();
  }

  static bool is_value(const store_protocol::Reader& request, std::string_view value) {
    return request.ok() && value.size() <= store_protocol::max_value_bytes;
  }

  /// Reads the rank of a barrier's request, which stands before the world and the time limit.
  static std::uint32_t read_rank(store_protocol::Reader& request, StoreWait& wish) {
    if (wish.operation != Operation::barrier) return 0;
    wish.rank = request.u32();
    return request.u32();
  }

  /// Numbers are kept as text, so that `get` and `compare_set` see them too.
  static void add_to(std::string& value, std::uint64_t delta, std::string& reply) {
    std::int64_t number = 0;
    if (!value.empty()) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
      if (error != std::errc{} || end != value.data() + value.size()) {
        return answer(reply, Status::refused, "its value is not a number");
      }
    }
    value = text({static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + delta)});
    answer(reply, Status::ok, value);
  }

  void compare_and_set(const std::string& key, std::string_view expected, std::string_view desired,
                       std::string& reply) {
    const auto found = values_.find(key);
    if (found == values_.end() && !expected.empty()) return answer(reply, Status::ok, expected);
    std::string& value = found == values_.end() ? values_[key] : found->second;
    if (value == expected) value = desired;
    answer(reply, Status::ok, value);
  }

  /// Notes a rank's arrival. False if it is refused; the reply then says why.
  bool arrive(const StoreWait& wish, std::uint32_t world, std::string& reply) {
    const std::uint32_t rank = wish.rank;
    if (rank >= world || world > max_world) {
      answer(reply, Status::refused, text({"rank ", rank, " is not in a world of ", world}));
      return false;
    }
    std::string& marks = barriers_[wish.keys.front()];
    if (marks.empty()) marks.assign(world, absent);
    if (marks.size() != world) {
      answer(reply, Status::refused,
             text({"others wait in it as a world of ", marks.size(), ", and this rank counts ",
                   world}));
      return false;
    }
    if (marks[rank] == present) {
      answer(reply, Status::refused, text({"rank ", rank, " waits in it already"}));
      return false;
    }
    marks[rank] = present;
    if (marks.find(absent) == std::string::npos) barriers_.erase(wish.keys.front());
    return true;
  }

  /// Writes the reply to a request whose time is over: the keys or ranks that are missing. A
  /// barrier no longer counts it.
  void give_up(std::string& reply, const StoreWait& wish) {
    store_protocol::Writer out;
    out.byte(static_cast<std::uint8_t>(Status::missing));
    if (wish.operation == Operation::barrier) {
      const std::string& marks = barriers_[wish.keys.front()];
      for (std::size_t r = 0; r < marks.size(); ++r) {
        if (marks[r] == absent) out.text(text({r}));
      }
      withdraw(wish);
    } else {
      for (const std::string& key : wish.keys) {
        if (!values_.contains(key)) out.text(key);
      }
    }
    reply = out.bytes();
  }

  /// Whether the barrier this request waits in is still open.
  bool is_open(const StoreWait& wish) const {
    const auto open = barriers_.find(wish.keys.front());
    return open != barriers_.end() && open->second.size() > wish.rank &&
           open->second[wish.rank] == present;
  }

  static constexpr std::uint32_t max_world = 1u << 20;

  std::map<std::string, std::string> values_;
  /// Barriers that some ranks have reached, with a mark for each rank. They exist only until all
  /// have: names can be used again.
  std::map<std::string, std::string> barriers_;
};

}  // namespace lockstep::detail
