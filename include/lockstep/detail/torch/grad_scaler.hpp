// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `lockstep::torch::GradScaler`: `torch.amp.GradScaler` for hand-written loops.

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "lockstep/detail/torch/ivalue.hpp"

namespace lockstep {

inline namespace torch_modules {

/// The arguments of Python's `GradScaler`, with its default values.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< of the scale, after `growth_interval` steps without an infinity
  double backoff_factor = 0.5;  ///< of the scale, after a step with an infinity or NaN
  std::int64_t growth_interval = 2000;
  bool enabled = true;
};

}  // namespace torch_modules

namespace detail {

/// Stands for the wrapper of a `GradScaler` that has none.
struct NoWrapper {
  static constexpr bool ignores_anomalies = true;
};

}  // namespace detail

inline namespace torch_modules {

/// Python's `GradScaler`: small gradients of half precision survive because the loss is scaled, and
/// a step whose gradients have overflowed is left out. On CPUs and GPUs:
///
///     lockstep::torch::DistributedDataParallel<Net, Anomaly<Ignore>> ddp(net, session);
///     lockstep::torch::GradScaler scaler(ddp);
///     for (auto& [inputs, labels] : batches) {
///       at::Tensor loss;
///       {
///         const lockstep::Autocast in_half(at::kCUDA, at::kHalf);
///         loss = torch::cross_entropy_loss(ddp(inputs), labels);
///       }
///       scaler.scale(loss).backward();
///       scaler.step(optimizer);
///       scaler.update();
///       optimizer.zero_grad();
///     }
///
/// All ranks leave out the same steps and have the same scale. Made with a wrapper, they compare
/// one number in each `unscale_`. Made without, `GradScaler scaler({.init_scale = 1024});`, a rank
/// decides by its own gradients, which come to the same where all of them are averages of a
/// wrapper: one rank's infinity makes all ranks' averages infinite or NaN.
template <class Wrapper = detail::NoWrapper>
class GradScaler {
  static constexpr bool has_wrapper = !std::same_as<Wrapper, detail::NoWrapper>;
  static_assert(Wrapper::ignores_anomalies,
                "lockstep: a GradScaler looks for gradients that are not finite and leaves their "
                "steps out itself; add Anomaly<Ignore> to the wrapper");
  using Optimizer = ::torch::optim::Optimizer;

 public:
  explicit GradScaler(const GradScalerOptions& options = {})
    requires(std::same_as<Wrapper, detail::NoWrapper>)
      : GradScaler(nullptr, options) {}
  /// The wrapper must outlive the scaler. **Ranks** this one. **Host** does not block.
  explicit GradScaler(std::type_identity_t<Wrapper>& ddp, const GradScalerOptions& options = {})
    requires(!std::same_as<Wrapper, detail::NoWrapper>)
      : GradScaler(&ddp, options) {
    // A rank that never has a batch makes the updates of the others, without a loss to scale.
    if (Wrapper::may_join && options.enabled) begin(ddp.device());
  }
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// The loss, or other outputs, times the scale. **Host** does not block.
  at::Tensor scale(const at::Tensor& outputs) {
    if (!options_.enabled) return outputs;
    if (!scale_.defined()) begin(outputs.device());
    return outputs * scale_.to(outputs.device(), at::kFloat, /*non_blocking=*/true);
  }
  std::vector<at::Tensor> scale(std::vector<at::Tensor> outputs) {
    for (at::Tensor& each : outputs) each = scale(each);
    return outputs;
  }

  /// Divides the gradients of an optimizer by the scale, before a program clips or looks at them;
  /// once in an iteration. **Ranks** all, if made with a wrapper. **Host** does not block on GPUs.
  // NOLINTNEXTLINE(readability-identifier-naming): PyTorch's name
  void unscale_(Optimizer& optimizer) {
    if (!options_.enabled) return;
    OptimizerState& state = state_of(optimizer, "unscale_");
    if (state.stage == Stage::unscaled) {
      detail::fail(
          "unscale_",
          {"unscale_() has already been called on this optimizer since the last update()"},
          "call scaler.unscale_(optimizer) once, after the last backward pass of an iteration");
    }
    if (state.stage == Stage::stepped) {
      detail::fail("unscale_", {"unscale_() is being called after step()"},
                   "call scaler.unscale_(optimizer) before scaler.step(optimizer)");
    }
    unscale(state, optimizer);
  }

  /// `unscale_`, unless the program has called it, and the optimizer's step, unless a gradient was
  /// NaN or infinite. Returns whether the step was made, which a scheduler may want to know.
  /// **Ranks** as `unscale_`. **Host** blocks: the program must know.
  bool step(Optimizer& optimizer) {
    if (!options_.enabled) {
      optimizer.step();
      return true;
    }
    OptimizerState& state = state_of(optimizer, "step");
    if (state.stage == Stage::stepped) {
      detail::fail("step", {"step() has already been called since the last update()"},
                   "call scaler.update() once in every iteration, after scaler.step(optimizer)");
    }
    if (state.stage == Stage::ready) unscale(state, optimizer);
    if (state.found_infs.empty()) {
      detail::fail(
          "step", {"No inf checks were recorded for this optimizer"},
          "call backward before scaler.step(optimizer): none of its parameters has a gradient");
    }
    bool finite = true;
    for (const at::Tensor& flag : state.found_infs) finite &= flag.item<float>() == 0;
    if (finite) optimizer.step();
    state.stage = Stage::stepped;
    return finite;
  }

  /// Ends an iteration, after the steps of all optimizers: the scale falls if one was left out, and
  /// grows after `growth_interval` iterations without that. **Host** does not block.
  void update() {
    if (!options_.enabled) return;
    require_scale("update");
    at::Tensor found;
    for (const OptimizerState& each : optimizers_) {
      for (const at::Tensor& flag : each.found_infs) {
        const at::Tensor here = flag.to(scale_.device(), at::kFloat, /*non_blocking=*/true);
        found = found.defined() ? found + here : here;
      }
    }
    if (!found.defined()) {
      detail::fail("update", {"No inf checks were recorded prior to update"},
                   "call scaler.step(optimizer) before scaler.update(), after a backward pass");
    }
    at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
    optimizers_.clear();
  }
  /// The same with a scale that the program sets, which must be equal on all ranks.
  void update(double new_scale) {
    if (!options_.enabled) return;
    require_scale("update");
    scale_.fill_(new_scale);
    optimizers_.clear();
  }

  bool is_enabled() const { return options_.enabled; }
  /// **Host** on a GPU, blocks.
  double get_scale() const {
    if (!options_.enabled) return 1;
    return scale_.defined() ? scale_.item<double>() : options_.init_scale;
  }

  /// A dictionary with the names of Python's, for `torch::pickle_save`; empty if disabled. **Host**
  /// on a GPU, blocks.
  c10::IValue state_dict() const {
    detail::PythonDict state = detail::string_dict();
    if (options_.enabled) {
      state.insert("scale", get_scale());
      state.insert("growth_factor", options_.growth_factor);
      state.insert("backoff_factor", options_.backoff_factor);
      state.insert("growth_interval", options_.growth_interval);
      state.insert("_growth_tracker", growth_tracker_.defined()
                                          ? growth_tracker_.item<std::int64_t>()
                                          : init_growth_tracker_);
    }
    return state;
  }
  /// Takes such a dictionary, also one that Python has saved; nothing if disabled.
  void load_state_dict(const c10::IValue& from) {
    if (!options_.enabled) return;
    if (!from.isGenericDict() || from.toGenericDict().empty()) {
      detail::fail("load_state_dict",
                   {"The source state dict is empty, possibly because it was saved from a disabled "
                    "instance of GradScaler"},
                   "give it what state_dict() of an enabled GradScaler has returned");
    }
    const auto number = [&](const char* name) {
      const c10::IValue* const found = detail::find_entry(from.toGenericDict(), name);
      if (found == nullptr)
        detail::fail("load_state_dict", {"there is no \"", name, "\""},
                     "give it what state_dict() of an enabled GradScaler has returned");
      return found->toScalar();
    };
    GradScalerOptions loaded;
    loaded.init_scale = number("scale").toDouble();
    loaded.growth_factor = number("growth_factor").toDouble();
    loaded.backoff_factor = number("backoff_factor").toDouble();
    loaded.growth_interval = number("growth_interval").toLong();
    init_growth_tracker_ = number("_growth_tracker").toLong();
    options_ = loaded;
    if (!scale_.defined()) return;
    scale_.fill_(options_.init_scale);
    growth_tracker_.fill_(init_growth_tracker_);
  }

 private:
  enum class Stage : std::uint8_t { ready, unscaled, stepped };
  /// An optimizer in this iteration.
  struct OptimizerState {
    const Optimizer* optimizer;
    Stage stage = Stage::ready;
    std::vector<at::Tensor> found_infs;  // by device: 1 if a gradient was NaN or infinite, else 0
  };

  GradScaler(Wrapper* ddp, const GradScalerOptions& options) : ddp_(ddp), options_(options) {
    if (!options.enabled) return;
    if (!(options.growth_factor > 1))
      detail::fail("GradScaler", {"The growth factor must be > 1.0"}, "leave it out: it is 2 then");
    if (!(options.backoff_factor < 1))
      detail::fail("GradScaler", {"The backoff factor must be < 1.0"},
                   "leave it out: it is 0.5 then");
  }

  /// Makes the scale's tensors, on the device of the first outputs.
  void begin(at::Device device) {
    const auto on = at::TensorOptions().device(device);
    scale_ = at::full({}, options_.init_scale, on.dtype(at::kFloat));
    growth_tracker_ = at::full({}, init_growth_tracker_, on.dtype(at::kInt));
  }

  /// Divides gradients by the scale, and notes for each of their devices, or with a wrapper for all
  /// ranks, whether all are finite.
  void unscale(OptimizerState& state, Optimizer& optimizer) {
    struct Gradients {  // of one device and type
      at::Device device;
      at::ScalarType type;
      std::vector<at::Tensor> tensors;
    };
    const at::NoGradGuard quiet;
    std::vector<Gradients> sorted;
    for (auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        if (gradient.scalar_type() == at::kHalf) {
          detail::fail(
              "unscale_", {"Attempting to unscale FP16 gradients"},
              "keep parameters in float, and compute in half precision in an Autocast scope");
        }
        const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
        auto place = std::ranges::find_if(sorted, [&](const Gradients& each) {
          return each.device == values.device() && each.type == values.scalar_type();
        });
        if (place == sorted.end())
          place = sorted.insert(place, {values.device(), values.scalar_type(), {}});
        place->tensors.push_back(values);
      }
    }
    // A division of floats may be imprecise on a GPU, so the reciprocal is taken of a double.
    const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
    std::vector<at::Tensor>& found_infs = state.found_infs;
    found_infs.clear();
    for (const Gradients& each : sorted) {
      auto found = std::ranges::find(found_infs, each.device,
                                     [](const at::Tensor& flag) { return flag.device(); });
      if (found == found_infs.end())
        found = found_infs.insert(
            found, at::zeros({}, at::TensorOptions().device(each.device).dtype(at::kFloat)));
      at::_amp_foreach_non_finite_check_and_unscale_(
          each.tensors, *found, inverse.to(each.device, at::kFloat, /*non_blocking=*/true));
    }
    if constexpr (has_wrapper) {
      // A rank without gradients takes part too.
      at::Tensor own = at::zeros({}, at::TensorOptions().device(ddp_->device()).dtype(at::kFloat));
      for (const at::Tensor& flag : found_infs) own += flag.to(own.device());
      found_infs = {ddp_->largest_over_ranks(own)};
    }
    state.stage = Stage::unscaled;
  }

  void require_scale(std::string_view call) const {
    if (scale_.defined()) return;
    detail::fail(call, {"Attempted ", call, " but the scale is not known yet"},
                 "use scaler.scale(loss) earlier in the iteration");
  }

  OptimizerState& state_of(const Optimizer& optimizer, std::string_view call) {
    require_scale(call);
    const auto place = std::ranges::find(optimizers_, &optimizer, &OptimizerState::optimizer);
    if (place != optimizers_.end()) return *place;
    optimizers_.push_back({&optimizer, Stage::ready, {}});
    return optimizers_.back();
  }

  Wrapper* ddp_;
  GradScalerOptions options_;
  std::int64_t init_growth_tracker_ = 0;
  at::Tensor scale_, growth_tracker_;  // undefined until the first use
  std::vector<OptimizerState> optimizers_;
};

template <class Net, class... Policies>
GradScaler(torch_loops::DistributedDataParallel<Net, Policies...>&, const GradScalerOptions& = {})
    -> GradScaler<torch_loops::DistributedDataParallel<Net, Policies...>>;

}  // namespace torch_modules

}  // namespace lockstep
