// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The launchers of a job on several nodes: they meet before any rank starts, the failure of
/// one node, or its silence, ends the ranks of all, and they agree on whether to start them again.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/names.hpp"
#include "lockstep/launch/outcome.hpp"
#include "lockstep/launch/parse.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail {

/// One node's place among those of a job.
struct NodePlace {
  std::size_t node = 0;
  std::size_t nodes = 1;
  std::size_t ranks = 1;     // on each node
  std::size_t restarts = 0;  // at most
};

/// A launcher's watch over the other nodes. Node 0 has the store and watches the other nodes, which
/// report to it in intervals, longer ones the more nodes there are; they in turn watch whether the
/// store answers. So the store has the same few requests a second for any number of nodes.
///
/// Every start of the ranks has a store, and a watch, of its own. When its ranks have ended a node
/// says how; node 0 waits for that of all nodes, or for the time limit of one that is silent, and
/// decides how the job goes on.
class NodeWatch {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Waits until every node has come. Node 0 alone decides which nodes are missing, and tells all
  /// that are there; otherwise a node that came late would only see the store vanish.
  NodeWatch(const Endpoint& meeting, const std::string& secret, NodePlace place,
            Milliseconds timeout)
      : place_(place),
        timeout_(timeout),
        interval_(std::clamp(timeout / 8, Milliseconds(20), slowest_beat(place.nodes))),
        patience_(timeout + interval_ + Milliseconds(150)),
        where_(endpoint_text(meeting.host, meeting.port)),
        store_(connect(meeting, secret, timeout)),
        news_(make_pipe()) {
    meet();
    store_.set_timeout(answer_limit);
  }

  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;

  ~NodeWatch() { stop(); }

  /// The end of a pipe that holds, as one text, why the job has failed elsewhere.
  Descriptor take_news() { return std::move(news_.read); }

  /// Starts to watch, after the ranks were started: a process that forks should have no threads.
  void start() {
    heard_.assign(place_.nodes, Heard{"", Deadline::after(patience_)});
    watcher_ = Thread(
        ThreadName{"lockstep nodes", "the thread that watches the other nodes"},
        [this] { watch(); },
        [this](const std::exception_ptr& thrown) {
          report({EndKind::over, Failure::of(thrown).problem});
        });
  }

