// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `BatchNorm`, over a rank's own batch (`Norms<Local>`) or all ranks' (`Norms<Synced>`).

#include "lockstep/detail/norm/host_norm.hpp"

namespace lockstep {

/// Normalises every channel over samples and positions (Ioffe and Szegedy, 2015), like PyTorch's
/// `nn.BatchNorm1d`, `2d` and `3d`. The model lists it in both lists and has it as a member:
///
///     using Norm1 = BatchNorm<"bn1", 32>;
///     using Parameters = ParameterList<..., Norm1, ...>;  // bn1.weight, bn1.bias
///     using Buffers = BufferList<Norm1>;  // bn1.running_mean, .running_var, .num_batches_tracked
///     Norm1 norm1;
///
/// `Text` is the full name with all scopes. `Features` may be `dynamic`: then `shapes` sets it. T
/// is the type of weight and bias; that of activations may differ. These are views in the step's
/// memory: (N, C), (N, C, L) or (N, C, H, W); channels-last images are a view of (N * H * W, C).
///
/// In training, forward saves state for backward, so each position in a network needs its own
/// layer. In evaluation, the running statistics replace the batch's.
template <Name Text, std::size_t Features, FloatingElement T = float>
class BatchNorm : public detail::NormLayer<Text, Features, T> {
  using Base = detail::NormLayer<Text, Features, T>;
  using Base::affine, Base::name, Base::saved_shape_, Base::works_;
  using typename Base::Bias, typename Base::Layer, typename Base::Weight;
  using Statistic = detail::Accumulator<T>;
  using RunningMean = decltype(Layer{} / detail::Key<"running_mean">{});
  using RunningVariance = decltype(Layer{} / detail::Key<"running_var">{});
  using Batches = decltype(Layer{} / detail::Key<"num_batches_tracked">{});
  using Fusion = detail::Fusion;

 public:
  using typename Base::Parameters;
  using Buffers =
      Scope<Text, BufferList<Buffer<"running_mean", Statistic, Features>,
                             detail::StartsAtOne<Buffer<"running_var", Statistic, Features>>,
                             Buffer<"num_batches_tracked", std::int64_t>>>;

  /// With `Norms<Synced>`, the buffers are the same on all ranks.
  static constexpr bool is_batch_norm = true;

  BatchNorm() = default;
  explicit BatchNorm(const BatchNormOptions& options) : options_(options) {}

  /// For a model's `shapes`: `Norm1::shapes(shape, features)`.
  static void shapes(auto& shape, std::size_t features) {
    shape(Weight{}, features);
    shape(Bias{}, features);
    shape(RunningMean{}, features);
    shape(RunningVariance{}, features);
  }

  // **Ranks** with `Norms<Synced>` in training: all of the group, also those without samples.
  // **Host** blocks on a CPU only. **Stream** ordered on the step's.

  /// y = normalised x * weight + bias. In training, y must not be x: backward reads x.
  void forward(auto& step, const auto& x, const auto& y) {
    run_forward<Fusion::none>(step, x, x, y);
  }
  /// y = relu(normalised x * weight + bias).
  void forward_relu(auto& step, const auto& x, const auto& y) {
    run_forward<Fusion::relu>(step, x, x, y);
  }
  /// y = relu(normalised x * weight + bias + residual). y may be residual.
  void forward_add_relu(auto& step, const auto& x, const auto& residual, const auto& y) {
    run_forward<Fusion::add_relu>(step, x, residual, y);
  }

  /// From forward's x, writes dx (may be dy) and the gradients of weight and bias, marked ready.
  void backward(auto& step, const auto& x, const auto& dy, const auto& dx) {
    run_backward<Fusion::none>(step, x, x, dy, dx, dx);
  }
  /// Backward of `forward_relu`.
  void backward_relu(auto& step, const auto& x, const auto& dy, const auto& dx) {
    run_backward<Fusion::relu>(step, x, x, dy, dx, dx);
  }
  /// Backward of `forward_add_relu`, whose y it reads. Either dx or dresidual may be dy.
  void backward_add_relu(auto& step, const auto& x, const auto& y, const auto& dy, const auto& dx,
                         const auto& dresidual) {
    run_backward<Fusion::add_relu>(step, x, y, dy, dx, dresidual);
  }

