// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Waiting for other ranks on shared counters, and the faults that end a wait.

#include <sched.h>
#include <atomic>
#include <mutex>

#include "lockstep/detail/comm/call/flight_recorder.hpp"
#include "lockstep/detail/core/deadline.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/thread.hpp"

namespace lockstep::detail {

/// Two cache lines, because prefetchers fetch them in pairs.
inline constexpr std::size_t line_pair = 128;

/// A counter that processes may share. `sleepers` saves the writer a system call if none sleeps.
struct alignas(line_pair) Counter {
  std::atomic<std::uint64_t> value;
  std::atomic<std::uint32_t> sleepers;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::
                   : "memory");  // `yield` is a no-op on most cores; isb gives the pipeline a rest
#endif
}

/// Wakes all threads that sleep on a counter, whether or not its value has changed.
[[gnu::cold]] void wake_sleepers(Counter& counter);
inline void wake(Counter& counter) {
  if (counter.sleepers.load(std::memory_order_seq_cst) != 0) wake_sleepers(counter);
}

inline void publish(Counter& counter, std::uint64_t value) {
  counter.value.store(value, std::memory_order_seq_cst);
  wake(counter);
}

inline bool reached(const Counter& counter, std::uint64_t value) {
  return counter.value.load(std::memory_order_acquire) >= value;
}

/// How long a wait sleeps before it looks for faults.
inline constexpr std::chrono::milliseconds look_interval{50};

/// Sleeps until the counter is raised, but at most `look_interval`, if it is below `value`.
[[gnu::cold]] void sleep_on(Counter& counter, std::uint64_t value);

/// Returns when the counter has reached `value`. After every `look_interval` of sleep it calls
/// `look()`, which may throw. Spinning is fastest while every rank has a core; with more ranks
/// (`crowded`) it keeps the awaited rank from running. Time bounds it: a pause takes 14 to 50 ns.
template <class Look>
void wait_for(Counter& counter, std::uint64_t value, bool crowded, const Look& look) {
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(4000);
       !crowded && std::chrono::steady_clock::now() < end;) {
    for (int i = 0; i < 32; ++i) {
      if (reached(counter, value)) return;
      pause_core();
    }
  }
  for (int i = crowded ? 800 : 0; i < 1000; ++i) {
    if (reached(counter, value)) return;
    ::sched_yield();
  }
  while (!reached(counter, value)) {
    sleep_on(counter, value);
    if (!reached(counter, value)) look();
  }
}

/// Polls until `done()`. The first pauses are short, because most waits last microseconds.
template <class Done>
void poll_until(const Done& done) {
  const auto begin = std::chrono::steady_clock::now();
  while (!done()) {
    if (std::chrono::steady_clock::now() - begin < std::chrono::microseconds(200)) {
      ::sched_yield();
    } else {
      sleep_for(std::chrono::microseconds(50));
    }
  }
}

inline constexpr const char* ended_by_exception = "it ended with an exception";
/// The prefix of an abort reason that is another rank's failure.
inline constexpr const char* because_of_another = "because of another rank: ";

/// A rank that makes no step while another does has usually run out of batches.
inline constexpr const char* step_advice =
    "let every rank make the same calls, with as many batches, or add UnevenInputs<Join>, with "
    "which ranks may have different numbers of batches";
/// Is this `Call::text` that of a step?
inline bool is_of_step(std::string_view call) { return call.starts_with("step"); }

/// Two ranks made different calls. All ranks name the same pair: rank 0 and the first that differs.
inline Error ranks_disagree(std::uint64_t number, std::string_view of_rank0, Rank other,
                            std::string_view of_other, Rank me) {
  const std::string calls =
      of_rank0 == of_other
          ? text({"rank 0 and rank ", other, " called ", of_other, " with different arguments"})
          : text({"rank 0 called ", of_rank0, " and rank ", other, " called ", of_other});
  const bool one_steps = is_of_step(of_rank0) != is_of_step(of_other);
  return {text({"call ", number}), "ranks disagree: " + calls,
          one_steps ? step_advice : "let every rank make the same calls in the same order", me};
}

/// Compares all ranks' calls, `call_of(w)` being rank w's. Returns the error if they differ.
template <class CallOf>
std::optional<Error> find_disagreement(std::uint64_t number, std::size_t world,
                                       const CallOf& call_of, Rank me) {
  for (std::size_t w = 1; w < world; ++w) {
    if (call_of(w) == call_of(0)) continue;
    return ranks_disagree(number, call_of(0).text(), Rank{w}, call_of(w).text(), me);
  }
  return std::nullopt;
}

inline Error messages_differ(const Call& received, Rank from, std::string_view sent, Rank me) {
  return {received.text(), text({"rank ", from, " sends ", sent}),
          "send and receive the same type and count, in the same order", me};
}

inline Error rank_failed(std::string_view operation, Rank who, std::string_view reason, Rank me) {
  return Error(operation, text({"rank ", who, " failed: ", reason}), "look at that rank first", me)
      .as_consequence();
}

