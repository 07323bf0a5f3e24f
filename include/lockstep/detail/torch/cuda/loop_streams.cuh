// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A hand-written loop on a GPU: the streams of LibTorch and of the job wait for each other.

#include <ATen/ops/_foreach_norm.h>
#include <cuda_runtime_api.h>

#include "lockstep/detail/torch/cuda/step_tensors.cuh"
#include "lockstep/detail/torch/loop_gradients.hpp"

namespace lockstep::detail {

template <class Comm>
class LoopStreams<Cuda, Comm> {
  /// Ranks in one process may share a GPU and LibTorch's one thread for it.
  static constexpr bool ranks_are_threads = requires { requires Comm::captures_jointly; };

 public:
  explicit LoopStreams(Comm& comm) : comm_(comm) {
    const OnGpu on(comm.gpu().index());
    device_ = current_torch_gpu().index();
    from_program_.emplace();
    from_job_.emplace();
  }
  LoopStreams(const LoopStreams&) = delete;
  LoopStreams& operator=(const LoopStreams&) = delete;

  /// From now on, since the program calls `loss.backward()` outside of any scope.
  void keep_backward_here() {
    if (BackwardHere::is_elsewhere()) here_.emplace();
  }

  /// Orders `begin` after the program's use of the last averages and before this pass's writes.
  template <class F>
  void begin_pass(const F& begin) {
    if constexpr (ranks_are_threads) {
      if (BackwardHere::is_elsewhere() && comm_.world_size().value() != 1)
        fail(
            "backward",
            {"this pass runs on LibTorch's thread for the GPU, which ranks that are threads share: "
             "it would wait there for a rank that needs the same thread"},
            "call backward on the thread that has called forward, or ddp.backward(loss)");
    }
    job_waits_for_program();
    begin();
    program_waits_for_job();
    met_ = current();
  }
  /// LibTorch runs hooks on the stream that was current when the module was wrapped.
  void before_write() {
    if (met_ == current()) return;
    program_waits_for_job();
    met_ = current();
  }

  /// **Stream** the job's waits for LibTorch's current one.
  void job_waits_for_program() {
    if (current() == job()) return;
    from_program_->record(current());
    from_program_->block(job());
  }
  /// **Stream** LibTorch's current one waits for the job's.
  void program_waits_for_job() {
    if (current() == job()) return;
    from_job_->record(job());
    from_job_->block(current());
  }
  /// **Stream** `f` after LibTorch's current one, whose later work sees its results.
  void in_order(const auto& f) {
    job_waits_for_program();
    f();
    program_waits_for_job();
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
    if (watched_.empty()) watch(averages);
    if (watched_.empty()) return std::nullopt;
    if (!found_.defined()) {
      const auto count = static_cast<std::int64_t>(indices_.size());
      found_ = at::zeros({count}, at::TensorOptions().device(at::kCUDA, device_));
      seen_ = at::zeros({count}, at::TensorOptions().pinned_memory(true));
    }
    // Looked at before this pass is enqueued: after an update with a NaN all gradients are NaN, and
    // the first to be so would not be named.
    const std::optional<std::size_t> earlier = anomaly_seen();
    // The infinity norm is finite if all elements are; otherwise norm - norm is NaN, and stays.
    const at::Tensor all = largest();
    found_.add_(all.sub(all));
    seen_.copy_(found_, /*non_blocking=*/true);
    return earlier;
  }
  /// The first anomaly that the host knows of.
  std::optional<std::size_t> anomaly_seen() const {
    if (!seen_.defined()) return std::nullopt;
    const volatile float* const seen = static_cast<const float*>(seen_.const_data_ptr());
    for (std::size_t i = 0; i != indices_.size(); ++i)
      if (!is_finite(seen[i])) return indices_[i];
    return std::nullopt;
  }

  /// Tells the host the largest magnitude in each average, for the two functions below. **Host**
  /// blocks until the averages are there. **Stream** LibTorch's current one.
  void measure(const std::vector<at::Tensor>& averages) {
    if (watched_.empty()) watch(averages);
    measured_.assign(averages.size(), 0.0);
    if (watched_.empty()) return;
    const at::Tensor all = largest().to(at::kDouble).to(at::kCPU);
    const double* const values = all.const_data_ptr<double>();
    for (std::size_t i = 0; i != indices_.size(); ++i) measured_[indices_[i]] = values[i];
  }
  /// The first average that is NaN or infinite.
  std::optional<std::size_t> measured_anomaly() const {
    for (std::size_t i = 0; i != measured_.size(); ++i)
      if (!is_finite(measured_[i])) return i;
    return std::nullopt;
  }
  bool measured_zero(std::size_t average) const { return measured_[average] == 0; }

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
      streams->in_order([&] { ranks.all_gather(own, all); });
    }
    template <class T>
    void all_reduce(std::span<T> values) const {
      streams->in_order([&] { ranks.all_reduce(values); });
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
  void watch(const std::vector<at::Tensor>& averages) {
    for (std::size_t i = 0; i != averages.size(); ++i) {
      if (averages[i].numel() == 0) continue;
      has_types_ |= averages[i].scalar_type() != averages[0].scalar_type();
      watched_.push_back(averages[i]);
      indices_.push_back(i);
    }
  }
  /// The infinity norm of each watched average: NaN or infinite if an element is.
  at::Tensor largest() const {
    std::vector<at::Tensor> norms =
        at::_foreach_norm(watched_, std::numeric_limits<double>::infinity());
    if (has_types_)
      for (at::Tensor& each : norms) each = each.to(at::kDouble);
    return at::stack(norms);
  }

  cudaStream_t current() const { return c10::cuda::getCurrentCUDAStream(device_).stream(); }
  cudaStream_t job() const { return comm_.gpu().stream(); }

  Comm& comm_;
  c10::DeviceIndex device_ = 0;
  std::optional<CudaEvent> from_program_, from_job_;  // on the replica's GPU
  std::optional<cudaStream_t> met_;
  std::optional<BackwardHere> here_;
  std::vector<at::Tensor> watched_;   // nonempty averages, where somebody looks at them
  std::vector<std::size_t> indices_;  // theirs among all averages
  bool has_types_ = false;            // several
  at::Tensor found_, seen_;       // with Anomaly<Stop>: 0 or NaN, on the GPU and in pinned memory
  std::vector<double> measured_;  // by average, in this pass
};

}  // namespace lockstep::detail
