// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file NCCL's communicator in the hands of two threads: the one that communicates and the one
/// that watches it.

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/comm/backends/nccl/join.cuh"
#include "lockstep/comm/call/fault_channel.hpp"
#include "lockstep/comm/call/peers.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/device/cuda/step_graph.cuh"

namespace lockstep::detail::nccl {

/// NCCL is not thread-safe, so both threads hold the mutex for each of its calls. None of these
/// calls waits, because the communicator is non-blocking, nor does a thread that holds the mutex.
///
/// The first fault is final. The thread that finds it notes it; the watching thread then aborts
/// NCCL's communicator, which ends its kernels, and every later call throws the fault.
class Link {
 public:
  explicit Link(std::optional<NoticeBoard> board) : board_(std::move(board)) {}
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;
  ~Link() {
    if (comm_ != nullptr) abort();
  }

  std::mutex& mutex() const { return pending_.mutex(); }
  PendingCalls& pending() { return pending_; }
  /// Where ranks leave notices for each other; none in a world of one.
  const std::optional<NoticeBoard>& board() const { return board_; }

  /// Where NCCL puts the communicator.
  ncclComm_t* place() { return &comm_; }

  /// Makes a call of NCCL, `call(comm)`, and waits until it is done or on its stream.
  template <class F>
  void nccl(const char* name, const F& call) {
    ncclResult_t result = try_nccl(call);
    if (result == ncclSuccess || result == ncclInProgress) {
      // The fault of another rank, or a disagreement, explains a failure better than NCCL does.
      result = settle(Deadline::never(), board_ ? words_limit : Milliseconds(0));
      if (result == ncclSuccess) return;
    }
    const Error error = nccl_error(result, name);
    fail(error);
    throw Error(error);
  }

  /// Makes a call of NCCL and waits for nothing.
  template <class F>
  ncclResult_t try_nccl(const F& call) {
    const std::lock_guard lock(mutex());
    pending_.raise_fault();
    return call(comm_);
  }

  /// Waits until NCCL has done a call in the background. Returns NCCL's state, which is
  /// `ncclInProgress` at the deadline. After a failure it waits for the fault, and throws it.
  ncclResult_t settle(Deadline deadline, Milliseconds for_words = Milliseconds(0)) {
    const Backoff backoff;
    std::optional<Deadline> words;
    while (true) {
      const ncclResult_t state = ask();
      if (state == ncclSuccess) return state;
      if (state == ncclInProgress) {
        if (deadline.passed()) return state;
      } else {
        if (!words) words = Deadline::after(for_words);
        if (words->passed()) return state;
      }
      backoff.pause();
    }
  }

  /// NCCL's own state: it can tell that other ranks are gone or that the network is broken.
  ncclResult_t state() const {
    const std::lock_guard lock(mutex());
    ncclResult_t state = ncclSuccess;
    if (comm_ != nullptr && !is_broken()) static_cast<void>(ncclCommGetAsyncError(comm_, &state));
    return state;
  }

  // Faults

  bool is_broken() const { return pending_.is_broken(); }

  /// Notes the fault, if it is the first, and tells the others `words`.
  void fail(const Error& error) { fail(error, error.text()); }
  void fail(const Error& error, std::string_view words) {
    if (!fail_quietly(error) || !board_) return;
    try {
      board_->fail(words);
    } catch (const Error&) {
      // Without a store, the other ranks find out by themselves.
    }
  }
  /// Notes a fault of which the other ranks know already. Returns whether it was the first.
  bool fail_quietly(const Error& error) { return pending_.note(error); }

  /// Throws the fault, if there is one, after the kernels have ended, so that their memory can be
  /// freed. During a capture it throws at once, because the abort waits for all graphs, also for
  /// the one that is being captured.
  void raise_fault(bool capturing) {
    if (!is_broken()) [[likely]]
      return;
    if (!capturing) await_abort();
    pending_.raise_fault();
  }

  /// After a fault: **Host** blocks until NCCL's kernels have ended. False if that takes too long.
  bool await_abort() {
    return pending_.wait(abort_limit, [&] { return aborted_; });
  }

  // Graphs that hold NCCL's kernels

  void add(const StepGraph& graph) {
    const std::lock_guard lock(mutex());
    std::erase_if(graphs_, [](const auto& known) { return known.expired(); });
    graphs_.push_back(graph.executable());
  }
  /// The caller holds the mutex, so that the graph does not end meanwhile.
  void launch(const StepGraph& graph, cudaStream_t stream) const {
    pending_.raise_fault();
    graph.launch(stream);
  }

  // The end

  /// Ends NCCL's work on the GPU, and its communicator. NCCL waits until no graph refers to it.
  void abort() {
    end_graphs();
    ncclComm_t comm = nullptr;
    {
      const std::lock_guard lock(mutex());
      std::swap(comm, comm_);
    }
    if (comm != nullptr) static_cast<void>(ncclCommAbort(comm));
    pending_.change([&] { aborted_ = true; });
  }

  /// Calls `prepare(comm)` and closes NCCL's communicator, after all calls and the watching thread.
  template <class F>
  void finalize(Milliseconds limit, const F& prepare) {
    if (comm_ == nullptr) return;
    end_graphs();
    prepare(comm_);
    const ncclResult_t started = ncclCommFinalize(comm_);
    if ((started == ncclSuccess || started == ncclInProgress) &&
        settle(Deadline::after(limit)) == ncclSuccess) {
      static_cast<void>(ncclCommDestroy(std::exchange(comm_, nullptr)));
    } else {
      abort();
    }
  }

 private:
  /// How long an abort may take; after that nothing waits for it any more.
  static constexpr Milliseconds abort_limit{10'000};
  /// Within this time the watching thread has explained a failure that NCCL reports.
  static constexpr Milliseconds words_limit{2'000};

  ncclResult_t ask() const {
    const std::lock_guard lock(mutex());
    pending_.raise_fault();
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    return asked == ncclSuccess ? state : asked;
  }

  void end_graphs() {
    const std::lock_guard lock(mutex());
    for (const auto& known : graphs_) {
      if (const auto graph = known.lock()) graph->end();
    }
    graphs_.clear();
  }

  std::optional<NoticeBoard> board_;
  PendingCalls pending_;  // its mutex is for what follows
  ncclComm_t comm_ = nullptr;
  std::vector<std::weak_ptr<StepGraph::Executable>> graphs_;
  bool aborted_ = false;
};

}  // namespace lockstep::detail::nccl