inline Error rank_left(std::string_view operation, Rank who, Rank me) {
  return {operation, text({"rank ", who, " closed its communicator without this call"}),
          is_of_step(operation) ? step_advice : "let every rank make the same calls", me};
}

/// A wait has timed out. `missing` lists the ranks that it waited for.
inline Error time_is_over(std::string_view operation, Milliseconds limit, std::string_view missing,
                          Rank me) {
  return {operation, text({"waited ", limit.count(), " ms for ", missing}),
          "see whether it hangs, or raise the time limit", me};
}

/// The error of one stage, reported as an error of the whole operation.
inline Error with_context(const Error& error, std::string_view operation, std::string_view problem,
                          std::optional<Rank> rank) {
  const Error named(operation, problem, error.advice(), rank);
  return error.is_consequence() ? named.as_consequence() : named;
}

/// This rank has aborted its communicator, or an exception has ended its part.
inline Error gave_up(std::string_view communicator, std::string_view reason, Rank me) {
  return {communicator, text({"this rank gave it up: ", reason}), "start the job again", me};
}

/// The state of all ranks, as one of them sees it.
template <class P>
concept Peers = requires(const P& peers, std::size_t w) {
  { peers.rank() } -> std::same_as<Rank>;
  { peers.world() } -> std::same_as<std::size_t>;
  { peers.has_left(w) } -> std::same_as<bool>;  // it closed its communicator
  { peers.has_died(w) } -> std::same_as<bool>;  // its process ended without closing it
  { peers.how_died() } -> std::convertible_to<std::string_view>;
  { peers.abort_reason(w) } -> std::same_as<std::string>;  // empty if it has not said
};

/// The error that ends the wait for a call, if any. All ranks blame the same rank: one that died,
/// else one that aborted. `lacks(w)`: rank w has yet to do its part.
template <Peers P, class Lacks>
std::optional<Error> find_culprit(const P& peers, const std::string& operation,
                                  const Lacks& lacks) {
  const Rank me = peers.rank();
  const auto first = [&](const auto& holds) {
    std::size_t w = 0;
    while (w < peers.world() && (Rank{w} == me || !holds(w))) ++w;
    return w < peers.world() ? std::optional(Rank{w}) : std::nullopt;
  };
  if (const auto who = first([&](std::size_t w) { return peers.has_died(w); })) {
    const std::string reason = peers.abort_reason(who->value());
    return Error(operation,
                 text({"rank ", *who, peers.how_died(), reason.empty() ? "" : ": ", reason}),
                 "look for the reason in its output", me)
        .as_consequence();
  }
  // A rank's own reason comes first: an exception may report a failure seen in a smaller group.
  auto who = first([&](std::size_t w) {
    const std::string reason = peers.abort_reason(w);
    return !reason.empty() && reason != ended_by_exception &&
           !reason.starts_with(because_of_another);
  });
  if (!who) who = first([&](std::size_t w) { return !peers.abort_reason(w).empty(); });
  if (who) return rank_failed(operation, *who, peers.abort_reason(who->value()), me);
  who = first([&](std::size_t w) { return peers.has_left(w) && lacks(w); });
  return who ? std::optional(rank_left(operation, *who, me)) : std::nullopt;
}

/// What one rank publishes, in memory of one process or mapped by several.
struct alignas(line_pair) RankState {
  Counter arrived;                     // calls that it has made: their slots may be read
  std::atomic<std::uint32_t> process;  // its id, once it has joined
  std::atomic<std::uint32_t> left;     // it has closed its communicator
  std::atomic<std::uint32_t> failed;   // it makes no further call
  std::atomic<std::uint32_t> has_reason;
  std::array<char, 512> reason;  // why it failed, unless the others see the cause themselves
};

/// The ranks that share memory, as one of them sees them, and its first fault, which is final.
class SharedPeers {
 public:
  using Clock = std::chrono::steady_clock;

  /// Rank w's state is `w * stride` bytes after `first`. The locks of `file`, a descriptor, show
  /// which processes live; threads of one process need none. A rank that aborts or leaves holds
  /// `working`, so that no rank uses its memory meanwhile, and wakes those that wait for `done`.
  SharedPeers(std::string_view backend, const GroupMember& member, RankState* first,
              std::size_t stride, Milliseconds timeout, int file, std::mutex* working = nullptr,
              Counter* done = nullptr)
      : recorder_(backend, member),
        rank_(member.rank.value()),
        world_(member.world.value()),
        first_(first),
        stride_(stride),
        file_(file),
        working_(working),
        done_(done),
        timeout_(timeout) {}
  SharedPeers(const SharedPeers&) = delete;
  SharedPeers& operator=(const SharedPeers&) = delete;

