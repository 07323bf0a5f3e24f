// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicator of a world of one on a GPU: it copies what must be copied, in the compute
/// stream's order, and otherwise does nothing.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/device/cuda/step_graph.cuh"
#include "lockstep/comm/communicator.hpp"
#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/flat.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/launch/membership.hpp"

namespace lockstep {

namespace detail {

/// data = op over one rank.
template <class T, class Op>
LOCKSTEP_KERNEL reduce_alone(T* data, std::size_t count, Op op) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    data[i] = op.template finish<T>(op.prepare(data[i]), 1);
  }
}

}  // namespace detail

/// Every member: **Ranks** the one there is. **Host** does not block, except in `barrier` and
/// `synchronize`, and with host memory until the result is here. **Stream** the compute stream.
class CudaLoopbackCommunicator {
 public:
  static constexpr std::size_t most_under_way = static_cast<std::size_t>(-1);

  using Milliseconds = std::chrono::milliseconds;

  explicit CudaLoopbackCommunicator(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {}

  CudaLoopbackCommunicator(CudaLoopbackCommunicator&&) noexcept = default;
  CudaLoopbackCommunicator& operator=(CudaLoopbackCommunicator&&) = delete;

  static constexpr Rank rank() { return Rank{0}; }
  static constexpr WorldSize world_size() { return WorldSize{1}; }
  Gpu& gpu() const { return *gpu_; }

  /// Nobody to wait for: the limit is kept for whoever asks.
  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }

  /// `count` elements of the GPU, zeroed. The memory lives as long as the communicator.
  template <Element T>
  std::span<T> allocate(std::size_t count) {
    return {reinterpret_cast<T*>(arenas_.emplace_back(count * sizeof(T)).data()), count};
  }

  void barrier() const { synchronize(); }
  void synchronize() const {
    check_cuda(cudaStreamSynchronize(gpu_->stream()), "cudaStreamSynchronize");
  }
  static constexpr void abandon(std::string_view) {}

  /// The operation over one rank. Of all operations, only a pre-multiplied sum changes what is
  /// there.
  template <class Data, class Op = Sum>
  void all_reduce(Data&& data, Op op = {}) const {
    static_assert(ReduceOp<Op, FlatElement<Data>>,
                  "lockstep: this reduce operation is not defined for these elements");
    if constexpr (requires { op.factor; }) scale(flat(data), op);
  }
  template <class Data, class Op = Sum>
  FinishedWork all_reduce_async(Data&& data, Op op = {}) const {
    all_reduce(data, op);
    return {};
  }
  template <class Data, class Op = Sum>
  void reduce(Data&& data, Rank, Op op = {}) const {
    all_reduce(data, op);
  }
  template <class Data>
  static constexpr void broadcast(Data&&, Rank) {}

  template <class In, class Out>
  void all_gather(const In& in, Out&& out) const {
    copy(flat(in), flat(out));
  }
  template <class In, class Out>
  void gather(const In& in, Out&& out, Rank) const {
    copy(flat(in), flat(out));
  }
  template <class In, class Out>
  void scatter(const In& in, Out&& out, Rank) const {
    copy(flat(in), flat(out));
  }
  template <class In, class Out>
  void all_to_all(const In& in, Out&& out) const {
    copy(flat(in), flat(out));
  }
  template <class In, class Out, class Op = Sum>
  void reduce_scatter(const In& in, Out&& out, Op op = {}) const {
    copy(flat(in), flat(out));
    all_reduce(out, op);
  }

  template <class Data>
  void send(const Data&, Rank to) const {
    throw no_peer("send", to);
  }
  template <class Data>
  void receive(Data&&, Rank from) const {
    throw no_peer("receive", from);
  }

  /// Captures what `f` enqueues as a graph, or says why it could not. **Host** runs `f`.
  template <class F>
  StepGraph capture(F&& f) const {
    return capture_stream(gpu_->stream(), std::forward<F>(f));
  }
  void replay(const StepGraph& graph) const { graph.launch(gpu_->stream()); }

 private:
  static Error no_peer(const char* operation, Rank peer) {
    return {operation,
            "rank " + std::to_string(peer.value()) + " is not another rank of this world",
            "this world has one rank", Rank{0}};
  }

  template <class T, class Op>
  void scale(std::span<T> values, const Op& op) const {
    if (values.empty()) return;
    if (is_host_memory(values.data())) {
      LoopbackCommunicator::all_reduce(values, op);
      return;
    }
    constexpr std::size_t threads = 256;
    constexpr std::size_t most_blocks = 1024;  // it is bound by memory: more gain nothing
    const std::size_t blocks = std::min(most_blocks, (values.size() + threads - 1) / threads);
    detail::reduce_alone<T, Op><<<static_cast<unsigned>(blocks), threads, 0, gpu_->stream()>>>(
        values.data(), values.size(), op);
    check_launch("reduce_alone");
  }

  /// From and to any memory.
  template <class In, class T>
  void copy(std::span<In> from, std::span<T> to) const {
    static_assert(std::same_as<std::remove_const_t<In>, T>,
                  "lockstep: a collective's arguments have one element type");
    if (from.size() != to.size()) {
      throw Error("a world of one",
                  "sizes do not fit: " + std::to_string(from.size()) + " elements and " +
                      std::to_string(to.size()),
                  "give both arguments the same size", Rank{0});
    }
    if (from.data() == to.data() || from.empty()) return;
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), from.size_bytes(), cudaMemcpyDefault,
                               gpu_->stream()),
               "cudaMemcpyAsync");
    if (is_host_memory(from.data()) || is_host_memory(to.data())) synchronize();
  }

  std::shared_ptr<Gpu> gpu_;
  std::deque<DeviceArena> arenas_;
  Milliseconds timeout_{default_timeout};
};

static_assert(ArenaAllocating<CudaLoopbackCommunicator> && AsyncReducing<CudaLoopbackCommunicator>);
static_assert(ReduceScattering<CudaLoopbackCommunicator> && Scattering<CudaLoopbackCommunicator> &&
              Messaging<CudaLoopbackCommunicator>);

}  // namespace lockstep
