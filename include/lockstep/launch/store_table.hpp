// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The store's data, apart from sockets: keys, values, barriers, and requests that wait.

#include <charconv>
#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/deadline.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/store_protocol.hpp"

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

/// Serves requests in the order in which they come. What a request costs does not depend on how
/// many others wait: those are found by the key, the barrier or the time that they wait for.
class StoreTable {
 public:
  /// Serves one request. It can answer others, which waited for it. False if the bytes are no
  /// request.
  bool serve(StoreCaller from, std::string_view body, std::vector<StoreAnswer>& answers) {
    store_protocol::Reader request(body);
    const auto operation = static_cast<Operation>(request.byte());
    const std::string key(request.text());
    if (key.size() > store_protocol::max_key_bytes || waits_.contains(from)) return false;
    switch (operation) {
      case Operation::set: {
        const std::string_view value = request.text();
        if (!is_value(request, value)) return false;
        values_[key] = value;
        answers.push_back({from, reply(Status::ok)});
        wake(key, answers);
        return true;
      }
      case Operation::get:
      case Operation::wait:
      case Operation::change: {
        Wait wait{operation, limit(request.u64()), {}, "", 0};
        if (operation == Operation::change) wait.known = request.text();
        if (operation != Operation::wait) wait.keys.push_back(key);
        while (operation == Operation::wait && request.ok() && !request.at_end()) {
          wait.keys.emplace_back(request.text());
        }
        if (!request.ok()) return false;
        if (!try_answer(from, wait, answers)) hold(from, std::move(wait), answers);
        return true;
      }
      case Operation::barrier:
      case Operation::gather: {
        Wait wait{operation, Deadline::never(), {round_key(operation, key)}, "", request.u32()};
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
        if (add_to(values_[key], delta, from, answers)) wake(key, answers);
        return true;
      }
      case Operation::compare_set: {
        const std::string_view expected = request.text();
        const std::string_view desired = request.text();
        if (!is_value(request, desired)) return false;
        compare_and_set(key, expected, desired, from, answers);
        return true;
      }
      case Operation::erase:
        if (!request.ok()) return false;
        answers.push_back({from, reply(values_.erase(key) > 0 ? Status::ok : Status::absent)});
        return true;
      case Operation::list:
        if (!request.ok()) return false;
        answers.push_back({from, listing(key)});
        return true;
      case Operation::cancel: {
        const auto waiting = waits_.find({from.client, request.u32()});
        if (request.ok() && waiting != waits_.end()) drop(waiting);
        return request.ok();
      }
    }
    return false;
  }

  /// When the time of the first request that waits is over.
  Deadline next() const {
    return deadlines_.empty() ? Deadline::never() : Deadline::at(deadlines_.begin()->first);
  }

  /// Answers requests whose time is over: they get the keys or ranks that are missing.
  void expire(std::vector<StoreAnswer>& answers) {
    while (next().passed()) {
      const auto waiting = waits_.find(deadlines_.begin()->second);
      answers.push_back({waiting->first, missing_for(waiting->second)});
      drop(waiting);
    }
  }

  /// Forgets the requests of a client that has gone: it no longer counts in its barriers.
  void forget(std::uint64_t client) {
    auto waiting = waits_.lower_bound({client, 0});
    while (waiting != waits_.end() && waiting->first.client == client) drop(waiting++);
  }

  std::size_t waiting() const { return waits_.size(); }

 private:
  using Operation = store_protocol::Operation;
  using Status = store_protocol::Status;

  /// A request that waits until keys appear, a barrier fills, or its time is over.
  struct Wait {
    Operation operation{};
    Deadline deadline = Deadline::never();
    /// For get and change the key, for barrier and gather the round, for wait the keys that have
    /// not been set yet. It is woken by the last of them. Each key is removed once, even if it is
    /// erased later, so that a long list is not searched at every change.
    std::vector<std::string> keys;
    std::string known;  // the value that a change differs from
    std::uint32_t rank = 0;
  };
  using Waits = std::map<StoreCaller, Wait>;

  /// A barrier or gather that some ranks have reached. It exists only until all have: names can be
  /// used again.
  struct Round {
    std::vector<std::string> pieces;
    std::vector<char> present;
    std::size_t missing = 0;
    std::size_t bytes = 0;
  };

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

