// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A communicator on a stream of its own, beside its rank's compute stream.

#include "lockstep/detail/comm/call/watchdog.hpp"
#include "lockstep/detail/comm/collectives.hpp"
#include "lockstep/detail/comm/rank_gpu.cuh"

namespace lockstep {

/// Runs the collectives of `Inner` on the stream of `side`; events order it with the compute stream
/// of `gpu`, which need not be the current device. **Host** blocks as `Inner`. **Stream** a call
/// follows what the compute stream holds; work enqueued after it, or after `wait`, sees the result.
template <Communicator Inner>
class StreamedCommunicator : public Collectives<StreamedCommunicator<Inner>> {
 public:
  /// Calls in flight have no limit; this number is large enough for every job.
  static constexpr std::size_t most_in_flight = 256;

  StreamedCommunicator(Inner inner, std::shared_ptr<Gpu> gpu, std::shared_ptr<Gpu> side)
      : gpu_(std::move(gpu)),
        side_(std::move(side)),
        events_(*gpu_),
        order_(std::move(gpu_->events(1)[0])),
        inner_(std::move(inner)) {}

  Rank rank() const { return inner_.rank(); }
  WorldSize world_size() const { return inner_.world_size(); }
  Gpu& gpu() const { return *gpu_; }
  std::chrono::milliseconds timeout() const { return inner_.timeout(); }
  void set_timeout(std::chrono::milliseconds timeout) { inner_.set_timeout(timeout); }

  /// `count` zeroed elements of device memory, for the communicator's lifetime.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    const detail::OnGpu current(gpu_->index());
    return inner_.template allocate<T>(count);
  }

  /// See `HierarchicalCommunicator`.
  void reserve(std::size_t bytes) {
    const detail::OnGpu current(gpu_->index());
    inner_.reserve(bytes);
  }
  void finish_allocations() { inner_.finish_allocations(); }

  void abort(std::string_view reason) { inner_.abort(reason); }

  /// **Host** blocks until this rank's compute stream is empty. Throws a fault of `Inner`.
  void synchronize() {
    detail::await_stream(gpu_->stream(), [&] { inner_.raise_fault(); });
  }

  // Called by `Collectives` and by adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) synchronize();
    on_side_stream([&] { inner_.perform(call); });
    let_wait(side_->stream(), gpu_->stream());
  }

  void agree(const detail::Call& call) { inner_.agree(call); }

  template <class T>
  void gather_pieces(std::span<const T> in, std::span<T> out, const GatheredPieces& pieces,
                     Rank root, bool on_device) {
    on_side_stream([&] { inner_.gather_pieces(in, out, pieces, root, on_device); });
    let_wait(side_->stream(), gpu_->stream());
  }

  /// The group's communicator uses the same streams.
  template <std::size_t GroupRanks>
  std::optional<StreamedCommunicator> split(const detail::GroupPosition& position) {
    const detail::OnGpu current(gpu_->index());
    auto inner = inner_.template split<GroupRanks>(position);
    if (!inner) return std::nullopt;
    return std::optional<StreamedCommunicator>(std::in_place, std::move(*inner), gpu_, side_);
  }

  detail::StreamCopies passes() const { return detail::StreamCopies(gpu_->stream()); }

  template <class C>
  auto start(const C& call) {
    if constexpr (Inner::host_takes_part) {
      auto& stages = inner_.stages();
      stages.raise_fault();
      const CudaEvent& ready = events_.next();
      const CudaEvent& done = events_.next();
      ready.record(gpu_->stream());
      const auto later = [&stages, &side = *side_, &ready, &done, call] {
        rank_of_thread() = side.rank();
        const detail::OnGpu current(side.index());
        ready.block(side.stream());
        stages.make(call);
        done.record(side.stream());
      };
      using Stages = std::remove_reference_t<decltype(stages)>;
      return Work<detail::PendingOnGpu<Stages, decltype(later)>>(std::in_place, stages, later,
                                                                 &done, gpu_->stream());
    } else {
      on_side_stream([&] { inner_.perform(call); });
      const CudaEvent& done = events_.next();
      done.record(side_->stream());
      return Work<Pending>(std::in_place, gpu_->stream(), done);
    }
  }

 private:
  struct Pending {
    bool test() const { return done.test(); }
    void wait() { done.block(compute); }
    /// The work on the side stream ends, even if another rank is gone: `Inner` guarantees that.
    void leave() const { static_cast<void>(cudaEventSynchronize(done.get())); }

    cudaStream_t compute;
    const CudaEvent& done;
  };

  void let_wait(cudaStream_t earlier, cudaStream_t later) const {
    order_.record(earlier);
    order_.block(later);
  }

  /// Calls `f()`, whose work on the side stream follows what the compute stream holds now.
  template <class F>
  void on_side_stream(const F& f) const {
    const detail::OnGpu current(gpu_->index());
    let_wait(gpu_->stream(), side_->stream());
    f();
  }

  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Gpu> side_;
  detail::EventRing events_;
  CudaEvent order_;  // of the two streams
  Inner inner_;
};

}  // namespace lockstep
