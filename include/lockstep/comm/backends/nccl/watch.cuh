// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The thread that looks after a communicator: whether its calls end in time, whether NCCL or
/// another rank has failed, and whether all ranks make the same calls.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/nccl/engine.cuh"
#include "lockstep/comm/call/messages.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/outcome.hpp"

namespace lockstep::detail::nccl {

/// The watching thread's work and state.
class Watch {
 public:
  explicit Watch(Engine& engine) : engine_(engine) {}

  /// Runs until the communicator is closed or has failed; a failed one is aborted here.
  void run() {
    try {
      rank_of_thread() = engine_.rank();
      check_cuda(cudaSetDevice(engine_.gpu().device()), "cudaSetDevice");
      while (engine_.link().watch_goes_on(tick)) look();
    } catch (const Error& error) {
      engine_.link().fail(error);
    }
    if (engine_.link().is_broken()) engine_.link().abort();
    engine_.link().watch_has_ended();
  }

 private:
  static constexpr Milliseconds tick{100};
  /// After this, a rank that waits asks the others where they are.
  static constexpr Milliseconds long_wait{1'000};
  /// A failure that NCCL reports is mostly caused by another rank; its words are awaited this long.
  static constexpr Milliseconds words_wait{800};
  static constexpr Milliseconds verdict_wait{3'000};

  void look() {
    if (const auto& board = engine_.link().board(); board && hears_) {
      try {
        look_at_others(*board);
      } catch (const Error&) {
        // The process with the store has ended. If it was a rank, NCCL will notice.
        hears_ = false;
      }
    }
    if (engine_.link().is_broken()) return;
    look_at_nccl();
    look_at_the_time();
  }

  void look_at_others(const NoticeBoard& board) {
    if (!news_) news_ = board.watch();
    if (const auto bytes = news_->news()) notice_ = Notice::from_bytes(*bytes);
    // What each rank asks of the store is asked the less often the more ranks there are.
    const bool is_time = Clock::now() >= next_request_;
    if (is_time) next_request_ = Clock::now() + NoticeBoard::pace(engine_.world());
    Notice notice = notice_;
    if (!notice.is_fault() && is_time) compare(board, notice);
    if (notice.kind == Notice::Kind::failed) {
      engine_.link().fail_quietly(
          rank_failed(what_it_is_in(), notice.rank, notice.words, engine_.rank()));
    } else if (notice.kind == Notice::Kind::differs) {
      engine_.link().fail_quietly(verdict(board, notice.rank));
    } else if (notice.kind == Notice::Kind::question && (is_time || !has_told_)) {
      const Position position = engine_.position();
      if (position != told_) board.set_position(position);
      told_ = position;
      has_told_ = true;
    }
  }

  /// Rank 0 shows how far it is, and the others compare once they are there too.
  void compare(const NoticeBoard& board, Notice& notice) {
    const LogHead own = engine_.head();
    if (engine_.rank() == Rank{0}) {
      if (own != head_) board.set_head(own);
      head_ = own;
      return;
    }
    // The head is kept until this rank has made as many calls; a newer one might always be ahead.
    if (head_.calls <= compared_ && own.calls > compared_) head_ = board.head();
    if (head_.calls <= compared_ || head_.calls > own.calls) return;
    compared_ = head_.calls;
    if (engine_.differs(head_).value_or(false)) notice = board.differ(engine_.log());
  }

  Error verdict(const NoticeBoard& board, Rank differing) const {
    try {
      return board.verdict(engine_.log(), differing, verdict_wait);
    } catch (const Error&) {
      return {what_it_is_in(),
              "ranks disagree: rank " + std::to_string(differing.value()) +
                  " has made other calls than rank 0, which does not answer",
              "let every rank make the same calls in the same order", engine_.rank()};
    }
  }

  void look_at_nccl() {
    const ncclResult_t state = engine_.link().state();
    if (state == ncclSuccess || state == ncclInProgress) return;
    if (!reported_) reported_ = Clock::now();
    if (Clock::now() - *reported_ < words_wait && hears_ && engine_.link().board()) return;
    engine_.link().fail(nccl_error(state, what_it_is_in()));
  }

  void look_at_the_time() {
    const auto call = engine_.waiting();
    if (!call) return;
    const auto waited = std::chrono::floor<Milliseconds>(Clock::now() - call->since);
    const Milliseconds limit = engine_.timeout();
    if (!asked_ && waited >= std::min(long_wait, limit / 2)) ask();
    if (waited < limit) return;
    const std::string others = where_others_are();
    engine_.link().fail(Error(
        call->call.text(),
        "waited " + std::to_string(waited.count()) + " ms" + (others.empty() ? "" : "; " + others),
        "see whether a rank hangs, or raise the time limit", engine_.rank()));
  }

  void ask() {
    asked_ = true;
    with_board([](const NoticeBoard& board) { board.ask(); });
  }

  /// The positions of ranks that have made fewer calls than this one, or else of all others.
  std::string where_others_are() {
    std::vector<std::string> all;
    std::vector<std::string> behind;
    with_board([&](const NoticeBoard& board) {
      const std::uint64_t calls = engine_.head().calls;
      const auto positions = board.positions(engine_.world());
      for (std::size_t w = 0; w < engine_.world(); ++w) {
        if (Rank{w} == engine_.rank()) continue;
        const auto& position = positions[w];
        all.push_back(position_text(Rank{w}, position, calls));
        if (!position || position->calls < calls) behind.push_back(all.back());
      }
    });
    return listed(behind.empty() ? all : behind);
  }

  template <class F>
  void with_board(const F& f) {
    if (!engine_.link().board() || !hears_) return;
    try {
      f(*engine_.link().board());
    } catch (const Error&) {
      hears_ = false;
    }
  }

  std::string what_it_is_in() const {
    const auto call = engine_.waiting();
    return call ? call->call.text() : "NCCL's communicator '" + engine_.joined().name + "'";
  }

  Engine& engine_;
  bool hears_ = true;  // there is a store
  std::unique_ptr<StoreWatch> news_;
  Notice notice_;
  Clock::time_point next_request_{};
  bool has_told_ = false;
  bool asked_ = false;
  Position told_{static_cast<std::uint64_t>(-1), ""};
  LogHead head_;  // on rank 0 what it has shown, elsewhere what it has read
  std::uint64_t compared_ = 0;
  std::optional<Clock::time_point> reported_;
};

/// An engine and the thread that watches it. Its destructor closes the communicator, or aborts it
/// after a fault or while an exception unwinds the stack. It never hangs: a thread that does not
/// return from NCCL is detached with the memory that it uses.
class WatchedEngine {
 public:
  explicit WatchedEngine(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {
    try {
      thread_ = Thread(
          ThreadName{"lockstep nccl", "the thread that watches NCCL's calls"},
          [watched = engine_] { Watch(*watched).run(); },
          [watched = engine_](const std::exception_ptr& thrown) {
            watched->link().fail(Error("Backend<Nccl>", Failure::of(thrown).problem,
                                       "start the job again", watched->rank()));
          });
    } catch (const Error& error) {  // the others have joined already, and must hear why this ends
      engine_->link().fail(error.on(engine_->rank()));
      throw;
    }
  }

  WatchedEngine(WatchedEngine&&) noexcept = default;
  WatchedEngine& operator=(WatchedEngine&&) = delete;

  ~WatchedEngine() {
    if (engine_ == nullptr) return;
    try {
      close();
    } catch (const Error& error) {
      engine_->link().fail(error);  // the GPU is in no state to be waited for
    }
    thread_.detach();
  }

  Engine& operator*() const { return *engine_; }
  Engine* operator->() const { return engine_.get(); }

 private:
  void close() {
    if (scope_.is_failure()) {
      engine_->link().fail(gave_up("NCCL's communicator '" + engine_->joined().name + "'",
                                   ended_by_exception, engine_->rank()),
                           ended_by_exception);
    }
    engine_->drain();
    if (!engine_->link().stop_watch()) return;
    thread_.join();
    engine_->finalize();
  }

  std::shared_ptr<Engine> engine_;
  Thread thread_;
  EndOfScope scope_;
};

}  // namespace lockstep::detail::nccl
