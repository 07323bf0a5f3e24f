// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A host's communicator for the memory of GPUs: what crosses the network passes through
/// pinned host memory, piece by piece.

#include <chrono>
#include <concepts>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/gpu_arguments.cuh"
#include "lockstep/comm/adapters/staged/engine.cuh"
#include "lockstep/comm/adapters/staged/work.cuh"
#include "lockstep/core/element.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"

namespace lockstep {

/// Collectives of `Inner`, which knows host memory only, for device memory: while it works on one
/// piece, the next comes down from the GPU and the one before goes up. Its bits, its comparison of
/// calls, its time limits and its errors are these; the clock of a call starts when the work before
/// it is done.
///
/// Asynchronous calls are made by another thread, in the order of posting. Nothing of this can be
/// captured: the host takes part in every call.
///
/// Every collective, unless it says otherwise: **Ranks** all of them, in the same order, all with
/// device memory or all with host memory. **Host** blocks until the result is on its way to the
/// GPU; with host memory, until it is here. **Stream** it comes after what the compute stream
/// `gpu().stream()` holds, and what that is given afterwards sees the result.
template <Communicator Inner>
class StagedCommunicator {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// Any number of calls may be under way; this many are plenty.
  static constexpr std::size_t most_under_way = 256;

  /// **Ranks** all. **Host** may block.
  StagedCommunicator(Inner inner, std::shared_ptr<Gpu> gpu)
      : engine_(std::make_unique<staged::Engine<Inner>>(std::move(inner), std::move(gpu))) {}

  StagedCommunicator(StagedCommunicator&&) noexcept = default;
  StagedCommunicator& operator=(StagedCommunicator&&) = delete;

  Rank rank() const { return inner().rank(); }
  WorldSize world_size() const { return inner().world_size(); }
  Gpu& gpu() const { return *engine_->gpu(); }
  Milliseconds timeout() const { return inner().timeout(); }
  void set_timeout(Milliseconds timeout) { drained().set_timeout(timeout); }

  /// `count` elements of the GPU, zeroed. The memory lives as long as the communicator. **Ranks**
  /// this one.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

  /// Gives up: every other rank's call fails with this reason.
  void abandon(std::string_view reason) { drained().abandon(reason); }

  /// **Host** blocks until the compute streams of all ranks have got here.
  void barrier() {
    synchronize();
    drained().barrier();
  }

  /// **Ranks** this one. **Host** blocks until the compute stream is empty.
  void synchronize() const {
    check_cuda(cudaStreamSynchronize(engine_->stream()), "cudaStreamSynchronize");
  }

  /// data = op over ranks, on all ranks.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const Call call = describe<T, Op>(CollectiveKind::all_reduce, values.size());
    if (arguments().is_host(values)) return drained().all_reduce(values, op);
    engine_->make(call, in_place(values), reduction<T>(op));
  }

  /// The same, asynchronously. **Host** does not block. **Stream** it comes after what the compute
  /// stream holds; what that is given after `wait` of the handle sees the result. The data belongs
  /// to the call until then.
  template <class Data, class Op = Sum>
  StagedWork<Inner> all_reduce_async(Data&& data, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const Call call = describe<T, Op>(CollectiveKind::all_reduce, values.size());
    if (arguments().is_host(values)) {
      return {*engine_,
              engine_->post([&inner = inner(), values, op] { inner.all_reduce(values, op); }),
              nullptr};
    }
    const auto events = std::make_shared<const staged::CallEvents>();
    return {*engine_, engine_->post(call, in_place(values), events, reduction<T>(op)), events};
  }

