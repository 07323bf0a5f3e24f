// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The trace: what every thread of a rank did when, in one file of all ranks.

#include <atomic>
#include <mutex>

#include "lockstep/detail/comm/call/flight_recorder.hpp"
#include "lockstep/detail/core/scope_guard.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/observe/observers.hpp"
#include "lockstep/detail/observe/summary.hpp"

namespace lockstep {

/// Options of a trace.
struct TraceOptions {
  std::string path;                   ///< the file, such as "trace.json"
  std::size_t most_events = 400'000;  ///< of a rank; later ones are counted and left out
};

namespace detail {

/// A span of a thread, or a counter's value. Times are ticks.
struct TraceEvent {
  const char* name = nullptr;
  std::uint64_t number = SpanName::no_number;
  std::uint64_t bytes = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  // 0: a counter, whose value is the double with the bits of `number`
};

/// The events of one thread, which alone adds; any thread may read what is there.
class TraceTrack {
 public:
  TraceTrack();
  /// Of what has no thread, and has its times in nanoseconds of `steady_clock`.
  explicit TraceTrack(std::string name) : name_(std::move(name)), is_measured_(true) {}

  bool is_measured() const { return is_measured_; }
  const std::string& name() const { return name_; }
  void add(const TraceEvent& event) {
    const std::size_t at = count_.load(std::memory_order_relaxed);
    if (at % chunk == 0 && !add_chunk(at / chunk)) return;
    chunks_[at / chunk].get()[at % chunk] = event;
    count_.store(at + 1, std::memory_order_release);
  }
  void for_each(const auto& f) const {
    const std::size_t count = count_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i != count; ++i) f(chunks_[i / chunk].get()[i % chunk]);
  }

 private:
  static constexpr std::size_t chunk = 4096;
  static constexpr std::size_t most_chunks = 1024;
  bool add_chunk(std::size_t number) {
    if (number >= most_chunks) return false;
    chunks_[number] = std::make_unique<TraceEvent[]>(chunk);
    return true;
  }

  std::string name_;
  bool is_measured_ = false;
  std::array<std::unique_ptr<TraceEvent[]>, most_chunks> chunks_;
  std::atomic<std::size_t> count_{0};
};

/// What a rank records, on all threads that it has started.
class Tracer {
 public:
  Tracer(std::size_t most_events, Rank rank)
      : rank_(rank), left_(static_cast<std::int64_t>(most_events)) {}

  /// The calling thread's tracer, if its rank records.
  static Tracer* of_thread() { return static_cast<Tracer*>(recorder_of_thread().get()); }

  void add(const TraceEvent& event) {
    if (left_.fetch_sub(1, std::memory_order_relaxed) > 0) [[likely]]
      track().add(event);
  }
  /// Adds what a device has measured, in nanoseconds of `steady_clock`, to a track of this name.
  /// One thread may do so.
  void add_measured(std::string_view name, const TraceEvent& event);
  /// Keeps the collectives since the last call, before the flight recorder overwrites them.
  void take_calls(bool all = false);

  /// All that was recorded, for the rank that writes, on whose clock `on_clock` says what
  /// nanoseconds of this rank's `steady_clock` are.
  std::string bytes(FunctionRef<std::int64_t(std::int64_t)> on_clock) const;

 private:
  struct Group {
    GroupMember member;
    std::string backend;
    std::uint64_t seen = 0;
    std::vector<CallRecord> calls{};
  };
  TraceTrack& track();

  static inline std::atomic<std::uint64_t> made{0};
  const std::uint64_t id_ = made.fetch_add(1) + 1;  // addresses are used again
  Rank rank_;
  std::atomic<std::int64_t> left_;
  mutable std::mutex mutex_;  // for the list of tracks
  std::vector<std::unique_ptr<TraceTrack>> tracks_;
  std::vector<Group> groups_;
};

}  // namespace detail

/// Records while it lives: a job's with `Observers<Trace>`, or one for a loop of the program's own.
/// **Ranks** all, where it begins and where it ends. **Host** at the end, blocks until rank 0 has
/// what all have recorded, and on rank 0 until the file is written. After an exception a rank
/// writes what it has to `path.rankN.json`, if nobody ends it before.
class TraceRecording {
 public:
  TraceRecording(Session& session, const std::string& path)
      : TraceRecording(session, TraceOptions{.path = path}) {}
  TraceRecording(Session& session, TraceOptions options);
  TraceRecording(const TraceRecording&) = delete;
  TraceRecording& operator=(const TraceRecording&) = delete;
  ~TraceRecording();

  /// Keeps the collectives since the last time: at least once in 1,500, and before a communicator
  /// ends, with `all`.
  void take_calls(bool all = false) {
    if (tracer_ != nullptr) tracer_->take_calls(all);
  }

 private:
  struct Clock {
    std::int64_t at = 0;      // of this rank, in nanoseconds
    std::int64_t offset = 0;  // what rank 0's clock is ahead
  };
  Clock compare_clocks(const char* when);
  void write();

  Session* session_;
  TraceOptions options_;
  detail::EndOfScope scope_;
  std::shared_ptr<detail::Tracer> tracer_;  // null where nothing is recorded
  std::string name_;                        // of this recording's keys in the store
  Clock begin_;
};

/// The observer whose file Perfetto shows: `Observers<Trace>`, and `--trace out.json`.
struct Trace : Observer<Trace> {
  static constexpr std::string ObserverPaths::* path = &ObserverPaths::trace;
  static constexpr std::string_view option = "--trace";

  /// A span of the calling thread; also for phases of the program's own:
  /// `const Trace::Span span({"augmentation"});`
  class [[nodiscard("a span ends with its object")]] Span {
   public:
    explicit Span(const SpanName& name) : tracer_(detail::Tracer::of_thread()), name_(name) {
      if (tracer_ != nullptr) begin_ = detail::ticks_now();
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() {
      if (tracer_ != nullptr)
        tracer_->add({name_.name, name_.number, name_.bytes, begin_, detail::ticks_now()});
    }

   private:
    detail::Tracer* tracer_;
    SpanName name_;
    std::uint64_t begin_ = 0;
  };

  /// A counter's value from now on.
  static void count(const char* name, double value) {
    detail::Tracer* const tracer = detail::Tracer::of_thread();
    if (tracer == nullptr) return;
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    tracer->add({name, bits, 0, detail::ticks_now(), 0});
  }

  class Watch : public Observer<Trace>::Watch {
   public:
    Watch(Session& session, const ObserverPaths& paths)
        : Observer<Trace>::Watch(session, paths), recording_(session, paths.trace) {}

    void count(const char* name, double value) { Trace::count(name, value); }
    void after_step() { recording_.take_calls(); }
    void at_interval(auto&) {
      if (detail::Tracer::of_thread() != nullptr) Trace::count("memory", detail::resident_bytes());
    }
    void before_end() { recording_.take_calls(true); }

   private:
    TraceRecording recording_;
  };
};

}  // namespace lockstep
