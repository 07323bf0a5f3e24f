// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Makes calls through Gloo: ranks compare the call, Gloo's algorithm runs, and its
/// exceptions become errors that say what happened.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/gloo/connections.hpp"
#include "lockstep/comm/backends/gloo/handshake.hpp"
#include "lockstep/comm/backends/gloo/rendezvous.hpp"
#include "lockstep/comm/call/fault_channel.hpp"
#include "lockstep/comm/call/messages.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/comm/call/queue.hpp"
#include "lockstep/comm/call/watchdog.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail::over_gloo {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// The arguments with which a rank joins a communicator, whose `name` is unique in the job.
struct JoinOptions {
  Rank rank;
  WorldSize world;
  std::string name;
  std::shared_ptr<Store> store;
  std::shared_ptr<::gloo::transport::Device> device;
  Milliseconds timeout;
};

class Engine {
 public:
  /// **Ranks** all. **Host** blocks until all are connected.
  explicit Engine(JoinOptions joined)
      : joined_(std::move(joined)),
        timeout_(joined_.timeout),
        board_(joined_.store, "gloo/" + joined_.name, joined_.rank),
        connections_(std::make_shared<Connections>(joined_.rank, joined_.world)) {
    const std::string prefix = "lockstep/gloo/" + joined_.name + "/";
    try {
      joined_.store->barrier(prefix + "all", joined_.rank, joined_.world, joined_.timeout);
      connections_->connect(std::make_shared<MeetingStore>(*joined_.store, prefix, joined_.rank,
                                                           joined_.world, joined_.timeout),
                            joined_.device, joined_.timeout);
      require_all_connected();
      // A rank that fails now would look like a network on which the others cannot connect.
      joined_.store->barrier(prefix + "connected", joined_.rank, joined_.world, joined_.timeout);
    } catch (const Error& error) {
      throw error.on(joined_.rank);
    } catch (const std::exception& error) {
      throw Error("Backend<Gloo>", std::string("the ranks cannot connect: ") + error.what(),
                  "let the hosts reach each other's ports, or set LOCKSTEP_INTERFACE to an "
                  "interface on which they do",
                  joined_.rank);
    }
    roll_ = std::make_unique<RollCall>(*connections_);
  }

