// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Notices that the ranks of a communicator leave for each other in the job's store: how far
/// they are, that one of them failed, and why.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/call/call_log.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/store.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail {

/// The current notice, of which the store tells every rank.
struct Notice {
  enum class Kind : std::uint8_t {
    none,
    question,  // a rank has waited for long: all say how far they are
    failed,    // `rank` has failed, with these words
    lost,      // `rank` has gone without a word
    differs,   // `rank` has made other calls than rank 0
  };

  Kind kind = Kind::none;
  Rank rank;
  std::string words;

  bool is_fault() const { return kind != Kind::none && kind != Kind::question; }

  std::string bytes() const {
    return store_protocol::Writer{}
        .byte(static_cast<std::uint8_t>(kind))
        .u32(static_cast<std::uint32_t>(rank.value()))
        .text(words)
        .bytes();
  }
  static Notice from_bytes(std::string_view bytes) {
    store_protocol::Reader in(bytes);
    const auto kind = static_cast<Kind>(in.byte());
    const Rank rank{in.u32()};
    const std::string words(in.text());
    return in.ok() ? Notice{kind, rank, words} : Notice{};
  }
};

/// One communicator's part of the store. Any thread may use it. Every request throws where the
/// store is gone.
class NoticeBoard {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// `name` is the communicator's, the same on all its ranks and no other's.
  NoticeBoard(std::shared_ptr<Store> store, const std::string& name, Rank rank)
      : store_(std::move(store)), prefix_("lockstep/notices/" + name + "/"), rank_(rank) {}

  Notice notice() const {
    const auto bytes = store_->try_get(prefix_ + "notice");
    return bytes ? Notice::from_bytes(*bytes) : Notice{};
  }

  /// The store tells of every new notice: looking costs no request.
  std::unique_ptr<StoreWatch> watch() const {
    return std::make_unique<StoreWatch>(*store_, prefix_ + "notice");
  }

  /// How long ranks wait between requests that each of them makes again and again: with many ranks
  /// so long that the store has at most a thousand of them a second.
  static Milliseconds pace(std::size_t world) { return Milliseconds(world); }

  /// Asks all ranks where they are, unless there is a fault already.
  void ask() const { post({Notice::Kind::question, rank_, ""}); }

  /// Says that this rank failed. The first fault is the one that counts: it is returned.
  Notice fail(std::string_view words) const {
    return post({Notice::Kind::failed, rank_, std::string(words.substr(0, most_words))});
  }

  /// Says that another rank has gone without a word. The first fault is returned.
  Notice report_lost(Rank gone) const { return post({Notice::Kind::lost, gone, ""}); }

  // Why a rank gives up, whether it is the first fault or not. A rank that has given a reason is
  // not the one that is lost.

  void give_reason(std::string_view words) const {
    store_->set(reason_key(rank_), words.substr(0, most_words));
  }
  std::optional<std::string> reason(Rank rank) const { return store_->try_get(reason_key(rank)); }

  /// Says that this rank's calls are not rank 0's, and shows them. The first fault counts.
  Notice differ(const CallLog& log) const {
    store_->set(prefix_ + "log", log.bytes());
    return post({Notice::Kind::differs, rank_, ""});
  }

  // Rank 0's head, with which the others compare their logs.
  void set_head(const LogHead& head) const {
    store_->set(prefix_ + "head", store_protocol::Writer{}.u64(head.calls).u64(head.hash).bytes());
  }
  LogHead head() const {
    const auto bytes = store_->try_get(prefix_ + "head");
    store_protocol::Reader in(bytes ? std::string_view(*bytes) : std::string_view());
    const std::uint64_t calls = in.u64();
    const std::uint64_t hash = in.u64();
    return in.ok() ? LogHead{calls, hash} : LogHead{};
  }

  // How far each rank is, once a rank has asked.
  void set_position(const Position& position) const {
    store_->set(prefix_ + "position/" + std::to_string(rank_.value()),
                store_protocol::Writer{}.u64(position.calls).text(position.call).bytes());
  }
  /// The positions of all ranks, as far as they have told, by one request.
  std::vector<std::optional<Position>> positions(std::size_t world) const {
    std::vector<std::optional<Position>> all(world);
    const std::string prefix = prefix_ + "position/";
    for (const auto& [key, bytes] : store_->list(prefix)) {
      const std::size_t rank = std::strtoul(key.c_str() + prefix.size(), nullptr, 10);
      store_protocol::Reader in(bytes);
      const std::uint64_t calls = in.u64();
      if (rank < world) all[rank] = Position{calls, std::string(in.text())};
    }
    return all;
  }

  /// The error that says what the ranks disagree about. Rank 0 alone compares the logs, so that all
  /// ranks name the same pair of calls.
  Error verdict(const CallLog& log, Rank differing, Milliseconds timeout) const {
    if (rank_ == Rank{0}) {
      const auto sent = SentLog::from_bytes(store_->get(prefix_ + "log", timeout));
      auto found = sent ? find_disagreement(log, *sent, differing, rank_) : std::nullopt;
      if (!found) {
        found.emplace("an earlier call",
                      "ranks disagree: rank 0 and " + rank_text(differing) +
                          " made different calls, more than " + std::to_string(CallLog::kept) +
                          " calls ago",
                      advice, rank_);
      }
      store_->set(prefix_ + "verdict",
                  store_protocol::Writer{}.text(found->operation()).text(found->problem()).bytes());
      return *found;
    }
    const std::string bytes = store_->get(prefix_ + "verdict", timeout);
    store_protocol::Reader in(bytes);
    const std::string operation(in.text());
    const std::string problem(in.text());
    return {operation, problem, advice, rank_};
  }

 private:
  static constexpr const char* advice = "let every rank make the same calls in the same order";
  static constexpr std::size_t most_words = 64 << 10;

  std::string reason_key(Rank rank) const {
    return prefix_ + "reason/" + std::to_string(rank.value());
  }

  /// A fault replaces a question; nothing replaces a fault.
  Notice post(const Notice& notice) const {
    const std::string key = prefix_ + "notice";
    const std::string bytes = notice.bytes();
    std::string there;
    while (true) {
      const std::string now = store_->compare_set(key, there, bytes);
      if (now == bytes) return notice;
      const Notice other = Notice::from_bytes(now);
      if (!notice.is_fault() || other.is_fault()) return other;
      there = now;
    }
  }

  std::shared_ptr<Store> store_;
  std::string prefix_;
  Rank rank_;
};

/// The result of `f()`; nothing if it takes longer than the limit or throws an `Error`. `f` runs in
/// a thread, which is left to itself when the time is over. A store whose host has vanished answers
/// only after seconds, and a rank that is about to fail cannot wait that long. Where no thread can
/// be started it has to: `f` then runs here.
template <class F>
auto within(std::chrono::milliseconds limit, F f) -> std::optional<decltype(f())> {
  const auto task = std::make_shared<std::packaged_task<decltype(f())()>>(std::move(f));
  auto answer = task->get_future();
  try {
    Thread(
        ThreadName{"lockstep asks", "the thread of a request"}, [task] { (*task)(); },
        [](const std::exception_ptr&) {})
        .detach();
  } catch (const Error&) {
    (*task)();
  }
  if (answer.wait_for(limit) != std::future_status::ready) return std::nullopt;
  try {
    return answer.get();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::detail
