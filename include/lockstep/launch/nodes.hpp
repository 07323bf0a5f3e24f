// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The launchers of a job on several nodes: they meet before any rank starts, and the failure
/// of one node, or its silence, ends the job on all.

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
#include "lockstep/launch/parse.hpp"
#include "lockstep/launch/socket.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail {

/// One node's place among those of a job.
struct NodePlace {
  std::size_t node = 0;
  std::size_t nodes = 1;
  std::size_t ranks = 1;  // on each node
};

/// A launcher's watch over the other nodes. Node 0 has the store and watches the other nodes, which
/// report to it in intervals, longer ones the more nodes there are; they in turn watch whether the
/// store answers. So the store has the same few requests a second for any number of nodes.
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
        "lockstep nodes", [this] { watch(); },
        [this](const std::exception_ptr& thrown) { report(Failure::of(thrown).problem); });
  }

  /// Tells the other nodes why the job ends here; the first reason counts. It does not wait for the
  /// store, which may be unreachable.
  void announce(const std::string& why) {
    if (teller_.is_running()) return;
    // If the store cannot be reached, the other nodes find out by themselves.
    teller_ = Thread(
        "lockstep tells",
        [this, words = text({name(place_.node), ": ", why})] {
          store_.compare_set(failure_key, "", words);
        },
        [](const std::exception_ptr&) {});
  }

  /// Says that this node's ranks have ended well. Node 0, which has the store, waits for the other
  /// nodes. Returns why the job has failed elsewhere, if it has.
  std::optional<std::string> leave() {
    if (place_.node != 0) {
      stop();
      try {
        store_.set(beat_key(place_.node), done);
      } catch (const Error&) {
        return std::nullopt;  // node 0 cannot be reached: it will miss this node and say so
      }
      return std::nullopt;
    }
    while (!are_all_done_ && !failure()) sleep_for(Milliseconds(2));
    return failure();
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
  static constexpr const char* done = "done";

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
    return text({place_.nodes, " nodes with ", place_.ranks,
                 place_.ranks == 1 ? " rank each" : " ranks each"});
  }

  void meet() {
    const std::string job = store_.compare_set("lockstep/nodes", "", job_text());
    if (job != job_text()) {
      fail("launch", {"this node was told of ", job_text(), ", the first that came of ", job},
           "give all nodes the same --nodes and --ranks");
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

  void watch() {
    Deadline lost = Deadline::after(patience_);
    int refusals = 0;
    for (std::size_t beats = 0; !stops_; ++beats) {
      const auto begin = Deadline::Clock::now();
      try {
        if (place_.node != 0) store_.set(beat_key(place_.node), text({beats}));
        if (const auto words = store_.try_get(failure_key, interval_)) return report(*words);
        if (place_.node == 0) look_at_others();
        lost = Deadline::after(patience_);
        refusals = 0;
      } catch (const Error& error) {
        // Silence may be temporary; connections that are refused at once stay refused.
        const bool refused = Deadline::Clock::now() - begin < interval_ + answer_limit / 2;
        refusals = refused ? refusals + 1 : 0;
        if (refusals == 3 || lost.passed()) {
          return report(text({name_and_ranks(0), ", which has the job's store at ", where_,
                              ", is lost: ", error.problem()}));
        }
        if (refused) sleep_for(interval_);
      }
    }
  }

  /// On node 0: finds nodes that have been silent for too long, and whether all are done.
  void look_at_others() {
    bool all = true;
    std::map<std::string, std::string> beats;
    for (auto& [key, beat] : store_.list(beat_prefix)) beats.emplace(key, std::move(beat));
    for (std::size_t n = 1; n < place_.nodes; ++n) {
      const std::string& beat = beats[beat_key(n)];
      if (beat == done) continue;
      all = false;
      Heard& heard = heard_[n];
      if (beat != heard.beat) heard = {beat, Deadline::after(patience_)};
      if (heard.missing.passed()) {
        store_.compare_set(
            failure_key, "",
            text({name_and_ranks(n), " was not heard of for ", seconds_text(timeout_)}));
      }
    }
    are_all_done_ = all;
  }

  void report(const std::string& words) {
    {
      const std::lock_guard lock(mutex_);
      failure_ = words;
    }
    // A node need not hear its own words: it is ending already.
    if (!words.starts_with(text({name(place_.node), ": "}))) write_all(news_.write.get(), words);
    news_.write.close();
  }

  std::optional<std::string> failure() {
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
  std::optional<std::string> failure_;
  std::atomic<bool> are_all_done_{false};
  std::atomic<bool> stops_{false};
  std::vector<Heard> heard_;  // the watcher's own
  Thread teller_;
  Thread watcher_;
};

}  // namespace lockstep::detail
