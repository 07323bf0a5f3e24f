// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `BatchNorm`, whose statistics are a rank's own or those of all ranks, as the job's policy
/// says: `Norms<Local>` or `Norms<Synced>`.

#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/norm/host_norm.hpp"
#include "lockstep/norm/statistics.hpp"
#include "lockstep/norm/work.hpp"

namespace lockstep {

/// Normalises every channel over samples and positions (Ioffe and Szegedy, 2015), as PyTorch's
/// `nn.BatchNorm1d`, `2d` and `3d` do. It declares its tensors in both lists of a model and is a
/// member of it:
///
///     using Norm1 = BatchNorm<"bn1", 32>;
///     using Parameters = ParameterList<..., Norm1, ...>;  // bn1.weight, bn1.bias
///     using Buffers = BufferList<Norm1>;  // bn1.running_mean, .running_var, .num_batches_tracked
///     Norm1 norm1;
///
/// `Text` is the whole name, with all scopes. `Features` may be `dynamic`: then `shapes` gives it.
/// T is the type of weight and bias; activations may have another. Activations are views of rank 2,
/// 3 or 4, (N, C), (N, C, L) or (N, C, H, W), in the memory of the step; images with their channels
/// last are a view of (N * H * W, C).
///
/// In training, forward keeps what backward needs, so that each place in a network has a layer of
/// its own. In evaluation, the running statistics stand for those of the batch.
template <Name Text, std::size_t Features, FloatingElement T = float>
class BatchNorm : public detail::NormLayer<Text, Features, T> {
  using Base = detail::NormLayer<Text, Features, T>;
  using Base::affine, Base::memory_, Base::name;
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

  /// Where ranks take statistics together, its buffers are the same on all of them.
  static constexpr bool is_batch_norm = true;

  BatchNorm() = default;
  explicit BatchNorm(const BatchNormOptions& options) : options_(options) {}

  /// The shapes of its tensors, in a model's `shapes`: `Norm1::shapes(shape, features)`.
  static void shapes(auto& shape, std::size_t features) {
    shape(Weight{}, features);
    shape(Bias{}, features);
    shape(RunningMean{}, features);
    shape(RunningVariance{}, features);
  }

  // **Ranks** with `Norms<Synced>`, in training: all, or those of the group, also those without
  // samples. **Host** on a CPU done when it returns; a GPU's is not waited for. **Stream** the
  // step's.

  /// y = x, normalised, * weight + bias. In training y is not x's memory: backward reads x.
  template <class Step, class X, class Y>
  void forward(Step& step, const X& x, const Y& y) {
    run_forward<Fusion::none>(step, x, x, y);
  }
  /// y = relu of that.
  template <class Step, class X, class Y>
  void forward_relu(Step& step, const X& x, const Y& y) {
    run_forward<Fusion::relu>(step, x, x, y);
  }
  /// y = relu of that + residual, which may be y's memory.
  template <class Step, class X, class Residual, class Y>
  void forward_add_relu(Step& step, const X& x, const Residual& residual, const Y& y) {
    run_forward<Fusion::add_relu>(step, x, residual, y);
  }

  /// Writes dx, which may be dy's memory, and the gradients of weight and bias, and says that these
  /// are ready. x is what forward got.
  template <class Step, class X, class DY, class DX>
  void backward(Step& step, const X& x, const DY& dy, const DX& dx) {
    run_backward<Fusion::none>(step, x, x, dy, dx, dx);
  }
  /// The same behind `forward_relu`.
  template <class Step, class X, class DY, class DX>
  void backward_relu(Step& step, const X& x, const DY& dy, const DX& dx) {
    run_backward<Fusion::relu>(step, x, x, dy, dx, dx);
  }
  /// The same behind `forward_add_relu`, whose y it needs. Either dx or dresidual may be dy's
  /// memory.
  template <class Step, class X, class Y, class DY, class DX, class DResidual>
  void backward_add_relu(Step& step, const X& x, const Y& y, const DY& dy, const DX& dx,
                         const DResidual& dresidual) {
    run_backward<Fusion::add_relu>(step, x, y, dy, dx, dresidual);
  }

 private:
  /// Says in words why a call of this layer cannot be compiled. Returns whether it can.
  template <class Step, class X, class... Others>
  static consteval bool require_call() {
    using Scale = typename Base::template WeightView<Step>;
    using Mean = decltype(std::declval<Step&>().buffer(RunningMean{}));
    // Where the model does not declare the layer, the step has said so.
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
        detail::require_apart(name, x, y, detail::NormFault::input);
      auto& work = memory_.template get<WorkOf<Step>>();
      memory_.keep({});  // until these are found
      settle(work, step, shape, x.data_handle());
      if constexpr (std::remove_cvref_t<Step>::is_training()) memory_.keep(shape);
      work.template normalise<Fused>(detail::stream_of(step), shape, x.data_handle(), affine(step),
                                     Fused == Fusion::add_relu ? residual.data_handle() : nullptr,
                                     y.data_handle());
    }
  }

  /// Finds the statistics by which this pass normalises.
  template <class Work, class Step, class Value>
  void settle(Work& work, Step& step, const detail::NormShape& shape, const Value* x) const {
    const auto stream = detail::stream_of(step);
    const detail::NormRunning running{step.buffer(RunningMean{}).data_handle(),
                                      step.buffer(RunningVariance{}).data_handle(),
                                      step.buffer(Batches{}).data_handle()};
    if constexpr (!std::remove_cvref_t<Step>::is_training()) {
      work.reserve(shape.channels, 1);
      work.settle_from_running(stream, shape, options_, running);
    } else {
      const auto ranks = step.norm_ranks();
      const std::size_t world = ranks.world();
      const bool is_new = work.reserve(shape.channels, world);
      if constexpr (decltype(ranks)::communicates) {
        if (world != 1) {
          if (is_new) ranks.settle_allocations();
          work.measure(stream, shape, x);
          ranks.all_gather(std::span<const double>(work.own()), work.all(world));
          work.settle(stream, shape, world, options_, running, name);
          return;
        }
      }
      static_cast<void>(is_new);
      if (shape.count() == 1) [[unlikely]]
        detail::refuse_norm(name, detail::NormFault::values);
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
      auto& work = memory_.template get<WorkOf<Step>>();
      const auto stream = detail::stream_of(step);
      const detail::NormShape shape =
          detail::channel_shape(name, x, step.param(Weight{}).extent(0));
      detail::require_equal_shapes(name, x, y, dy, dx, dresidual);
      memory_.require_kept(name, shape);
      if constexpr (adds) detail::require_apart(name, dx, dresidual, detail::NormFault::residual);
      work.template reduce_backward<Fused>(
          stream, shape, x.data_handle(), adds ? y.data_handle() : nullptr, dy.data_handle(),
          affine(step), Base::affine_gradients(step), adds ? dresidual.data_handle() : nullptr);
      // The sums go first: a bucket that the gradients complete would keep them waiting.
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
