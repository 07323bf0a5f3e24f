// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file DDP's work on a GPU: everything is enqueued on the compute stream, and the host goes on.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/pack.cuh"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/typed_storage.hpp"
#include "lockstep/device/cuda/batch_upload.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/device.hpp"
#include "lockstep/strategy/arena_copy.cuh"
#include "lockstep/strategy/device_loss.cuh"
#include "lockstep/strategy/gpu_step.cuh"
#include "lockstep/strategy/gpu_updater.cuh"
#include "lockstep/strategy/host_execution.hpp"
#include "lockstep/strategy/step_graphs.cuh"

namespace lockstep {

template <class Traits, class Comm>
class Execution<Cuda, Traits, Comm> {
 public:
  using Arena = DeviceArena;
  using Loss = DeviceLoss<Comm>;
  using Meter = DeviceLossMeter<Comm>;
  using Step = GpuStep<Traits, Comm>;
  template <class Reducer>
  using UpdaterOf = GpuUpdater<Traits, Comm, Reducer>;

  explicit Execution(Comm& comm) : comm_(comm), kept_(sizeof(Kept)) {
    Kept first;
    first.state.loss_scale = first_loss_scale(LossScaleOptions{});
    copy_now(kept_.data(), &first, sizeof first);
  }

  template <class Model>
  Step step(const Model& model, Arenas arenas) {
    return Step(model, arenas, comm_, &kept()->loss, &kept()->state.loss_scale.scale);
  }

  template <class Reducer>
  UpdaterOf<Reducer> updater(Comm& comm, const typename Traits::layout& layout,
                             std::byte* parameters) {
    return UpdaterOf<Reducer>(comm, &kept()->state, layout, parameters);
  }

  /// **Stream** the copy is ordered among the steps.
  template <class Batch>
  const auto& place(const Batch& batch) {
    return storage_.get<BatchUpload<Batch>>()(batch, stream());
  }

  /// Samples [first, first + count) of a batch; `room` is the most that any rank has of it.
  template <class Batch>
  const auto& place(const Batch& batch, std::size_t first, std::size_t count, std::size_t room)
    requires requires(BatchUpload<Batch>& upload) {
      upload(batch, first, count, room, cudaStream_t{});
    }
  {
    return storage_.get<BatchUpload<Batch>>()(batch, first, count, room, stream());
  }

  template <class Model, class TheStep, class Batch>
  Loss forward(Model& model, TheStep& step, const Batch& batch) {
    ++forwards_;
    model.forward(step, batch);
    return latest_loss();
  }

  /// The loss of all replicas' outputs.
  template <class Model, class TheStep, class Batch, class Outputs, class Gradients>
  Loss loss(Model& model, TheStep& step, const Batch& batch, const Outputs& outputs,
            const Gradients& gradients) {
    ++forwards_;
    model.loss(step, batch, outputs, gradients);
    return latest_loss();
  }

  /// The latest loss becomes the mean of all ranks', of which this one's counts `weight`; one that
  /// counts nothing has none. **Ranks** all.
  void average_loss(double weight) {
    const std::span<double> loss(&kept()->loss, 1);
    if (weight == 0) {
      ++forwards_;
      zero(reinterpret_cast<std::byte*>(loss.data()), loss.size_bytes());
    } else if (weight != 1) {
      scale(loss, weight);
    }
    comm_.all_reduce(loss, Average{});
  }

  Loss latest_loss() const { return Loss(comm_, &kept()->loss, forwards_); }

  /// Another GPU's memory is better copied than read again and again.
  bool is_far_from(const Execution& other) const {
    return comm_.gpu().index() != other.comm_.gpu().index();
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
  }

  Meter meter() { return Meter(comm_); }

  /// One micro-batch as part of a graph, or what it takes to have one. `variant` tells batches
  /// apart that look alike to this rank and not to all.
  template <class Batch, class Enqueue, class Gradients>
  Loss captured(const Batch& batch, bool last, Gradients& gradients, const Enqueue& enqueue,
                std::uint64_t variant = 0) {
    const std::size_t before = gradients.micro_batches();
    storage_.get<StepGraphs<Comm, Batch>>().run(
        comm_, batch, {gradients.holds_gradients(), last, variant}, enqueue,
        [&] {
          gradients.note_replay(last);
          ++forwards_;
        },
        [&] { gradients.rewind(before); });
    return latest_loss();
  }

  template <class Batch>
  std::size_t graphs() {
    using Placed = std::remove_cvref_t<decltype(std::declval<BatchUpload<Batch>&>()(
        std::declval<const Batch&>(), cudaStream_t{}))>;
    return storage_.get<StepGraphs<Comm, Placed>>().size();
  }

  template <class T>
  void add(std::span<T> sum, std::span<const T> more) {
    launch_add<dynamic, PackShape, SameElement<T>>(stream(), sum.data(), more.data(), sum.size());
  }

  /// values *= factor.
  template <class T>
  void scale(std::span<T> values, double factor) {
    launch_cast<dynamic, PackShape, SameElement<T>, SameElement<T>>(
        stream(), values.data(), values.data(), factor, values.size());
  }

  /// to = from, in another type.
  template <class To, class From>
  void cast(std::span<To> to, std::span<From> from) {
    launch_cast<dynamic, PackShape, SameElement<From>, SameElement<To>>(stream(), from.data(),
                                                                        to.data(), 1, from.size());
  }

  void zero(std::byte* data, std::size_t bytes) {
    check_cuda(cudaMemsetAsync(data, 0, bytes, stream()), "cudaMemsetAsync");
  }

  /// Values are written on the host, in the types and layouts that the model declares, and copied.
  /// **Host** blocks.
  template <class Updating, class Write>
  void initialize(const typename Traits::model& model, Arenas arenas, const Updating& updating,
                  const Write& write) {
    using Model = typename Traits::model;
    comm_.synchronize();
    std::byte* masters = nullptr;
    if constexpr (Traits::keeps_masters) masters = updating.masters().data();
    const ArenaCopy<typename Traits::declared_layout, typename Traits::layout,
                    typename Traits::parameter_types, Model, TensorRole::parameter>
        parameters(model, arenas.parameters, masters);
    const ArenaCopy<BufferLayout<Model>, typename Traits::buffer_layout,
                    typename Traits::buffer_types, Model, TensorRole::buffer>
        buffers(model, arenas.buffers);
    write(parameters.declared(), buffers.declared());
    parameters.deliver();
    buffers.deliver();
  }

 private:
  /// What lies in device memory from step to step.
  struct Kept {
    double loss = 0;
    StepState state;
  };

  cudaStream_t stream() const { return comm_.gpu().stream(); }
  Kept* kept() const { return reinterpret_cast<Kept*>(kept_.data()); }

  Comm& comm_;
  DeviceArena kept_;
  std::uint64_t forwards_ = 0;
  TypedStorage storage_;
};

}  // namespace lockstep
