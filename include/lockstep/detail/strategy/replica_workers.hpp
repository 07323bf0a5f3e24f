// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The worker threads of `ParallelStrategy<DP>`, one for each replica but the caller's.

#include "lockstep/detail/comm/call/peers.hpp"

namespace lockstep::detail {

/// The thread that calls `run` is replica 0; worker threads get each task through a pointer.
class ReplicaWorkers {
 public:
  explicit ReplicaWorkers(std::size_t replicas)
      : crowded_(replicas > core_count()), errors_(replicas) {
    workers_.reserve(replicas - 1);
    try {
      for (std::size_t i = 1; i < replicas; ++i) {
        workers_.emplace_back(
            ThreadName{text({"replica ", i}).c_str(), "the thread of a replica"},
            [this, i] { work(i); },
            [](const std::exception_ptr&) {});  // phases store their exceptions
      }
    } catch (...) {  // a thread could not start
      stop();
      throw;
    }
  }

  ReplicaWorkers(const ReplicaWorkers&) = delete;
  ReplicaWorkers& operator=(const ReplicaWorkers&) = delete;
  ~ReplicaWorkers() { stop(); }

  std::size_t size() const { return errors_.size(); }

  /// Calls every phase with each replica's number, on its thread, with a barrier after each. Throws
  /// the first failure that is no consequence of another, with its number. **Host** blocks.
  template <class... Phases>
  void run(const Phases&... phases) {
    const auto all = [&](std::size_t replica) {
      static_cast<void>((run_phase(phases, replica) && ...));
    };
    begin(&all, [](const void* task, std::size_t replica) {
      (*static_cast<const decltype(all)*>(task))(replica);
    });
    all(0);
    end();
  }

  /// Calls `f` with each replica's number, on that replica's thread, one after the other: functions
  /// of the program need not be thread-safe. Stops at the first exception. **Host** blocks.
  void run_in_turn(const auto& f) {
    for (std::size_t turn = 0; turn != size(); ++turn) {
      run([&](std::size_t replica) {
        if (replica == turn) f(replica);
      });
    }
  }

 private:
  /// `run_task(task, replica)` is what workers call.
  void begin(const void* task, void (*run_task)(const void*, std::size_t)) {
    if (is_running_.exchange(true)) {
      throw Error("DP", "a replica called the job that it is part of",
                  "step and evaluate outside of the model");  // it would deadlock
    }
    has_failed_.store(false, std::memory_order_relaxed);
    for (std::exception_ptr& error : errors_) error = nullptr;
    task_ = task;
    run_task_ = run_task;
    call_ = current_job_call();
    publish(begun_, ++tasks_);
  }
  void end() {
    is_running_.store(false);
    if (has_failed_.load(std::memory_order_relaxed)) throw_first();
  }

  /// Runs a phase. Returns whether there is a next one.
  bool run_phase(const auto& phase, std::size_t replica) {
    try {
      phase(replica);
    } catch (...) {
      errors_[replica] = std::current_exception();
      has_failed_.store(true, std::memory_order_relaxed);
    }
    return barrier();
  }

  /// The last replica decides whether all go on: a fast one may fail in the next phase already.
  bool barrier() {
    const std::uint64_t before = met_.value.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
      arrived_.store(0, std::memory_order_relaxed);
      goes_on_ = !has_failed_.load(std::memory_order_relaxed);
      publish(met_, before + 1);
    } else {
      wait_for(met_, before + 1, crowded_, [] {});
    }
    return goes_on_;
  }

  void work(std::size_t replica) {
    for (std::uint64_t task = 1;; ++task) {
      wait_for(begun_, task, crowded_, [] {});
      if (task_ == nullptr) return;
      const InJobCall in(call_);
      run_task_(task_, replica);
    }
  }

  void stop() {
    task_ = nullptr;
    publish(begun_, ++tasks_);
    workers_.clear();
  }

  /// Throws the exception that `run` promises; a single replica is not named.
  [[noreturn, gnu::noinline]] void throw_first() {
    std::size_t first = size();
    for (std::size_t i = size(); i-- != 0;) {
      if (!errors_[i]) continue;
      const bool is_better = first == size() || error_of(errors_[first]).is_consequence() ||
                             !error_of(errors_[i]).is_consequence();
      if (is_better) first = i;
    }
    const std::exception_ptr thrown = std::exchange(errors_[first], nullptr);
    if (size() == 1) std::rethrow_exception(thrown);
    const Error failure = error_of(thrown);
    const std::string who = "replica " + std::to_string(first);
    const Error named(failure.operation().empty() ? who : who + ", " + failure.operation(),
                      failure.problem(),
                      failure.advice().empty() ? "see what is wrong with its share of the batch"
                                               : failure.advice());
    try {
      std::rethrow_exception(thrown);
    } catch (...) {
      std::throw_with_nested(failure.is_consequence() ? named.as_consequence() : named);
    }
  }

  bool crowded_;
  Counter begun_{};  // tasks published
  Counter met_{};    // phases completed by all
  std::atomic<std::size_t> arrived_{0};
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_running_{false};
  bool goes_on_ = false;
  const void* task_ = nullptr;  // null ends the workers
  void (*run_task_)(const void*, std::size_t) = nullptr;
  JobCall call_ = JobCall::none;  // of the caller, and so of all replicas
  std::uint64_t tasks_ = 0;
  std::vector<std::exception_ptr> errors_;  // by replica
  std::vector<Thread> workers_;
};

}  // namespace lockstep::detail
