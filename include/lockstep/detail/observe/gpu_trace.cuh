// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a trace that GPUs measure: CUDA events around the phases of steps.

#include <deque>

#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/observe/trace.hpp"

namespace lockstep {

namespace detail {

/// A CUDA event that knows its time.
class TimedEvent : public CudaEvent {
 public:
  TimedEvent() : CudaEvent(cudaEventDefault) {}

  /// Of two events that are over.
  std::chrono::nanoseconds since(const TimedEvent& earlier) const {
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, earlier.get(), get()), "cudaEventElapsedTime");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(double{milliseconds} * 1e6));
  }
};

/// Spans on a rank's compute stream. Their times are known once the stream has passed them.
class GpuSpans {
 public:
  GpuSpans(Tracer& tracer, const Gpu& gpu)
      : tracer_(tracer), gpu_(gpu.index()), stream_(gpu.stream()), base_(make()) {
    set_base();
  }
  GpuSpans(const GpuSpans&) = delete;
  GpuSpans& operator=(const GpuSpans&) = delete;

  /// Those of the rank whose thread this is, if it records.
  static GpuSpans*& of_thread() {
    static thread_local GpuSpans* spans = nullptr;
    return spans;
  }

  /// Returns the span's number, or 0 for none: what a graph records has no time.
  std::uint64_t begin(const SpanName& name) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing");
    if (status != cudaStreamCaptureStatusNone) return 0;
    spans_.push_back({name, take(), take(), false});
    spans_.back().begin.record(stream_);
    return first_ + spans_.size();
  }
  void end(std::uint64_t number) {
    Span& span = spans_[number - first_ - 1];
    span.end.record(stream_);
    span.has_ended = true;
  }

  /// Takes the times of what is over; with `all`, waits for it.
  void collect(bool all = false) {
    while (!spans_.empty() && spans_.front().has_ended) {
      Span& span = spans_.front();
      if (all) span.end.synchronize();
      if (!all && !span.end.test()) return;
      const std::chrono::nanoseconds begin = base_time_ + span.begin.since(base_);
      const std::chrono::nanoseconds end = base_time_ + span.end.since(base_);
      tracer_.add_measured(
          "GPU, compute stream",
          {span.name.name, span.name.number, span.name.bytes,
           static_cast<std::uint64_t>(begin.count()), static_cast<std::uint64_t>(end.count())});
      free_.push_back(std::move(span.begin));
      free_.push_back(std::move(span.end));
      spans_.pop_front();
      ++first_;
    }
    // Both clocks drift, and a time since long ago has few digits.
    if (spans_.empty() && std::chrono::steady_clock::now() - last_ > std::chrono::seconds(5))
      set_base();
  }

 private:
  struct Span {
    SpanName name;
    TimedEvent begin;
    TimedEvent end;
    bool has_ended;
  };

  /// **Host** waits for the stream.
  void set_base() {
    base_.record(stream_);
    base_.synchronize();
    last_ = std::chrono::steady_clock::now();
    base_time_ = last_.time_since_epoch();
  }
  /// An event is of the GPU that is current when it is made, which the program may have changed.
  TimedEvent make() const {
    const OnGpu current(gpu_);
    return {};
  }
  TimedEvent take() {
    if (free_.empty()) return make();
    TimedEvent event = std::move(free_.back());
    free_.pop_back();
    return event;
  }

  Tracer& tracer_;
  std::size_t gpu_;
  cudaStream_t stream_;
  TimedEvent base_;
  std::chrono::steady_clock::time_point last_;
  std::chrono::nanoseconds base_time_{};
  std::deque<Span> spans_;
  std::vector<TimedEvent> free_;
  std::uint64_t first_ = 0;  // how many spans were taken
};

}  // namespace detail

/// Beside `Trace`, on a GPU: the phases of steps as the rank's compute stream goes through them, on
/// a track of their own. Phases inside of a captured step have none; the step as a whole has one.
/// With several replicas in a process nothing is measured.
struct GpuTrace : Observer<GpuTrace> {
  class [[nodiscard("a span ends with its object")]] Span {
   public:
    explicit Span(const SpanName& name) : spans_(detail::GpuSpans::of_thread()) {
      if (spans_ != nullptr) number_ = spans_->begin(name);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() noexcept {
      if (number_ == 0) return;
      try {
        spans_->end(number_);
      } catch (const Error&) {  // the phase's own calls report it
        detail::GpuSpans::of_thread() = nullptr;
      }
    }

   private:
    detail::GpuSpans* spans_;
    std::uint64_t number_ = 0;
  };

  class Watch : public Observer<GpuTrace>::Watch {
   public:
    Watch(Session& session, const ObserverPaths& paths)
        : Observer<GpuTrace>::Watch(session, paths) {}
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() { detail::GpuSpans::of_thread() = nullptr; }

    void after_begin(auto& job) {
      detail::Tracer* const tracer = detail::Tracer::of_thread();
      if constexpr (requires { job.gpu(); }) {
        if (tracer != nullptr) detail::GpuSpans::of_thread() = &spans_.emplace(*tracer, job.gpu());
      }
    }
    void after_step() {
      if (spans_) spans_->collect();
    }
    void before_end() {
      detail::GpuSpans::of_thread() = nullptr;
      if (spans_ && std::uncaught_exceptions() == 0) spans_->collect(true);
      spans_.reset();
    }

   private:
    std::optional<detail::GpuSpans> spans_;
  };
};

}  // namespace lockstep
