// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The execution of a GPU: all work is enqueued on the compute stream, and the host goes on.

#include "lockstep/detail/checkpoint/snapshot.cuh"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/device/cuda/batch.cuh"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/hook/power_sgd.cuh"
#include "lockstep/detail/strategy/gpu_update.cuh"

namespace lockstep::detail {

/// The loss of the latest forward pass, for which the host waits when it is converted to a number.
template <class Comm>
class DeviceLoss {
 public:
  /// `forwards` counts the passes that have written to `value`.
  DeviceLoss(Comm& comm, const double* value, const std::uint64_t& forwards)
      : comm_(&comm), value_(value), forwards_(&forwards), number_(forwards) {}

  /// **Host** blocks until the GPU has computed the loss.
  operator double() const {
    if (*forwards_ != number_) {
      throw Error("loss", "a later forward pass has overwritten it",
                  "read a loss before the next step, or let loss_meter() add them up",
                  comm_->rank());
    }
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    double loss = 0;
    copy_now(&loss, value_, sizeof loss);
    return loss;
  }

  const double* device_data() const { return value_; }

 private:
  Comm* comm_;
  const double* value_;
  const std::uint64_t* forwards_;
  std::uint64_t number_;
};

/// Adds a loss to the totals, and shows it in pinned memory. A template: kernels cannot be inline.
template <bool Skips, class T>
LOCKSTEP_KERNEL add_loss(const double* loss, T samples, LossTotals* totals, T* shown) {
  *shown = *loss;
  if (Skips && !is_finite(*loss)) return;
  totals->sum += *loss * samples;
  totals->samples += samples;
}

/// Adds up the losses of an epoch on the GPU, as `LossMeter` does on the host.
template <class Comm, bool Skips>
class DeviceLossMeter {
 public:
  explicit DeviceLossMeter(Comm& comm) : comm_(&comm) {}

  void reset() {
    const OnGpu current(comm_->gpu().index());
    zero_async(totals_.data(), sizeof(LossTotals), comm_->gpu().stream());
  }

  /// **Stream** after the forward pass.
  void add(const DeviceLoss<Comm>& loss, std::size_t samples) {
    const OnGpu current(comm_->gpu().index());
    launch_kernel<add_loss<Skips, double>>(
        "add_loss", comm_->gpu().stream(), 1, 1, loss.device_data(), static_cast<double>(samples),
        totals_.data(), reinterpret_cast<double*>(shown_.data()));
  }

  /// The latest loss that the GPU has added. **Host** does not block.
  double latest() const { return *reinterpret_cast<const volatile double*>(shown_.data()); }

  /// **Host** blocks.
  LossTotals totals() const {
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    LossTotals totals;
    copy_now(&totals, totals_.data(), sizeof totals);
    return totals;
  }
  /// **Host** blocks.
  void set_totals(const LossTotals& totals) {
    const OnGpu current(comm_->gpu().index());
    comm_->synchronize();
    copy_now(totals_.data(), &totals, sizeof totals);
  }

 private:
  Comm* comm_;
  PinnedArena shown_{sizeof(double)};
  // Freed first, which waits for kernels that write to `shown_`.
  DeviceElements<LossTotals> totals_{1};
};

/// The model's step. Forward and backward enqueue all work on `stream()`, or on streams forked from
/// it and joined again, and never wait for the GPU. Forward writes the mean loss to `loss()`.
template <class Traits, class Comm>
class GpuStep : public Traits::bare_step {
 public:
  GpuStep(const TensorLayouts<Traits>& layouts, Arenas arenas, Comm& comm, double* loss,
          const float* loss_scale)
      : Traits::bare_step(layouts.parameters, layouts.buffers, arenas),
        comm_(&comm),
        loss_(loss),
        loss_scale_(loss_scale) {}

  cudaStream_t stream() const { return comm_->gpu().stream(); }

  /// One number in device memory.
  double* loss() const { return loss_; }

  /// The factor by which the model multiplies its loss's gradient, so that small gradients survive
  /// in 16 bits; the optimizer divides by it. One number in device memory.
  const float* loss_scale() const
    requires(Traits::scales_loss)
  {
    return loss_scale_;
  }

  /// **Host** blocks until the stream is empty: for evaluation, never in forward or backward.
  void synchronize() const { comm_->synchronize(); }

  /// Copies a gradient from a `DeviceView` of its shape, and marks it ready. **Stream** `stream()`.
  void set_grad(auto key, const auto& value) const {
    write_view(this->grad(key), key, value);
    this->ready(key);
  }

