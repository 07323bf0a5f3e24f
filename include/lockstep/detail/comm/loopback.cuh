// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicator of a world of one on a GPU: copies on the compute stream, else nothing.

#include "lockstep/detail/comm/combine.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/device/cuda/step_graph.cuh"

namespace lockstep {

/// **Host** only `barrier`, `synchronize` and host memory block. **Stream** the compute stream.
class CudaLoopbackCommunicator : public Collectives<CudaLoopbackCommunicator>,
                                 public detail::AloneInWorld,
                                 public detail::DeviceAllocating {
 public:
  explicit CudaLoopbackCommunicator(std::shared_ptr<Gpu> gpu) : gpu_(std::move(gpu)) {}

  CudaLoopbackCommunicator(CudaLoopbackCommunicator&&) noexcept = default;
  CudaLoopbackCommunicator& operator=(CudaLoopbackCommunicator&&) = delete;
  using AloneInWorld::agree;

  Gpu& gpu() const { return *gpu_; }

  void synchronize() const {
    check_cuda(cudaStreamSynchronize(gpu_->stream()), "cudaStreamSynchronize");
  }

  /// Captures what `f` enqueues as a graph, or says why it could not. **Host** runs `f`.
  template <class F>
  detail::StepGraph capture(F&& f) const {
    return detail::capture_stream(gpu_->stream(), std::forward<F>(f));
  }
  void replay(const detail::StepGraph& graph) const { graph.launch(gpu_->stream()); }

  // Called by `Collectives`.

  template <class C>
  void perform(const C& call) const {
    if constexpr (C::kind == detail::CollectiveKind::barrier) {
      synchronize();
    } else {
      detail::perform_alone(Passes(gpu_->stream()), call);
    }
  }

  /// A group of a world of one is a world of one, on the same GPU and compute stream.
  template <std::size_t GroupRanks>
  std::optional<CudaLoopbackCommunicator> split(const detail::GroupPosition& position) const {
    if (!position.is_member()) return std::nullopt;
    return std::optional<CudaLoopbackCommunicator>(std::in_place, gpu_);
  }

 private:
  /// Passes from and to any memory.
  struct Passes : detail::StreamPasses {
    using StreamPasses::StreamPasses;

    template <class T>
    void copy(std::span<const T> from, std::span<T> to) const {
      if (from.data() == to.data() || from.empty()) return;
      detail::copy_async(to.data(), from.data(), from.size_bytes(), stream_);
      if (!is_device(from.data()) || !is_device(to.data()))
        check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }
  };

  std::shared_ptr<Gpu> gpu_;
};

}  // namespace lockstep