 private:
  /// Can this call be compiled? Fails to compile with the reason if not.
  template <class Step, class X, class... Others>
  static consteval bool require_call() {
    using Scale = typename Base::template WeightView<Step>;
    using Mean = decltype(std::declval<Step&>().buffer(RunningMean{}));
    // If the model does not declare the layer, the step has reported that.
    if constexpr (detail::is_view<Scale> && detail::is_view<Mean>) {
      constexpr bool same =
          Scale::static_extent(0) == Features && Mean::static_extent(0) == Features;
      static_assert(same,
                    "lockstep: a batch norm has another number of features than in the model's "
                    "lists; let one type stand in both lists and be the member");
      if constexpr (detail::require_layer_views<typename Scale::memory, X, Others...>()) {
        constexpr bool ranks = X::rank() >= 2 && X::rank() <= 4;
        static_assert(ranks,
                      "lockstep: a batch norm takes views of rank 2, 3 or 4: (samples, channels), "
                      "then positions; images with their channels last are a view of "
                      "(N * H * W, C)");
        if constexpr (same && ranks)
          return detail::require_features<X::static_extent(1), Features, X, Others...>();
      }
    }
    return false;
  }

  template <Fusion Fused, class Step, class X, class Residual, class Y>
  void run_forward(Step& step, const X& x, const Residual& residual, const Y& y) {
    if constexpr (require_call<Step, X, Residual, Y>()) {
      const detail::NormShape shape =
          detail::channel_shape(name, x, step.param(Weight{}).extent(0));
      detail::require_equal_shapes(name, x, residual, y);
      if constexpr (std::remove_cvref_t<Step>::is_training())
        detail::require_no_overlap(name, x, y, detail::NormFault::input);
      auto& work = works_.template get<WorkOf<Step>>();
      saved_shape_ = {};  // until the new statistics are complete
      finalize(work, step, shape, x.data_handle());
      if constexpr (std::remove_cvref_t<Step>::is_training()) saved_shape_ = shape;
      work.template normalise<Fused>(detail::stream_of(step), shape, x.data_handle(), affine(step),
                                     Fused == Fusion::add_relu ? residual.data_handle() : nullptr,
                                     y.data_handle());
    }
  }

  template <class Work, class Step, class Value>
  void finalize(Work& work, Step& step, const detail::NormShape& shape, const Value* x) const {
    const auto stream = detail::stream_of(step);
    const detail::NormRunning running{step.buffer(RunningMean{}).data_handle(),
                                      step.buffer(RunningVariance{}).data_handle(),
                                      step.buffer(Batches{}).data_handle()};
    if constexpr (!std::remove_cvref_t<Step>::is_training()) {
      work.reserve(shape.channels, 1);
      work.finalize_from_running(stream, shape, options_, running);
    } else {
      const auto ranks = step.norm_ranks();
      const std::size_t world = ranks.world();
      const bool is_new = work.reserve(shape.channels, world);
      if constexpr (decltype(ranks)::communicates) {
        if (world != 1) {
          if (is_new) ranks.finish_allocations();
          work.measure(stream, shape, x);
          ranks.all_gather(std::span<const double>(work.own()), work.all(world));
          work.finalize(stream, shape, world, options_, running, name);
          return;
        }
      }
      static_cast<void>(is_new);
      if (shape.count() == 1) [[unlikely]]
        detail::reject_norm(name, detail::NormFault::values);
      work.measure_alone(stream, shape, x, options_, running);
    }
  }

  template <Fusion Fused, class Step, class X, class Y, class DY, class DX, class DResidual>
  void run_backward(Step& step, const X& x, const Y& y, const DY& dy, const DX& dx,
                    const DResidual& dresidual) {
    static_assert(std::remove_cvref_t<Step>::is_training(),
                  "lockstep: backward of a norm belongs to a training step");
    if constexpr (require_call<Step, X, Y, DY, DX, DResidual>()) {
      constexpr bool adds = Fused == Fusion::add_relu;
      auto& work = works_.template get<WorkOf<Step>>();
      const auto stream = detail::stream_of(step);
      const detail::NormShape shape =
          detail::channel_shape(name, x, step.param(Weight{}).extent(0));
      detail::require_equal_shapes(name, x, y, dy, dx, dresidual);
      Base::require_saved(shape);
      if constexpr (adds)
        detail::require_no_overlap(name, dx, dresidual, detail::NormFault::residual);
      work.template reduce_backward<Fused>(
          stream, shape, x.data_handle(), adds ? y.data_handle() : nullptr, dy.data_handle(),
          affine(step), Base::affine_gradients(step), adds ? dresidual.data_handle() : nullptr);
      // Before `say_ready`: the all-reduce of a bucket that it completes would delay the sums.
      const auto ranks = step.norm_ranks();
      if constexpr (decltype(ranks)::communicates) {
        if (ranks.world() != 1) ranks.all_reduce(work.sums());
      }
      Base::say_ready(step);
      work.template input_gradient<adds ? Fusion::none : Fused>(
          stream, shape, x.data_handle(), adds ? dresidual.data_handle() : dy.data_handle(),
          affine(step), dx.data_handle());
    }
  }

  template <class Step>
  using WorkOf = detail::NormWork<typename Base::template WeightView<Step>::memory>;

  BatchNormOptions options_;
};

}  // namespace lockstep