  const JoinOptions& joined() const { return joined_; }
  Rank rank() const { return joined_.rank; }
  std::size_t world() const { return joined_.world.value(); }
  Milliseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Milliseconds timeout) { timeout_.store(timeout, std::memory_order_relaxed); }
  std::string next_group_name() { return joined_.name + "/" + std::to_string(groups_++); }

  const std::shared_ptr<Connections>& connections() const { return connections_; }
  RollCall& roll() { return *roll_; }
  PendingCalls& pending() { return pending_; }
  std::optional<PendingCall> waiting() const { return pending_.oldest(); }
  CallQueue& queue() { return queue_; }
  const NoticeBoard& board() const { return board_; }

  Error unexplained(const std::string& operation, const std::string& words) const {
    return {operation, "Gloo failed: " + words, "look at the other ranks' output", rank()};
  }

  // Calls

  /// Compares the call over ranks, and runs `work()` only if all make the same call. **Ranks** all,
  /// in the same order. **Host** blocks.
  template <class Work>
  void collective(const Call& call, const Work& work) {
    make(call, std::nullopt, [&](PendingCalls::Entry entry) {
      verify(call, roll_->exchange(call));
      pending_.agree(entry);
      work();
    });
  }

  /// Runs `work()`, a message to or from one other rank. Nothing is compared. **Host** blocks.
  template <class Work>
  void message(const Call& call, Rank peer, const Work& work) {
    make(call, peer, [&](PendingCalls::Entry) { work(); });
  }

  /// The number of the collective that is under way, for Gloo to tell messages apart.
  std::uint32_t tag() const { return static_cast<std::uint32_t>(roll_->number()); }

  // Faults

  /// Notes the fault, if it is the first, tells the others `words`, and ends all connections. The
  /// words come first, so that a rank that notices the end finds them.
  void fail(const Error& error, std::string_view words) {
    tell([words = std::string(words)](const NoticeBoard& board) {
      board.give_reason(words);
      return board.fail(words);
    });
    end(error);
  }
  void fail(const Error& error) { fail(error, error.text()); }
  /// Ends what is in flight, and tells the others why.
  void give_up(std::string_view reason = ended_by_exception) {
    if (is_broken()) return;
    fail(gave_up("Gloo's communicator '" + joined_.name + "'", reason, rank()), reason);
  }
  bool is_broken() const { return pending_.is_broken(); }
  /// Notes a fault of which the other ranks know already. They must not blame this rank, although
  /// its connections end now.
  void fail_as_consequence(const Error& error) {
    tell([words = std::string(error.text())](const NoticeBoard& board) {
      board.give_reason(words);
      return Notice{};
    });
    end(error);
  }

  /// The error that explains a failure. A rank that has failed by itself has said so on the board.
  /// A rank that ended without a word is reported there, so that all ranks name the same one.
  Error explain(const std::string& operation, const std::vector<Rank>& lost,
                const std::string& words) const {
    const auto notice =
        tell([lost](const NoticeBoard& board) { return find_culprit(board, lost); }, loss_limit);
    if (notice && notice->kind == Notice::Kind::failed && notice->rank != rank())
      return rank_failed(operation, notice->rank, notice->words, rank());
    if (notice && notice->kind == Notice::Kind::lost)
      return rank_failed(operation, notice->rank, "its connection ended without a word", rank());
    if (!lost.empty()) {
      return rank_vanished(operation, "the connection to " + rank_text(lost.front()) + " ended",
                           rank());
    }
    return unexplained(operation, words);
  }

  // The end

  void drain() { queue_.drain(); }
  /// When this rank closes its sockets, TCP may lose messages that are still on their way. So the
  /// rank waits until the others say farewell or make their next call, or a limit.
  void close() {
    if (!is_broken()) roll_->say_farewell(Greeting::State::leaves, farewell_limit);
  }
  /// A failed engine has ended its connections already.
  static void abort() {}

  /// The result of `f(board)`; nothing if the store does not answer soon.
  template <class F>
  std::optional<Notice> tell(F f, Milliseconds limit = answer_limit) const {
    if (world() == 1) return std::nullopt;
    return within(limit, [board = board_, f = std::move(f)] { return f(board); });
  }

 private:
  void end(const Error& error) {
    pending_.note(error);
    connections_->abort();
  }

  /// A rank that ends while the others connect is named as one that ends in a call.
  void require_all_connected() {
    std::vector<Rank> lost;
    for (std::size_t w = 0; w < world(); ++w)
      if (connections_->is_lost(w)) lost.emplace_back(w);
    if (lost.empty()) return;
    const Error error = explain("joining Gloo's communicator '" + joined_.name + "'", lost, "");
    fail_as_consequence(error);
    throw Error(error);
  }

  /// An error comes within a second of the time limit: two answers of the store fit.
  static constexpr Milliseconds answer_limit{400};
  /// A lost connection is noticed long before the time limit: on a busy host the store may take
  /// longer to say whose fault it is.
  static constexpr Milliseconds loss_limit{1'500};
  static constexpr Milliseconds explanation_limit{3'000};
  static constexpr Milliseconds farewell_limit{2'000};

  /// Two sides of a broken network can report each other. So a report counts only if this rank has
  /// lost the reported rank too, and if that rank has not said why it gave up, which ranks do
  /// before they end their connections.
  static Notice find_culprit(const NoticeBoard& board, const std::vector<Rank>& lost) {
    const auto is_gone = [&](Rank rank) {
      return std::find(lost.begin(), lost.end(), rank) != lost.end() && !board.reason(rank);
    };
    Notice notice = board.notice();
    const auto gone = std::find_if(lost.begin(), lost.end(), is_gone);
    if (!notice.is_fault() && gone != lost.end()) notice = board.report_lost(*gone);
    if (notice.kind != Notice::Kind::lost || is_gone(notice.rank)) return notice;
    if (gone != lost.end()) return {Notice::Kind::lost, *gone, ""};
    if (lost.empty()) return {};
    return {Notice::Kind::failed, lost.front(), board.reason(lost.front()).value_or("")};
  }

  template <class Work>
  void make(const Call& call, std::optional<Rank> peer, const Work& work) {
    pending_.raise_fault();
    const BrokenPipesBlocked blocked;
    struct Entered {
      PendingCalls& pending;
      PendingCalls::Entry entry;
      ~Entered() { pending.end(entry); }
    };
    const Entered entered{pending_, pending_.begin(call, peer)};
    try {
      work(entered.entry);
    } catch (const Error& error) {
      fail(error);
    } catch (const std::exception& failure) {
      pending_.raise_explained(failure.what(), explanation_limit,
                               unexplained(call.text(), failure.what()));
    }
    pending_.raise_fault();
  }

  /// All ranks compare the same greetings and name the same pair.
  void verify(const Call& call, const std::vector<Greeting>& greetings) const {
    for (std::size_t w = 0; w < greetings.size(); ++w) {
      if (greetings[w].state == Greeting::State::leaves)
        throw rank_left(call.text(), Rank{w}, rank());
      if (greetings[w].state == Greeting::State::gave_up)
        throw std::runtime_error("rank " + std::to_string(w) + " gave up");
    }
    const auto error = find_disagreement(
        greetings[0].number - 1, greetings.size(),
        [&](std::size_t w) -> const Call& { return greetings[w].call; }, rank());
    if (error) throw Error(*error);
  }

  JoinOptions joined_;
  std::atomic<Milliseconds> timeout_;
  NoticeBoard board_;
  std::shared_ptr<Connections> connections_;
  std::unique_ptr<RollCall> roll_;
  PendingCalls pending_;
  std::size_t groups_ = 0;
  CallQueue queue_;  // ends first: its calls use all of the above
};

/// The watchdog's look at Gloo's connections.
class Probe {
 public:
  using Engine = over_gloo::Engine;
  static constexpr ThreadName thread{"lockstep gloo", "the thread that watches Gloo's calls"};
  static constexpr const char* backend = "Backend<Gloo>";
  static constexpr Milliseconds tick{50};

  explicit Probe(Engine& engine) : engine_(engine) {}

  void poll() {
    const auto now = engine_.waiting();
    if (!now) return;
    if (const auto gone = left_without(*now)) {
      engine_.fail(rank_left(now->call.text(), *gone, engine_.rank()));
      return;
    }
    const auto complaint = engine_.pending().complaint();
    std::vector<Rank> lost = lost_ranks(*now);
    if (complaint && lost.empty()) {  // Gloo tells one buffer after the other
      std::this_thread::sleep_for(Milliseconds(20));
      lost = lost_ranks(*now);
    }
    if (complaint || !lost.empty())
      engine_.fail_as_consequence(engine_.explain(now->call.text(), lost, complaint.value_or("")));
  }

  Error time_over(const PendingCall& now) {
    std::vector<Rank> missing;
    if (now.peer) {
      missing = {*now.peer};
    } else if (!now.agreed) {
      missing = engine_.roll().silent();
    } else {
      missing = engine_.roll().say_farewell(Greeting::State::gave_up, last_words);
    }
    std::vector<std::string> names;
    names.reserve(missing.size());
    for (Rank rank : missing) names.push_back(std::to_string(rank.value()));
    return time_is_over(
        now.call.text(), engine_.timeout(),
        missing.empty() ? std::string("the network; all ranks are there") : listed_ranks(names),
        engine_.rank());
  }

 private:
  /// At the time limit, ranks that wait for another rank have this long to tell each other so.
  static constexpr Milliseconds last_words{400};

  /// The ranks whose connection has ended although this call needs it. A rank that has said
  /// farewell has done its part in all earlier calls.
  std::vector<Rank> lost_ranks(const PendingCall& now) {
    std::vector<Rank> lost;
    for (std::size_t w = 0; w < engine_.world(); ++w) {
      if (now.peer && *now.peer != Rank{w}) continue;
      if (engine_.connections()->is_lost(w) && !engine_.roll().has_left(w)) lost.emplace_back(w);
    }
    return lost;
  }

  std::optional<Rank> left_without(const PendingCall& now) {
    for (std::size_t w = 0; w < engine_.world(); ++w) {
      if (now.peer ? *now.peer != Rank{w} : now.agreed) continue;
      if (engine_.roll().has_left(w)) return Rank{w};
    }
    return std::nullopt;
  }

  Engine& engine_;
};

using WatchedEngine = CallWatchdog<Probe>;

}  // namespace lockstep::detail::over_gloo