  /// On `root`, data = op over ranks; elsewhere it keeps what it was.
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank root, Op op = {}) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const Call call = describe<T, Op>(CollectiveKind::reduce, values.size(), root);
    if (arguments().is_host(values)) return drained().reduce(values, root, op);
    staged::Transfer<T> what = in_place(values);
    if (rank() != root) what.out = nullptr;
    engine_->make(call, what, [root, op](Inner& inner, const staged::Piece<T>& piece) {
      inner.reduce(piece.in, root, op);
    });
  }

  /// data = root's data.
  template <class Data>
  void broadcast(Data&& data, Rank root) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    const Call call = describe<T>(CollectiveKind::broadcast, values.size(), root);
    if (arguments().is_host(values)) return drained().broadcast(values, root);
    staged::Transfer<T> what = in_place(values);
    if (rank() != root) what.in = nullptr;
    if (rank() == root) what.out = nullptr;
    engine_->make(call, what, [root](Inner& inner, const staged::Piece<T>& piece) {
      inner.broadcast(piece.in, root);
    });
  }

  /// out = every rank's in, one behind the other.
  template <class In, class Out>
  void all_gather(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = describe<T>(CollectiveKind::all_gather, from.size());
    arguments().check_size(call, to.size(), from.size() * world());
    if (arguments().is_host(call, from, to)) return drained().all_gather(from, to);
    engine_->make(
        call, between<T>(from.size(), 1, world(), from.data(), to.data()),
        [](Inner& inner, const staged::Piece<T>& piece) { inner.all_gather(piece.in, piece.out); });
  }

  /// On `root`, out = every rank's in; elsewhere out is not used.
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = describe<T>(CollectiveKind::gather, from.size(), root);
    const bool takes = rank() == root;
    if (takes) arguments().check_size(call, to.size(), from.size() * world());
    if (takes ? arguments().is_host(call, from, to) : arguments().is_host(from))
      return drained().gather(from, to, root);
    engine_->make(call,
                  between<T>(from.size(), 1, world(), from.data(), takes ? to.data() : nullptr),
                  [root](Inner& inner, const staged::Piece<T>& piece) {
                    inner.gather(piece.in, piece.out, root);
                  });
  }

  /// out = this rank's piece of root's in. Elsewhere in is not used.
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank root) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = describe<T>(CollectiveKind::scatter, to.size(), root);
    const bool gives = rank() == root;
    if (gives) arguments().check_size(call, from.size(), to.size() * world());
    if (gives ? arguments().is_host(call, from, to) : arguments().is_host(to))
      return drained().scatter(from, to, root);
    engine_->make(call, between<T>(to.size(), world(), 1, gives ? from.data() : nullptr, to.data()),
                  [root](Inner& inner, const staged::Piece<T>& piece) {
                    inner.scatter(piece.in, piece.out, root);
                  });
  }

  /// out = op over ranks of this rank's piece of in.
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = describe<T, Op>(CollectiveKind::reduce_scatter, to.size());
    arguments().check_size(call, from.size(), to.size() * world());
    if (arguments().is_host(call, from, to)) return drained().reduce_scatter(from, to, op);
    engine_->make(call, between<T>(to.size(), world(), 1, from.data(), to.data()),
                  [op](Inner& inner, const staged::Piece<T>& piece) {
                    inner.reduce_scatter(piece.in, piece.out, op);
                  });
  }

  /// Piece w of out = piece `rank` of rank w's in.
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) {
    const auto from = flat(in);
    const auto to = flat(out);
    using T = typename decltype(to)::element_type;
    const Call call = describe<T>(CollectiveKind::all_to_all, from.size());
    arguments().check_size(call, from.size() % world(), 0);
    arguments().check_size(call, to.size(), from.size());
    if (arguments().is_host(call, from, to)) return drained().all_to_all(from, to);
    engine_->make(
        call, between<T>(from.size() / world(), world(), world(), from.data(), to.data()),
        [](Inner& inner, const staged::Piece<T>& piece) { inner.all_to_all(piece.in, piece.out); });
  }

  /// Sends elements to one rank. **Ranks** this one, and `to` calls `receive`. **Host** blocks
  /// until it has: two ranks that both send first wait for each other.
  template <class Data>
  void send(const Data& data, Rank to) {
    const auto values = flat(data);
    using T = std::remove_const_t<typename decltype(values)::element_type>;
    arguments().check_peer("send", to);
    if (arguments().is_host(values)) return inner().send(values, to);
    const auto message =
        engine_->fetch(make_call<T>(CollectiveKind::send, values.size(), false, to.value()),
                       values.data(), values.size_bytes());
    inner().send(std::span(reinterpret_cast<const T*>(message.data()), values.size()), to);
  }

  /// Receives elements from one rank. **Ranks** this one, and `from` calls `send` with the same
  /// type and count. **Host** blocks until they are here.
  template <class Data>
  void receive(Data&& data, Rank from) {
    const auto values = flat(data);
    using T = typename decltype(values)::element_type;
    arguments().check_peer("receive", from);
    if (arguments().is_host(values)) return inner().receive(values, from);
    engine_->deliver(make_call<T>(CollectiveKind::send, values.size(), false, rank().value()),
                     values.data(), values.size_bytes(), [&](std::span<std::byte> message) {
                       inner().receive(
                           std::span(reinterpret_cast<T*>(message.data()), values.size()), from);
                     });
  }

  /// What groups are made of.
  const std::shared_ptr<Gpu>& shared_gpu() const { return engine_->gpu(); }
  /// With nothing under way.
  Inner& drained() {
    engine_->queue().drain();
    return engine_->inner();
  }

 private:
  Inner& inner() const { return engine_->inner(); }
  std::size_t world() const { return inner().world_size().value(); }
  GpuArguments arguments() const { return {{rank(), world_size()}}; }

  /// The call as the others will compare it: as the inner communicator describes it.
  template <class T>
  Call describe(CollectiveKind kind, std::size_t count, Rank root = Rank{0}) const {
    return arguments().template describe<T>(kind, count, root);
  }
  template <class T, class Op>
  Call describe(CollectiveKind kind, std::size_t count, Rank root = Rank{0}) const {
    return arguments().template describe<T, Op>(kind, count, root);
  }

  template <class T>
  static staged::Transfer<T> in_place(std::span<T> data) {
    return {data.size(), 1, 0, data.data(), data.data()};
  }
  template <class T>
  static staged::Transfer<T> between(std::size_t length, std::size_t in_rows, std::size_t out_rows,
                                     const T* in, T* out) {
    return {length, in_rows, out_rows, in, out};
  }

  template <class T, class Op>
  static auto reduction(const Op& op) {
    return [op](Inner& inner, const staged::Piece<T>& piece) { inner.all_reduce(piece.in, op); };
  }

  std::deque<DeviceArena> arenas_;
  std::unique_ptr<staged::Engine<Inner>> engine_;  // ends before the memory that it uses
};

}  // namespace lockstep