  /// Barriers and gathers have names of their own, apart from keys and from each other.
  static std::string round_key(Operation operation, std::string_view name) {
    return text({operation == Operation::barrier ? "b" : "g", name});
  }
  static bool is_round(const Wait& wait) {
    return wait.operation == Operation::barrier || wait.operation == Operation::gather;
  }
  static std::string woken_by(const Wait& wait) {
    return is_round(wait) ? wait.keys.back() : text({"=", wait.keys.back()});
  }

  // Requests that wait

  void hold(StoreCaller from, Wait wait, std::vector<StoreAnswer>& answers) {
    if (wait.deadline.passed()) {
      answers.push_back({from, missing_for(wait)});
      leave_round(wait);
      return;
    }
    sleepers_[woken_by(wait)].insert(from);
    if (wait.deadline.is_ever()) deadlines_.emplace(wait.deadline.when(), from);
    waits_.emplace(from, std::move(wait));
  }

  /// Removes a request from all lists.
  Wait take(Waits::iterator waiting) {
    const auto sleeping = sleepers_.find(woken_by(waiting->second));
    sleeping->second.erase(waiting->first);
    if (sleeping->second.empty()) sleepers_.erase(sleeping);
    if (waiting->second.deadline.is_ever()) {
      deadlines_.erase({waiting->second.deadline.when(), waiting->first});
    }
    Wait taken = std::move(waiting->second);
    waits_.erase(waiting);
    return taken;
  }
  void drop(Waits::iterator waiting) { leave_round(take(waiting)); }

  /// A key has a value, or another one.
  void wake(const std::string& key, std::vector<StoreAnswer>& answers) {
    const auto sleeping = sleepers_.find(text({"=", key}));
    if (sleeping == sleepers_.end()) return;
    const std::set<StoreCaller> woken = sleeping->second;
    for (const StoreCaller& from : woken) {
      Wait wait = take(waits_.find(from));
      if (!try_answer(from, wait, answers)) hold(from, std::move(wait), answers);
    }
  }

  /// Answers a get, wait or change if that can be done now.
  bool try_answer(StoreCaller from, Wait& wait, std::vector<StoreAnswer>& answers) const {
    if (wait.operation == Operation::wait) {
      while (!wait.keys.empty() && values_.contains(wait.keys.back())) wait.keys.pop_back();
      if (!wait.keys.empty()) return false;
      answers.push_back({from, reply(Status::ok)});
      return true;
    }
    const auto found = values_.find(wait.keys.front());
    if (found == values_.end()) return false;
    if (wait.operation == Operation::change && found->second == wait.known) return false;
    answers.push_back({from, reply(Status::ok, found->second)});
    return true;
  }

  std::string missing_for(const Wait& wait) const {
    store_protocol::Writer out;
    out.byte(static_cast<std::uint8_t>(Status::missing));
    if (is_round(wait)) {
      const auto round = rounds_.find(wait.keys.back());
      for (std::size_t r = 0; round != rounds_.end() && r < round->second.present.size(); ++r) {
        if (round->second.present[r] == 0) out.text(text({r}));
      }
    } else {
      for (const std::string& key : wait.keys) {
        if (!values_.contains(key)) out.text(key);
      }
    }
    return out.bytes();
  }

  // Values

  /// Numbers are kept as text, so that `get` and `compare_set` see them too. False if it is none.
  static bool add_to(std::string& value, std::uint64_t delta, StoreCaller from,
                     std::vector<StoreAnswer>& answers) {
    std::int64_t number = 0;
    if (!value.empty()) {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
      if (error != std::errc{} || end != value.data() + value.size()) {
        answers.push_back({from, reply(Status::refused, "its value is not a number")});
        return false;
      }
    }
    value = text({static_cast<std::int64_t>(static_cast<std::uint64_t>(number) + delta)});
    answers.push_back({from, reply(Status::ok, value)});
    return true;
  }

  void compare_and_set(const std::string& key, std::string_view expected, std::string_view desired,
                       StoreCaller from, std::vector<StoreAnswer>& answers) {
    const auto found = values_.find(key);
    if (found == values_.end() && !expected.empty()) {
      answers.push_back({from, reply(Status::ok, expected)});
      return;
    }
    std::string& value = found == values_.end() ? values_[key] : found->second;
    const bool is_expected = value == expected;
    if (is_expected) value = desired;
    answers.push_back({from, reply(Status::ok, value)});
    if (is_expected) wake(key, answers);
  }