 protected:
  template <class View, class Key, class Value>
  void write_view(const View& gradient, Key key, const Value& value) const {
    using T = typename View::value_type;
    constexpr bool fits = requires {
      requires is_view<Value> && std::is_same_v<typename Value::memory, DeviceMemory> &&
                   std::is_same_v<typename Value::value_type, T>;
    };
    static_assert(
        fits,
        "lockstep: set_grad on a GPU copies a DeviceView of the parameter's element "
        "type; write other gradients in a kernel, through step.grad, and call step.ready");
    if constexpr (fits) {
      if (!has_shape_of(gradient, value)) reject_gradient(key, gradient.size(), value.size());
      copy_async(gradient.data_handle(), value.data_handle(), gradient.size() * sizeof(T),
                 stream());
    }
  }

 private:
  Comm* comm_;
  double* loss_;
  const float* loss_scale_;
};

/// The values that a model initializes (see `ArenaValues`), copied to the host. `Declared` and
/// `Used` are a model's layouts in two sets of types. `masters` are float copies of the trained
/// tensors, element for element: they are read instead of the used tensors, and both are written.
///
/// A tensor takes host memory from `open` to `close`; two further buffers of `window` bytes stage
/// all copies. **Host** blocks in every member; the stream that uses the arenas must be empty.
template <class Declared, class Used>
class ArenaCopy {
 public:
  static constexpr std::size_t window = HostStaging::window;

  ArenaCopy(const auto& model, std::byte* used, std::byte* masters = nullptr)
      : declared_(model),
        used_(model),
        arena_(used),
        masters_(masters),
        open_(declared_.infos().size()) {}

  bool is_open(std::size_t tensor) const { return open_[tensor].has_value(); }
  /// Copies a tensor to the host. Returns where an arena with the declared layout would begin.
  std::byte* open(std::size_t tensor) {
    if (!is_open(tensor)) {
      open_[tensor].emplace(declared_.plan().placements[tensor].bytes);
      const auto [data, kind] = has_master(tensor) ? master(tensor) : used(tensor);
      staging_.copy(open_[tensor]->data(), declared_kind(tensor), data, kind, count(tensor));
    }
    return open_[tensor]->data() - declared_.plan().placements[tensor].offset;
  }

  /// Copies an open tensor to the GPU and frees its host memory.
  void close(std::size_t tensor) {
    if (!is_open(tensor)) return;
    send(tensor, open_[tensor]->data(), 0, count(tensor));
    open_[tensor].reset();
  }
  void flush() {
    for (std::size_t tensor = 0; tensor != open_.size(); ++tensor) close(tensor);
  }

  /// Calls `f(values)` for pieces of a tensor of T, in order, that cover it; `f` writes them all.
  template <class T, class F>
  void fill(std::size_t tensor, const Placement&, const F& f) {
    const std::size_t all = count(tensor);
    if (is_open(tensor)) return f(elements_at<T>(open_[tensor]->data(), 0, all * sizeof(T)));
    if (piece_.bytes() == 0) piece_ = HostArena(window);
    constexpr std::size_t most = window / sizeof(T);
    for (std::size_t first = 0; first < all; first += most) {
      const std::size_t some = std::min(most, all - first);
      f(elements_at<T>(piece_.data(), 0, some * sizeof(T)));
      send(tensor, piece_.data(), first, some);
    }
  }

 private:
  using Elements = std::pair<std::byte*, ElementKind>;
  Elements used(std::size_t tensor) const {
    return {arena_ + used_.plan().placements[tensor].offset, used_.infos()[tensor].element};
  }
  Elements master(std::size_t tensor) const {
    const std::size_t before =
        used_.plan().placements[tensor].offset / element_size(used_.infos()[tensor].element);
    return {masters_ + before * sizeof(float), ElementKind::f32};
  }
  bool has_master(std::size_t tensor) const {
    return masters_ != nullptr && used_.plan().is_trained(tensor);
  }
  ElementKind declared_kind(std::size_t tensor) const { return declared_.infos()[tensor].element; }
  std::size_t count(std::size_t tensor) const { return declared_.infos()[tensor].count(); }

  /// Copies the tensor's elements from `first` on from the host to the used tensor and its master.
  void send(std::size_t tensor, const std::byte* from, std::size_t first, std::size_t some) {
    const auto to = [&](const Elements& all) {
      staging_.copy(all.first + first * element_size(all.second), all.second, from,
                    declared_kind(tensor), some);
    };
    to(used(tensor));
    if (has_master(tensor)) to(master(tensor));
  }

