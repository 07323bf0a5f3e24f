// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch norm over several ranks as a function of autograd.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "lockstep/core/error.hpp"
#include "lockstep/torch/device_norm_passes.hpp"
#include "lockstep/torch/host_norm_passes.hpp"
#include "lockstep/torch/norm_derivatives.hpp"
#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/norm_marks.hpp"
#include "lockstep/torch/norm_numbers.hpp"

namespace lockstep::detail {

/// What a norm's forward pass leaves for its backward pass, which may run on another thread.
struct NormPassing : ::torch::CustomClassHolder {
  NormPassing(std::shared_ptr<const NormExchange> ranks, std::shared_ptr<const NormMark> mark_of,
              const NormNumbers& of_norm)
      : exchange(std::move(ranks)), mark(std::move(mark_of)), numbers(of_norm) {}

  std::shared_ptr<const NormExchange> exchange;
  std::shared_ptr<const NormMark> mark;
  NormNumbers numbers;
  std::variant<HostNormPasses, DeviceNormPasses> passes;
};

/// Statistics are those of all ranks' samples: their means and squared deviations are merged by
/// their counts, of which some may be zero. The backward pass sums over ranks what a sample's
/// gradient takes from the others'. Running statistics move as for one batch of all samples.
class SyncedNorm : public ::torch::autograd::Function<SyncedNorm> {
 public:
  using Passing = c10::intrusive_ptr<NormPassing>;

  /// **Ranks** all of a step, in the order of their norms. **Host** blocks, or on a GPU enqueues.
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Passing& passing,
                            const NormTensors& norm) {
    context->save_for_backward({x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())});
    context->saved_data[name] = c10::IValue::make_capsule(passing);
    if (x.is_cpu())
      return passing->passes.emplace<HostNormPasses>().forward(
          norm, passing->numbers, *passing->exchange, passing->mark->name);
    return passing->passes.emplace<DeviceNormPasses>().forward(norm, passing->numbers,
                                                               *passing->exchange);
  }

  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* context,
      const ::torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto capsule = context->saved_data[name].toCapsule();
    auto& passing = static_cast<NormPassing&>(*capsule);
    const NormExchange& exchange = *passing.exchange;
    if (exchange.has_ended()) [[unlikely]]
      fail("backward",
           {"that of the synchronised batch norm \"", passing.mark->name,
            "\" runs after its job has ended"},
           "run backward while the job that ran forward is there");
    const NormTensors norm{saved[0], saved[1], saved[2], {}, {}};
    const NormNeeds needs = needed(*context, norm);
    NormGradients result;
    if (at::GradMode::is_enabled()) {
      result = norm_gradient_graph(norm, gradients[0], needs, passing.numbers.eps,
                                   count_of(passing), passing.exchange);
    } else if (auto* const host = std::get_if<HostNormPasses>(&passing.passes)) {
      result = host->backward(norm, gradients[0], needs, exchange);
    } else {
      result =
          std::get<DeviceNormPasses>(passing.passes).backward(norm, gradients[0], needs, exchange);
    }
    return {result.x, result.weight, result.bias, at::Tensor(), at::Tensor()};
  }

 private:
  static constexpr const char* name = "passing";

  /// Autograd numbers only the inputs that are defined.
  static NormNeeds needed(const ::torch::autograd::AutogradContext& context,
                          const NormTensors& norm) {
    NormNeeds needs;
    std::size_t input = 0;
    needs.x = context.needs_input_grad(input++);
    if (norm.weight.defined()) needs.weight = context.needs_input_grad(input++);
    if (norm.bias.defined()) needs.bias = context.needs_input_grad(input);
    return needs;
  }

  static at::Tensor count_of(const NormPassing& passing) {
    if (const auto* const host = std::get_if<HostNormPasses>(&passing.passes))
      return at::scalar_tensor(std::max(host->count(), 1.0), at::kDouble);
    return std::get<DeviceNormPasses>(passing.passes).count();
  }
};

}  // namespace lockstep::detail
