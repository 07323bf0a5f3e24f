// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A host's communicator for the memory of GPUs, Gloo's or a hierarchy's: what crosses
/// the network passes through pinned host memory, piece by piece.

#include <cuda_runtime.h>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/comm/adapters/hierarchical/gloo.hpp"
#include "lockstep/comm/adapters/staged/engine.cuh"
#include "lockstep/comm/backends/gloo/communicator.hpp"
#include "lockstep/comm/call/pending_calls.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/comm/collectives.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/device_memory.cuh"
#include "lockstep/comm/rank_gpu.cuh"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep {

/// Collectives for device memory through `Inner`, which handles host memory only. While `Inner`
/// works on one piece, the next comes down from the GPU and the one before goes up. Results,
/// comparison of calls, time limits and errors are those of `Inner`; the time of a call counts from
/// the end of the work before it. All ranks give device memory or all give host memory.
///
/// Asynchronous calls are made by another thread, in the order of posting. Nothing of this can be
/// captured: the host takes part in every call.
///
/// **Host** every collective blocks until the result is on its way to the GPU; with host memory,
/// until it is here. **Stream** a call comes after what the compute stream `gpu().stream()` holds,
/// and what that is given afterwards sees the result; after an asynchronous call, what it is given
/// after `wait` of the handle.
template <Communicator Inner>
class StagedCommunicator : public Collectives<StagedCommunicator<Inner>>,
                           public detail::DeviceAllocating {
  using Engine = detail::staged::Engine<Inner>;

 public:
  using Milliseconds = std::chrono::milliseconds;

  /// The number of calls under way has no limit; this one is large enough for every job.
  static constexpr std::size_t most_under_way = 256;

  /// **Ranks** all. **Host** may block.
  StagedCommunicator(Inner inner, std::shared_ptr<Gpu> gpu)
      : engine_(std::make_unique<Engine>(std::move(inner), std::move(gpu))) {}

  StagedCommunicator(StagedCommunicator&&) noexcept = default;
  StagedCommunicator& operator=(StagedCommunicator&&) = delete;

  Rank rank() const { return engine_->inner().rank(); }
  WorldSize world_size() const { return engine_->inner().world_size(); }
  Gpu& gpu() const { return *engine_->gpu(); }
  Milliseconds timeout() const { return engine_->inner().timeout(); }
  void set_timeout(Milliseconds timeout) { drained().set_timeout(timeout); }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) { drained().abandon(reason); }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty.
  void synchronize() const {
    check_cuda(cudaStreamSynchronize(engine_->stream()), "cudaStreamSynchronize");
  }

  // For the front and for adapters.

  template <class C>
  void perform(const C& call) {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      synchronize();
      drained().perform(call);
    } else if constexpr (C::is_message) {
      // `Inner` compares a message as a whole, so it is staged as a whole.
      if (detail::is_host_call(call, rank())) return engine_->inner().perform(call);
      engine_->pass_message(call);
    } else {
      if (detail::is_host_call(call, rank())) return drained().perform(call);
      engine_->make(call);
    }
  }

  void agree(const detail::Call& call) { drained().agree(call); }

  template <class C>
  auto start(const C& call) {
    return Work<Pending<C>>(std::in_place, *engine_, call, detail::is_host_call(call, rank()));
  }

  detail::StreamCopies passes() const { return detail::StreamCopies(engine_->stream()); }

  /// The communicator of this rank's group, if it is in one. It stages for the group of `Inner`,
  /// with this rank's GPU and compute stream.
  template <std::size_t GroupRanks>
  auto split(const detail::GroupPlace& place) {
    auto inner = drained().template split<GroupRanks>(place);
    std::optional<StagedCommunicator<typename decltype(inner)::value_type>> group;
    if (inner) group.emplace(std::move(*inner), engine_->gpu());
    return group;
  }

 private:
  /// A call under way on the other thread.
  template <class C>
  class Pending {
   public:
    Pending(Engine& engine, const C& call, bool on_host)
        : engine_(engine), on_host_(on_host), queued_(engine, begin(engine, call, on_host)) {}

    bool test() { return queued_.test() && (on_host_ || events_.done.test()); }
    void wait() {
      queued_.wait();
      if (!on_host_) events_.done.block(engine_.stream());
    }
    /// The thread may have left copies to the GPU on their way.
    void leave() {
      queued_.leave();
      if (!on_host_) static_cast<void>(cudaEventSynchronize(events_.done.get()));
    }

   private:
    auto begin(Engine& engine, const C& call, bool on_host) {
      if (!on_host) engine.begin(call.call(), events_);
      return Make{engine, call, events_, on_host};
    }
    struct Make {
      Engine& engine;
      C call;
      const detail::staged::CallEvents& events;
      bool on_host;
      void operator()() const {
        if (on_host) {
          engine.guarded([&] { engine.inner().perform(call); });
        } else {
          engine.guarded([&] { engine.stage(call, events); });
        }
      }
    };

    Engine& engine_;
    bool on_host_;
    detail::staged::CallEvents events_;
    detail::PendingInQueue<Engine, Make> queued_;  // ends before the events
  };

  /// The inner communicator, after every call under way has ended.
  Inner& drained() {
    engine_->queue().drain();
    return engine_->inner();
  }

  std::unique_ptr<Engine> engine_;
};

/// Gloo for ranks on GPUs, through pinned memory of the host.
template <std::size_t Ranks = dynamic>
using StagedGloo = StagedCommunicator<GlooCommunicator<Ranks>>;
/// A hierarchy for ranks on GPUs. Ranks of one host share the pinned memory and reduce in it.
using StagedHierarchy =
    StagedCommunicator<HierarchicalCommunicator<ShmCommunicator<>, GlooCommunicator<>>>;

static_assert(ArenaAllocating<StagedGloo<>> && AsyncReducing<StagedGloo<2>> &&
              Splitting<StagedGloo<>>);
static_assert(ArenaAllocating<StagedHierarchy> && AsyncReducing<StagedHierarchy> &&
              Splitting<StagedHierarchy>);

/// A job's ranks through Gloo, each with the GPU that its place on its host gives it. `name` tells
/// several communicators of one job apart. **Ranks** all. **Host** blocks until all have come.
template <std::size_t Ranks = dynamic>
StagedGloo<Ranks> make_staged_gloo_communicator(const Membership& member, Store& store,
                                                const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_gloo_communicator<Ranks>(member, store, name), std::move(gpu)};
}

/// A job's ranks through shared memory inside hosts, with the same number of ranks on each, and
/// Gloo between hosts. **Ranks** all. **Host** blocks until all have come.
inline StagedHierarchy make_staged_hierarchical_communicator(const Membership& member, Store& store,
                                                             const std::string& name = "world") {
  std::shared_ptr<Gpu> gpu = detail::gpu_of_process(member, store, name);
  return {make_hierarchical_communicator(member, store, name), std::move(gpu)};
}

}  // namespace lockstep