  /// Keys that begin with a text, and their values.
  std::string listing(const std::string& prefix) const {
    store_protocol::Writer out;
    out.byte(static_cast<std::uint8_t>(Status::ok));
    for (auto found = values_.lower_bound(prefix);
         found != values_.end() && found->first.starts_with(prefix); ++found) {
      out.text(found->first).text(found->second);
      if (out.bytes().size() > store_protocol::max_frame_bytes - 64) {
        return reply(Status::refused, "the values of these keys are more than 32 MiB");
      }
    }
    return out.bytes();
  }

  // Rounds: barriers and gathers

  /// Notes a rank's arrival; true if it has to wait. The last one to come answers all.
  bool arrive(StoreCaller from, const Wait& wait, std::size_t world, std::string_view piece,
              std::vector<StoreAnswer>& answers) {
    const std::string& key = wait.keys.back();
    const auto refuse = [&](const std::string& why) {
      answers.push_back({from, reply(Status::refused, why)});
      return false;
    };
    if (wait.rank >= world || world > store_protocol::max_world) {
      return refuse(text({"rank ", wait.rank, " is not in a world of ", world}));
    }
    const auto found = rounds_.find(key);
    if (found != rounds_.end() && found->second.present.size() != world) {
      return refuse(text({"others wait in it as a world of ", found->second.present.size(),
                          ", and this rank counts ", world}));
    }
    if (found != rounds_.end() && found->second.present[wait.rank] != 0) {
      return refuse(text({"rank ", wait.rank, " waits in it already"}));
    }
    const std::size_t others = found == rounds_.end() ? 0 : found->second.bytes;
    if (others + piece.size() > store_protocol::max_gathered_bytes) {
      return refuse("all ranks together give it more than 16 MiB");
    }
    Round& round = rounds_[key];
    if (round.present.empty()) {
      round.present.assign(world, 0);
      round.pieces.resize(wait.operation == Operation::gather ? world : 0);
      round.missing = world;
    }
    round.present[wait.rank] = 1;
    round.bytes += piece.size();
    if (!round.pieces.empty()) round.pieces[wait.rank] = piece;
    if (--round.missing > 0) return true;
    const auto all = std::make_shared<const std::string>(
        round.pieces.empty() ? reply(Status::ok) : gathered(round.pieces));
    rounds_.erase(key);
    answers.push_back({from, "", all});
    const auto sleeping = sleepers_.find(key);
    if (sleeping == sleepers_.end()) return false;
    const std::set<StoreCaller> woken = sleeping->second;
    for (const StoreCaller& other : woken) {
      take(waits_.find(other));
      answers.push_back({other, "", all});
    }
    return false;
  }

  /// All pieces, each different one once, and which of them every rank gave: ranks of one host, for
  /// example, say the same of it.
  static std::string gathered(const std::vector<std::string>& pieces) {
    std::map<std::string_view, std::uint32_t> numbers;
    store_protocol::Writer texts;
    store_protocol::Writer places;
    for (const std::string& piece : pieces) {
      const auto [known, is_new] =
          numbers.emplace(piece, static_cast<std::uint32_t>(numbers.size()));
      if (is_new) texts.text(piece);
      places.u32(known->second);
    }
    return store_protocol::Writer{}
        .byte(static_cast<std::uint8_t>(Status::ok))
        .u32(static_cast<std::uint32_t>(numbers.size()))
        .raw(texts.bytes())
        .raw(places.bytes())
        .bytes();
  }

  /// A rank that has given up no longer counts in its round.
  void leave_round(const Wait& wait) {
    if (!is_round(wait)) return;
    const auto found = rounds_.find(wait.keys.back());
    if (found == rounds_.end()) return;
    Round& round = found->second;
    round.present[wait.rank] = 0;
    if (!round.pieces.empty()) {
      round.bytes -= round.pieces[wait.rank].size();
      round.pieces[wait.rank].clear();
    }
    if (++round.missing == round.present.size()) rounds_.erase(found);
  }

  std::map<std::string, std::string> values_;
  std::map<std::string, Round> rounds_;
  Waits waits_;
  std::map<std::string, std::set<StoreCaller>> sleepers_;  // by what wakes them
  std::set<std::pair<Deadline::Clock::time_point, StoreCaller>> deadlines_;
};

}  // namespace lockstep::detail
