// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The watchdog of an NCCL communicator: timeouts, failures, and ranks with different calls.

#include "lockstep/detail/comm/nccl/engine.cuh"
#include "lockstep/detail/launch/outcome.hpp"

namespace lockstep::detail::nccl {

class Probe {
 public:
  static constexpr ThreadName thread{"lockstep nccl", "the thread that watches NCCL's calls"};
  static constexpr const char* backend = "Backend<Nccl>";
  static constexpr Milliseconds tick{100};

  explicit Probe(Engine& engine) : engine_(engine) {
    rank_of_thread() = engine_.rank();
    check_cuda(cudaSetDevice(engine_.gpu().device()), "cudaSetDevice");
  }

  void poll() {
    with_channel([&](const FaultChannel& channel) { look_at_others(channel); });
    if (engine_.is_broken()) return;
    look_at_nccl();
    if (const auto call = engine_.waiting(); call && !asked_) {
      asked_ = Clock::now() - call->since >= std::min(long_wait, engine_.timeout() / 2);
      if (asked_) with_channel([](const FaultChannel& channel) { channel.ask(); });
    }
  }

  Error time_over(const PendingCall& call) {
    const auto waited = std::chrono::floor<Milliseconds>(Clock::now() - call.since);
    const std::string others = where_others_are(false);
    return {
        call.call.text(),
        "waited " + std::to_string(waited.count()) + " ms" + (others.empty() ? "" : "; " + others),
        "see whether a rank hangs, or raise the time limit", engine_.rank()};
  }

 private:
  /// After this long, a waiting rank asks the others for their positions.
  static constexpr Milliseconds long_wait{1'000};
  /// NCCL's failures mostly originate on another rank, whose reason is awaited this long.
  static constexpr Milliseconds reason_wait{800};
  static constexpr Milliseconds agreement_wait{3'000};
  static constexpr auto never = static_cast<std::uint64_t>(-1);

  void look_at_others(const FaultChannel& channel) {
    if (!news_) news_ = channel.watch();
    if (const auto bytes = news_->news()) notice_ = Notice::from_bytes(*bytes);
    // The more ranks there are, the less often each polls the store.
    const bool is_time = Clock::now() >= next_request_;
    if (is_time) next_request_ = Clock::now() + FaultChannel::pace(engine_.world());
    Notice notice = notice_;
    if (!notice.is_fault() && is_time) compare(channel, notice);
    if (notice.kind == Notice::Kind::failed) {
      engine_.pending().note(
          rank_failed(what_it_is_in(), notice.rank, notice.reason, engine_.rank()));
    } else if (notice.kind == Notice::Kind::differs) {
      engine_.pending().note(disagreement(channel, notice.rank));
    } else if (notice.kind == Notice::Kind::question && (is_time || published_.calls == never)) {
      const auto call = engine_.waiting();
      const Position position{head().calls, 0, call ? call->call.text() : ""};
      if (position != published_) channel.set_position(position);
      published_ = position;
    }
  }

  /// Rank 0 publishes its position; the others compare once they have reached it.
  void compare(const FaultChannel& channel, Notice& notice) {
    const Position own = head();
    if (engine_.rank() == Rank{0}) {
      if (own != head_) channel.set_head(own);
      head_ = own;
      return;
    }
    // A newer head might always be ahead of this rank, so the head is kept until it is reached.
    if (head_.calls <= compared_ && own.calls > compared_) head_ = channel.head();
    if (head_.calls <= compared_ || head_.calls > own.calls) return;
    compared_ = head_.calls;
    const auto differs = [&](const CallLog& log) { return log.differs(head_).value_or(false); };
    if (engine_.with_log(differs)) notice = channel.differ(log());
  }

  Error disagreement(const FaultChannel& channel, Rank differing) const {
    try {
      return channel.disagreement(log(), differing, agreement_wait);
    } catch (const Error&) {
      return {what_it_is_in(),
              "ranks disagree: rank " + std::to_string(differing.value()) +
                  " has made other calls than rank 0, which does not answer",
              "let every rank make the same calls in the same order", engine_.rank()};
    }
  }

  void look_at_nccl() {
    const ncclResult_t state = engine_.state();
    if (state == ncclSuccess || state == ncclInProgress) return;
    if (!reported_) {
      reported_ = Clock::now();
      with_channel([](const FaultChannel& channel) { channel.ask(); });
    }
    if (Clock::now() - *reported_ < reason_wait && lost_.empty() && engine_.channel()) return;
    const Error error = error_of(state, what_it_is_in());
    // NCCL reports a lost connection, but not whose: a killed rank is the one that does not answer.
    const std::string silent = where_others_are(true);
    engine_.fail(silent.empty() ? error
                                : with_context(error, error.operation(),
                                               error.problem() + "; " + silent, error.rank()));
  }

  /// The positions of ranks behind this one, else of all others; if `only_silent`, silent ranks.
  /// Without the store: who has it.
  std::string where_others_are(bool only_silent) {
    std::vector<std::string> all;
    std::vector<std::string> behind;
    with_channel([&](const FaultChannel& channel) {
      const std::uint64_t calls = head().calls;
      const auto positions = channel.positions(engine_.world());
      for (std::size_t w = 0; w < engine_.world(); ++w) {
        if (Rank{w} == engine_.rank()) continue;
        const auto& position = positions[w];
        all.push_back(position_text(Rank{w}, position, calls));
        if (!position || (!only_silent && position->calls < calls)) behind.push_back(all.back());
      }
    });
    if (!lost_.empty()) return lost_;
    return listed(behind.empty() && !only_silent ? all : behind);
  }

  template <class F>
  void with_channel(const F& f) {
    if (!engine_.channel() || !lost_.empty()) return;
    try {
      f(*engine_.channel());
    } catch (const Error& error) {
      // The process with the store has ended. If it was a rank, NCCL or the time limit notices.
      lost_ = error.problem() + " (" + error.advice() + ")";
    }
  }

  CallLog log() const {
    return engine_.with_log([](const CallLog& log) { return log; });
  }
  Position head() const {
    return engine_.with_log([](const CallLog& log) { return log.head(); });
  }

  std::string what_it_is_in() const {
    const auto call = engine_.waiting();
    return call ? call->call.text() : engine_.text();
  }

  Engine& engine_;
  std::string lost_;  // how the store was lost
  std::unique_ptr<StoreWatch> news_;
  Notice notice_;
  Clock::time_point next_request_{};
  bool asked_ = false;
  Position published_{never};
  Position head_;  // rank 0: last published; others: last read
  std::uint64_t compared_ = 0;
  std::optional<Clock::time_point> reported_;
};

/// An engine with its watchdog thread, which aborts NCCL's kernels after a fault.
using WatchedEngine = CallWatchdog<Engine, Probe>;

}  // namespace lockstep::detail::nccl