  [[no_unique_address]] Declared declared_;
  [[no_unique_address]] Used used_;
  std::byte* arena_;
  std::byte* masters_;
  std::vector<std::optional<HostArena>> open_;  // host memory of open tensors
  HostStaging staging_;
  HostArena piece_{0};  // a piece of a tensor in `fill`
};

template <class Traits, class Comm>
class DeviceExecution<Cuda, Traits, Comm> {
 public:
  using Arena = DeviceArena;
  using Loss = DeviceLoss<Comm>;
  using Meter = DeviceLossMeter<Comm, Traits::skips_anomalies>;
  using Step = GpuStep<Traits, Comm>;
  using UpdatePasses = GpuUpdate<Traits, Comm>;
  using OnDevice = OnDeviceOf<Comm>;

  explicit DeviceExecution(Comm& comm) : comm_(comm) {
    static_assert(Execution<DeviceExecution>);
    DeviceValues first;
    first.state.loss_scale = first_loss_scale(LossScaleOptions{});
    copy_now(values_.data(), &first, sizeof first);
  }

  Step step(const TensorLayouts<Traits>& layouts, Arenas arenas) {
    return Step(layouts, arenas, comm_, loss_value(), &step_state()->loss_scale.scale);
  }

  /// The optimizer's state between updates, in device memory.
  StepState* step_state() const { return &values_.data()->state; }

  double* loss_value() const { return &values_.data()->loss; }

  /// **Stream** the copy is ordered among the steps.
  template <class Batch>
  const auto& to_device(const Batch& batch) {
    return storage_.get<BatchUpload<Batch>>()(batch, stream());
  }

  template <class Batch>
  const auto& to_device(const Batch& batch, std::size_t first, std::size_t count, std::size_t room)
    requires requires(BatchUpload<Batch>& upload) {
      upload(batch, first, count, room, cudaStream_t{});
    }
  {
    return storage_.get<BatchUpload<Batch>>()(batch, first, count, room, stream());
  }

  /// A batch in device memory, or a copy of it, in `near`, where it lies on another GPU.
  template <class Batch>
  using Near = NearBatch<Batch>;
  template <class Batch>
  const Batch& bring_near(const Batch& batch, Near<Batch>& near) {
    return near(batch, stream());
  }

  Loss forward(auto& model, auto& step, const auto& batch) {
    note_forward();
    model.forward(step, batch);
    return latest_loss();
  }

  Loss loss(auto& model, auto& step, const auto& batch, const auto& outputs,
            const auto& gradients) {
    note_forward();
    model.loss(step, batch, outputs, gradients);
    return latest_loss();
  }

  /// Averages weighted losses over ranks; a rank of weight 0 has no loss. **Ranks** all.
  void average_loss(double weight) {
    if (comm_.world_size() == WorldSize{1}) return;
    const std::span<double> loss(loss_value(), 1);
    if (weight == 0) {
      note_forward();
      zero(reinterpret_cast<std::byte*>(loss.data()), loss.size_bytes());
    } else if (weight != 1) {
      scale(loss, weight);
    }
    comm_.all_reduce(loss, Average{});
  }

  void note_forward() { ++forwards_; }
  Loss latest_loss() const { return Loss(comm_, loss_value(), forwards_); }

  /// Is the other execution on another GPU? Memory there is copied rather than read repeatedly.
  bool is_far_from(const DeviceExecution& other) const {
    return comm_.gpu().index() != other.comm_.gpu().index();
  }
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    copy_async(to, from, bytes, stream());
  }

  Meter meter() { return Meter(comm_); }

  template <class T>
  void add(std::span<T> sum, std::span<const T> more) {
    launch_add<dynamic, PackShape, SameElement<T>>(stream(), sum.data(), more.data(), sum.size());
  }

  template <class T>
  void scale(std::span<T> values, double factor) {
    cast_async(values, values, factor, stream());
  }

  template <class To, class From>
  void cast(std::span<To> to, std::span<From> from) {
    cast_async(to, from, 1, stream());
  }

  void zero(std::byte* data, std::size_t bytes) { zero_async(data, bytes, stream()); }

  /// Values are written on the host, in declared types and layouts, and copied. **Host** blocks.
  void initialize(const typename Traits::model& model, Arenas arenas, std::byte* masters,
                  const auto& write) {
    using Model = typename Traits::model;
    comm_.synchronize();
    ArenaCopy<typename Traits::declared_layout, typename Traits::layout> parameters(
        model, arenas.parameters, masters);
    ArenaCopy<BufferLayout<Model>, typename Traits::buffer_layout> buffers(model, arenas.buffers);
    write(parameters, buffers);
    parameters.flush();
    buffers.flush();
  }

 private:
  struct DeviceValues {
    double loss = 0;
    StepState state;
  };

  cudaStream_t stream() const { return comm_.gpu().stream(); }

  Comm& comm_;
  DeviceElements<DeviceValues> values_{1};
  std::uint64_t forwards_ = 0;
  TypedStorage storage_;
};

}  // namespace lockstep::detail