  /// Tells the other nodes why the job ends here; the first reason counts. It does not wait for the
  /// store, which may be unreachable.
  void announce(const EndReason& why) {
    if (teller_.is_running()) return;
    // If the store cannot be reached, the other nodes find out by themselves.
    const auto tell = [this, reason = named(why)] {
      store_.compare_set(failure_key, "", reason.bytes());
    };
    try {
      teller_ = Thread(ThreadName{"lockstep tells", "the thread that tells the other nodes"}, tell,
                       [](const std::exception_ptr&) {});
    } catch (const Error&) {
      try {
        tell();                 // within `answer_limit`
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): see above
      }
    }
  }

  /// Says how this node's ranks have ended. Returns how the job has: `failed` means that all nodes
  /// start their ranks again, which they do only where `may_restart`, the same on all, is true.
  EndReason leave(const Outcome& outcome, bool may_restart) {
    EndReason mine{outcome.kind(), outcome.words()};
    if (!outcome.elsewhere || outcome.interrupted != 0) mine = named(mine);
    return place_.node == 0 ? decide(mine, may_restart) : submit(mine, may_restart);
  }

 private:
  void stop() {
    stops_ = true;
    watcher_.join();
  }

  struct Heard {
    std::string beat;
    Deadline missing;  // unless another beat comes
  };

  static constexpr const char* failure_key = "lockstep/nodes/failure";
  static constexpr const char* beat_prefix = "lockstep/nodes/beat/";
  static constexpr const char* place_prefix = "lockstep/nodes/place/";
  static constexpr const char* verdict_key = "lockstep/nodes/verdict";
  static constexpr const char* decision_key = "lockstep/nodes/decision";
  static constexpr const char* ended =
      "=";  // begins the last beat of a node, which says how it ended

  /// How long one request may take while the job runs. Many fit into the time limit, so that a
  /// short fault of the network does not end the job.
  static constexpr Milliseconds answer_limit{500};

  /// Two requests a node and interval are at most a thousand a second for the store.
  static Milliseconds slowest_beat(std::size_t nodes) {
    return std::max(Milliseconds(250), Milliseconds(2 * nodes));
  }

  static std::string name(std::size_t node) { return text({"node ", node}); }

  /// `node 1 (ranks 2 to 3)`.
  std::string name_and_ranks(std::size_t node) const {
    const std::size_t first = node * place_.ranks;
    if (place_.ranks == 1) return text({"node ", node, " (rank ", first, ")"});
    return text({"node ", node, " (ranks ", first, " to ", first + place_.ranks - 1, ")"});
  }
  /// A reason of this node's, for others.
  EndReason named(const EndReason& mine) const {
    return {mine.kind, text({name(place_.node), ": ", mine.words})};
  }
  static std::string beat_key(std::size_t node) { return text({beat_prefix, node}); }
  static std::string place_key(std::size_t node) { return text({place_prefix, node}); }

  static Store connect(const Endpoint& meeting, const std::string& secret, Milliseconds timeout) {
    try {
      return {meeting.host, meeting.port, secret, timeout};
    } catch (const Error& error) {
      fail("launch", {"node 0 did not come: ", error.problem()},
           "start node 0, whose host is that one, with the same --rendezvous and the same "
           "LOCKSTEP_SECRET, and let its firewall pass that port");
    }
  }

  std::string job_text() const {
    std::string job = text({place_.nodes, " nodes with ", place_.ranks,
                            place_.ranks == 1 ? " rank" : " ranks", " each"});
    if (place_.restarts == 0) return job;
    return text({job, " and --max-restarts ", place_.restarts});
  }

  void meet() {
    const std::string job = store_.compare_set("lockstep/nodes", "", job_text());
    if (job != job_text()) {
      fail("launch", {"this node was told of ", job_text(), ", the first that came of ", job},
           "give all nodes the same --nodes, --ranks and --max-restarts");
    }
    if (store_.add(place_key(place_.node), 1) != 1) {
      fail("launch", {"another launcher has come as ", name(place_.node)},
           "give every node its own --node-rank, and every job its own port");
    }
    const std::string verdict = place_.node == 0 ? judge() : await_verdict();
    if (verdict.empty()) return;
    fail("launch", {verdict},
         "start every node with its own --node-rank and the same --rendezvous, check that "
         "they reach that address, or allow more time with --timeout");
  }

  /// Why the job cannot start; empty when all nodes have come.
  std::string judge() {
    std::vector<std::string> keys;
    keys.reserve(place_.nodes);
    for (std::size_t n = 0; n < place_.nodes; ++n) keys.push_back(place_key(n));
    std::string verdict;
    try {
      store_.wait(keys, timeout_);
    } catch (const Error&) {
      std::set<std::string> there;
      for (const auto& [key, value] : store_.list(place_prefix)) there.insert(key);
      std::vector<std::string> missing;
      for (std::size_t n = 0; n < place_.nodes; ++n) {
        if (!there.contains(place_key(n))) missing.push_back(text({n}));
      }
      verdict = text({missing.size() == 1 ? "node " : "nodes ", listed(missing),
                      " did not come to port ", where_.substr(where_.rfind(':') + 1),
                      " of node 0 within ", seconds_text(timeout_)});
    }
    store_.set(verdict_key, verdict);
    return verdict;
  }

  std::string await_verdict() {
    try {
      // A little longer than node 0 waits, which may have started later.
      return store_.get(verdict_key, timeout_ + Milliseconds(700));
    } catch (const Error& error) {
      return text({"node 0 is there no more: ", error.problem()});
    }
  }

  /// Distinguishes a store that is lost from one that is silent for a while.
  class Loss {
   public:
    explicit Loss(const NodeWatch& watch) : watch_(watch) { answered(); }

    void answered() {
      lost_ = Deadline::after(watch_.patience_);
      refusals_ = 0;
    }
    /// After a request that began then and has failed. Connections that are refused at once stay
    /// refused.
    bool is_certain(Deadline::Clock::time_point begin) {
      const bool refused = Deadline::Clock::now() - begin < watch_.interval_ + answer_limit / 2;
      refusals_ = refused ? refusals_ + 1 : 0;
      if (refusals_ == 3 || lost_.passed()) return true;
      if (refused) sleep_for(watch_.interval_);
      return false;
    }
    EndReason reason(const Error& error) const {
      return {EndKind::over, text({watch_.name_and_ranks(0), ", which has the job's store at ",
                                   watch_.where_, ", is lost: ", error.problem()})};
    }

   private:
    const NodeWatch& watch_;
    Deadline lost_ = Deadline::never();
    int refusals_ = 0;
  };

  /// Beats until it is stopped, also while the ranks of a job that has failed are ending.
  void watch() {
    Loss loss(*this);
    for (std::size_t beats = 0; !stops_; ++beats) {
      const auto begin = Deadline::Clock::now();
      try {
        if (place_.node != 0) store_.set(beat_key(place_.node), text({beats}));
        if (failure()) {
          sleep_for(place_.node == 0 ? Milliseconds(20) : interval_ / 2);
        } else if (const auto words = store_.try_get(failure_key, interval_)) {
          report(EndReason::from_bytes(*words));
        }
        if (place_.node == 0) look_at_others();
        loss.answered();
      } catch (const Error& error) {
        if (loss.is_certain(begin)) return report(loss.reason(error));
      }
    }
  }

  /// On node 0: finds nodes that have been silent for too long, and how the others have ended.
  void look_at_others() {
    std::vector<EndReason> ends;
    std::optional<EndReason> gone;
    std::map<std::string, std::string> beats;
    for (auto& [key, beat] : store_.list(beat_prefix)) beats.emplace(key, std::move(beat));
    for (std::size_t n = 1; n < place_.nodes; ++n) {
      const std::string& beat = beats[beat_key(n)];
      if (beat.starts_with(ended)) {
        ends.push_back(EndReason::from_bytes(std::string_view(beat).substr(1)));
        continue;
      }
      Heard& heard = heard_[n];
      if (beat != heard.beat) heard = {beat, Deadline::after(patience_)};
      if (heard.missing.passed() && !gone) {
        gone =
            EndReason{EndKind::over,
                      text({name_and_ranks(n), " was not heard of for ", seconds_text(timeout_)})};
        store_.compare_set(failure_key, "", gone->bytes());
      }
    }
    const std::lock_guard lock(mutex_);
    ends_ = std::move(ends);
    gone_ = std::move(gone);
  }

  /// On node 0: how the job has ended, or whether it starts again; tells the others.
  EndReason decide(const EndReason& mine, bool may_restart) {
    const auto decided = [&]() -> std::optional<EndReason> {
      const std::lock_guard lock(mutex_);
      const bool are_all_here = ends_.size() + 1 == place_.nodes;
      // Nothing that others may say would change these.
      if (mine.kind == EndKind::over || (mine.kind == EndKind::failed && !may_restart)) {
        return mine;
      }
      if (gone_) return gone_;
      const bool is_over = failure_ && failure_->kind == EndKind::over;
      const bool is_failed = failure_ && failure_->kind == EndKind::failed;
      if (is_over || (is_failed && !may_restart)) return failure_;
      if (!are_all_here) return std::nullopt;
      EndReason job = mine;
      for (const EndReason& end : ends_) {
        if (severity(end.kind) > severity(job.kind)) job = end;
      }
      return job;
    };
    std::optional<EndReason> job = decided();
    for (; !job; job = decided()) sleep_for(Milliseconds(2));
    stop();
    try {
      store_.set(decision_key, job->bytes());
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the store is in this process
    }
    return *job;
  }

  static int severity(EndKind kind) {
    if (kind == EndKind::over) return 3;
    if (kind == EndKind::failed) return 2;
    return kind == EndKind::stopped ? 1 : 0;
  }

  /// On other nodes: tells node 0 how the ranks here have ended, and waits for its decision where
  /// that matters.
  EndReason submit(const EndReason& mine, bool may_restart) {
    stop();
    const bool matters = may_restart ? mine.kind != EndKind::over : mine.kind == EndKind::stopped;
    Loss loss(*this);
    for (bool is_told = false;;) {
      const auto begin = Deadline::Clock::now();
      try {
        if (!is_told) store_.set(beat_key(place_.node), text({ended, mine.bytes()}));
        is_told = true;
        if (!matters) return mine;
        if (const auto job = store_.try_get(decision_key, interval_)) {
          return EndReason::from_bytes(*job);
        }
        loss.answered();
      } catch (const Error& error) {
        if (!matters) return mine;  // node 0 will miss this node and say so
        if (loss.is_certain(begin)) return loss.reason(error);
      }
    }
  }

  /// The first reason for which the job ends. A node need not hear its own words: it is ending
  /// already.
  void report(const EndReason& reason) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = reason;
    }
    if (!reason.words.starts_with(text({name(place_.node), ": "}))) {
      write_all(news_.write.get(), reason.bytes());
    }
    news_.write.close();
  }

  std::optional<EndReason> failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  NodePlace place_;
  Milliseconds timeout_;
  Milliseconds interval_;
  /// How long a node may be silent: a little longer than ranks wait, whose errors name the call.
  Milliseconds patience_;
  std::string where_;
  Store store_;
  Pipe news_;
  std::mutex mutex_;
  std::optional<EndReason> failure_;  // the first
  std::optional<EndReason> gone_;     // a node that is not heard of any more
  std::vector<EndReason> ends_;       // of the other nodes that have ended
  std::atomic<bool> stops_{false};
  std::vector<Heard> heard_;  // the watcher's own
  Thread teller_;
  Thread watcher_;
};

}  // namespace lockstep::detail