  Rank rank() const { return Rank{rank_}; }
  std::size_t world() const { return world_; }
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }
  FlightRecorder& recorder() { return recorder_; }
  /// The name of the next communicator that is made of this one's ranks.
  std::string next_group_name(std::size_t group) {
    return text({recorder_.member().group, "/", groups_++, ".", group});
  }

  bool is_broken() const { return own().failed.load(std::memory_order_acquire) != 0; }
  void raise_fault() const {
    if (is_broken()) [[unlikely]]
      raise_now();
  }

  /// Aborts with this fault, unless there is one; the other ranks' current or next call reports it.
  /// A consequence of another rank's fault has no reason of its own: all ranks see the cause.
  [[noreturn, gnu::cold]] void fail(const Error& error) {
    give_up(error, error.is_consequence() ? "" : error.text());
    throw Error(error);
  }
  void give_up(const Error& error, std::string_view reason);
  void abort(std::string_view reason) { give_up(gave_up("Backend<Shm>", reason, rank()), reason); }

  bool has_joined(std::size_t w) const {
    return state(w).process.load(std::memory_order_acquire) != 0;
  }
  bool has_left(std::size_t w) const {
    return state(w).left.load(std::memory_order_acquire) != 0 && state(w).failed == 0;
  }
  /// Has the rank's process ended without leaving? False for threads of this process.
  bool has_died(std::size_t w) const;
  static constexpr const char* how_died() { return "'s process ended"; }
  std::string abort_reason(std::size_t w) const {
    return state(w).has_reason.load(std::memory_order_acquire) != 0 ? state(w).reason.data() : "";
  }
  std::uint64_t calls_made(std::size_t w) const {
    return state(w).arrived.value.load(std::memory_order_acquire);
  }

 protected:
  RankState& state(std::size_t w) const {
    return *reinterpret_cast<RankState*>(reinterpret_cast<std::byte*>(first_) + w * stride_);
  }
  RankState& own() const { return state(rank_); }
  /// Does a wait for `one`, or for all ranks to make this many calls, lack rank w?
  bool lacks(std::size_t w, std::optional<Rank> one, std::uint64_t calls) const {
    return one ? Rank{w} == *one : calls_made(w) < calls;
  }

  /// Publishes that this rank has left, after an abort if an exception ended its scope.
  void leave() {
    if (scope_.is_failure()) abort(ended_by_exception);
    change_state([&] { own().left.store(1, std::memory_order_release); });
  }

  /// Waits for a counter that `one` raises, or the call number `value` of all ranks. A long wait
  /// checks for faults and calls `fail(error)`, which throws.
  template <class Fail>
  void await(Counter& counter, std::uint64_t value, const Call& call, std::optional<Rank> one,
             const Fail& fail) const {
    WaitTime time;
    wait_for(counter, value, crowded_, [&] {
      raise_fault();  // another thread of this rank may have given up
      look(counter, value, call, one, time.until(Clock::now()), fail);
    });
  }
  /// The same for a caller that polls, after a poll that found the counter too low.
  template <class Fail>
  void poll(Counter& counter, std::uint64_t value, const Call& call, std::optional<Rank> one,
            const Fail& fail) {
    const auto now = Clock::now();
    if (!polled_) {
      polled_.emplace(now);
      looked_ = now;
    }
    if (now - looked_ < look_interval) return;
    looked_ = now;
    look(counter, value, call, one, polled_->until(now), fail);
  }
  void end_poll() { polled_.reset(); }
  /// The error that ends a wait of so long, if there is one.
  [[gnu::cold]] std::optional<Error> check(const Call& call, std::optional<Rank> one,
                                           std::uint64_t calls, Clock::duration waited) const;

 private:
  template <class Fail>
  void look(Counter& counter, std::uint64_t value, const Call& call, std::optional<Rank> one,
            Clock::duration waited, const Fail& fail) const {
    const auto error = check(call, one, value, waited);
    // The awaited rank may have done its part and left, or died, while this one looked.
    if (error && !reached(counter, value)) fail(*error);
  }
  [[noreturn, gnu::cold]] void raise_now() const {
    const std::lock_guard lock(mutex_);
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the caller has seen that there is one
    throw Error(fault_.value());
  }
  std::string missing_ranks(std::optional<Rank> one, std::uint64_t calls) const;
  /// Calls `f()`, which changes this rank's state, while no other rank uses its memory.
  template <class F>
  void change_state(const F& f) {
    {
      std::unique_lock<std::mutex> working;
      if (working_ != nullptr) working = std::unique_lock(*working_);
      f();
    }
    if (done_ != nullptr) wake(*done_);
  }

  FlightRecorder recorder_;
  std::size_t groups_ = 0;
  std::size_t rank_;
  std::size_t world_;
  RankState* first_;
  std::size_t stride_;
  int file_;
  std::mutex* working_;
  Counter* done_;
  Milliseconds timeout_;
  std::optional<WaitTime> polled_;  // without success
  Clock::time_point looked_;
  bool crowded_ = world_ > core_count();  // there are more ranks than cores
  mutable std::mutex mutex_;              // for the fault
  std::optional<Error> fault_;
  EndOfScope scope_;
};
static_assert(Peers<SharedPeers>);

}  // namespace lockstep::detail
