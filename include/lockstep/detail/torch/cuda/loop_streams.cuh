// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A hand-written loop on a GPU: the program uses LibTorch's current stream, the job its own,
/// and they wait for each other's events; the host does not wait.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <thread>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/strong.hpp"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/optim/update.hpp"
#include "lockstep/detail/torch/cuda/step_tensors.cuh"
#include "lockstep/detail/torch/loop_gradients.hpp"

namespace lockstep::detail {

/// `BackwardHere` from `hold` on, since the program calls `loss.backward()` outside of any scope.
class BackwardStaysHere {
 public:
  BackwardStaysHere() = default;
  BackwardStaysHere(const BackwardStaysHere&) = delete;
  BackwardStaysHere& operator=(const BackwardStaysHere&) = delete;
  ~BackwardStaysHere() {
    if (thread_ == std::this_thread::get_id()) state().set_multithreading_enabled(true);
  }

  void hold() {
    if (!state().get_multithreading_enabled()) return;
    state().set_multithreading_enabled(false);
    thread_ = std::this_thread::get_id();
  }
  /// Is the current pass on a LibTorch thread? (Such a thread inherits the caller's settings.)
  static bool runs_elsewhere() { return state().get_multithreading_enabled(); }

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  std::thread::id thread_;
};

template <class Replica>
class LoopStreams<Cuda, Replica> {
  /// Ranks in one process may share a GPU and LibTorch's one thread for it.
  static constexpr bool ranks_are_threads =
      requires { requires Replica::communicator_type::captures_jointly; };

 public:
  explicit LoopStreams(Replica& replica) : replica_(replica) {
    const auto on = replica.on_device();
    device_ = current_torch_gpu().index();
    events_.emplace();
  }
  LoopStreams(const LoopStreams&) = delete;
  LoopStreams& operator=(const LoopStreams&) = delete;

  void keep_backward_here() { here_.hold(); }

  /// Orders `begin` after the program's use of the last averages and before this pass's writes.
  template <class F>
  void begin_pass(const F& begin) {
    if constexpr (ranks_are_threads) {
      if (BackwardStaysHere::runs_elsewhere() && replica_.communicator().world_size().value() != 1)
        reject_other_thread();
    }
    job_waits_for_program();
    begin();
    program_waits_for_job();
    met_ = current();
  }
  /// LibTorch runs a hook on the stream that was current when the module was wrapped, after a wait
  /// for the gradient; usually all hooks have the same.
  void before_write() {
    if (met_ == current()) return;
    program_waits_for_job();
    met_ = current();
  }

  /// **Stream** the job's waits for LibTorch's current one.
  void job_waits_for_program() {
    if (current() == job()) return;
    events_->from_program.record(current());
    events_->from_program.block(job());
  }
  /// **Stream** LibTorch's current one waits for the job's.
  void program_waits_for_job() {
    if (current() == job()) return;
    events_->from_job.record(job());
    events_->from_job.block(current());
  }
  /// **Host** blocks until both streams are empty.
  void synchronize() {
    check_cuda(cudaStreamSynchronize(job()), "cudaStreamSynchronize");
    check_cuda(cudaStreamSynchronize(current()), "cudaStreamSynchronize");
  }

  /// **Stream** LibTorch's current one, on which the allocator may reuse the gradient's memory.
  template <class Step>
  static void write(const Step&, at::Tensor& to, const at::Tensor& gradient) {
    to.copy_(gradient);
  }

  /// Enqueues a check for NaN or infinite averages, and returns the first that the host already
  /// knows of from earlier calls. **Host** does not block. **Stream** LibTorch's current one.
  std::optional<std::size_t> find_anomaly(const std::vector<at::Tensor>& averages) {
    if (!watched_.found.defined()) watched_ = watch(averages);
    if (watched_.tensors.empty()) return std::nullopt;
    // The infinity norm is finite if all elements are; otherwise norm - norm is NaN, and stays.
    std::vector<at::Tensor> largest =
        at::_foreach_norm(watched_.tensors, std::numeric_limits<double>::infinity());
    if (watched_.has_types)
      for (at::Tensor& each : largest) each = each.to(at::kDouble);
    const at::Tensor all = at::stack(largest);
    watched_.found.add_(all.sub(all));
    watched_.seen.copy_(watched_.found, /*non_blocking=*/true);
    return anomaly_seen();
  }
  /// The first anomaly that the host knows of.
  std::optional<std::size_t> anomaly_seen() const {
    if (!watched_.seen.defined()) return std::nullopt;
    const volatile float* const seen = static_cast<const float*>(watched_.seen.const_data_ptr());
    for (std::size_t i = 0; i != watched_.indices.size(); ++i)
      if (!is_finite(seen[i])) return watched_.indices[i];
    return std::nullopt;
  }

  /// Norms compute on the program's stream and communicate on the job's.
  template <class Ranks>
  struct NormRanksBetween {
    static constexpr bool communicates = true;
    Ranks ranks;
    LoopStreams* streams;

    std::size_t world() const { return ranks.world(); }
    Rank rank() const { return ranks.rank(); }
    template <class T>
    void all_gather(std::span<const T> own, std::span<T> all) const {
      streams->job_waits_for_program();
      ranks.all_gather(own, all);
      streams->program_waits_for_job();
    }
    template <class T>
    void all_reduce(std::span<T> values) const {
      streams->job_waits_for_program();
      ranks.all_reduce(values);
      streams->program_waits_for_job();
    }
  };
  template <class Step>
  auto norm_ranks(const Step& step) {
    using Ranks = std::remove_cvref_t<decltype(step.norm_ranks())>;
    if constexpr (Ranks::communicates) {
      return NormRanksBetween<Ranks>{step.norm_ranks(), this};
    } else {
      return step.norm_ranks();
    }
  }

 private:
  struct Events {
    CudaEvent from_program;
    CudaEvent from_job;
  };

  /// The nonempty averages, and for each 0 or NaN on the GPU and in pinned host memory.
  struct Watched {
    std::vector<at::Tensor> tensors;
    std::vector<std::size_t> indices;
    bool has_types = false;  // several
    at::Tensor found, seen;
  };
  Watched watch(const std::vector<at::Tensor>& averages) const {
    Watched made;
    for (std::size_t i = 0; i != averages.size(); ++i) {
      if (averages[i].numel() == 0) continue;
      made.has_types |= averages[i].scalar_type() != averages[0].scalar_type();
      made.tensors.push_back(averages[i]);
      made.indices.push_back(i);
    }
    const auto count = static_cast<std::int64_t>(made.indices.size());
    made.found = at::zeros({count}, at::TensorOptions().device(at::kCUDA, device_));
    made.seen = at::zeros({count}, at::TensorOptions().pinned_memory(true));
    return made;
  }

  cudaStream_t current() const { return c10::cuda::getCurrentCUDAStream(device_).stream(); }
  cudaStream_t job() const { return replica_.communicator().gpu().stream(); }

  [[noreturn, gnu::cold, gnu::noinline]] static void reject_other_thread() {
    throw Error("backward",
                "this pass runs on LibTorch's thread for the GPU, which ranks that are threads "
                "share: it would wait there for a rank that needs the same thread",
                "call backward on the thread that has called forward, or ddp.backward(loss)");
  }

  Replica& replica_;
  c10::DeviceIndex device_ = 0;
  std::optional<Events> events_;  // on the replica's GPU
  std::optional<cudaStream_t> met_;
  BackwardStaysHere here_;
  Watched watched_;  // with Anomaly<Stop>
};

}  // namespace lockstep::detail
