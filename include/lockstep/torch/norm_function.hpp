// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch norm over several ranks as a function of autograd, which may be differentiated
/// twice; and the ranks of a step as a LibTorch operator sees them.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/rsqrt.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/torch/module.hpp"
#include "lockstep/torch/norm_passes.hpp"

namespace lockstep::detail {

/// The ranks with which the norms of a job share their statistics: what `step.norm_ranks()`
/// returns, behind pointers to functions.
class NormExchange {
 public:
  /// The ranks are the same throughout a job.
  template <class Ranks>
  explicit NormExchange(const Ranks& ranks)
      : world_(ranks.world()), gather_(gather<Ranks>), reduce_(reduce<Ranks>) {
    static_assert(std::is_trivially_copyable_v<Ranks> && sizeof(Ranks) <= sizeof(ranks_),
                  "lockstep: the ranks of norms are a few pointers");
    std::memcpy(ranks_, &ranks, sizeof(Ranks));
  }
  NormExchange(const NormExchange&) = delete;
  NormExchange& operator=(const NormExchange&) = delete;

  std::size_t world() const { return world_; }
  /// Do the norms run in a step of the job?
  bool& is_in_step() { return is_in_step_; }
  /// The job has ended, and its communicator with it.
  void end() { has_ended_ = true; }
  bool has_ended() const { return has_ended_; }

  /// all = every rank's own, by rank. **Ranks** all of these, in the order of their norms. **Host**
  /// blocks, or on a GPU enqueues. **Stream** the step's.
  void all_gather(std::span<const double> own, std::span<double> all) const {
    gather_(*this, own.data(), all.data(), own.size(), true);
  }
  /// values = their sum over ranks. **Ranks**, **Host** and **Stream** as `all_gather`.
  void all_reduce(std::span<double> values) const {
    reduce_(*this, values.data(), values.size(), true);
  }
  /// The same of tensors, of doubles or floats without gaps.
  void all_gather(const at::Tensor& own, const at::Tensor& all) const {
    gather_(*this, own.const_data_ptr(), all.mutable_data_ptr(), count_of(own), is_double(own));
  }
  void all_reduce(const at::Tensor& values) const {
    reduce_(*this, values.mutable_data_ptr(), count_of(values), is_double(values));
  }

 private:
  static std::size_t count_of(const at::Tensor& tensor) {
    return static_cast<std::size_t>(tensor.numel());
  }
  static bool is_double(const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; }
  template <class Ranks>
  const Ranks& ranks_as() const {
    return *std::launder(reinterpret_cast<const Ranks*>(ranks_));
  }
  template <class Ranks>
  static void gather(const NormExchange& self, const void* own, void* all, std::size_t count,
                     bool doubles) {
    const auto run = [&]<class T>(T) {
      self.ranks_as<Ranks>().all_gather(std::span(static_cast<const T*>(own), count),
                                        std::span(static_cast<T*>(all), count * self.world_));
    };
    doubles ? run(double{}) : run(float{});
  }
  template <class Ranks>
  static void reduce(const NormExchange& self, void* values, std::size_t count, bool doubles) {
    const auto run = [&]<class T>(T) {
      self.ranks_as<Ranks>().all_reduce(std::span(static_cast<T*>(values), count));
    };
    doubles ? run(double{}) : run(float{});
  }

  alignas(std::max_align_t) std::byte ranks_[32] = {};
  std::size_t world_;
  void (*gather_)(const NormExchange&, const void*, void*, std::size_t, bool);
  void (*reduce_)(const NormExchange&, void*, std::size_t, bool);
  bool is_in_step_ = false;
  bool has_ended_ = false;
};

/// The ranks of a graph that may be differentiated.
struct KeptExchange : ::torch::CustomClassHolder {
  explicit KeptExchange(std::shared_ptr<const NormExchange> ranks) : exchange(std::move(ranks)) {}
  std::shared_ptr<const NormExchange> exchange;
};

// What follows are templates, of which `Exchange` is `NormExchange`, so that LibTorch's machinery
// for functions of autograd is compiled in programs that synchronise norms, and in no others.

/// The sum of a tensor over ranks. A rank's value is part of every rank's sum, so that its gradient
/// is the sum of all ranks' gradients: the same function.
template <class Exchange>
class SumOverRanks : public ::torch::autograd::Function<SumOverRanks<Exchange>> {
 public:
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& own,
                            const std::shared_ptr<const Exchange>& exchange) {
    context->saved_data[name] =
        c10::IValue::make_capsule(c10::make_intrusive<KeptExchange>(exchange));
    at::Tensor sum = own.clone(at::MemoryFormat::Contiguous);
    exchange->all_reduce(sum);
    return sum;
  }
  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* context,
      const ::torch::autograd::variable_list& gradients) {
    const auto kept = context->saved_data[name].toCapsule();
    return {SumOverRanks::apply(gradients[0], static_cast<const KeptExchange&>(*kept).exchange),
            at::Tensor()};
  }

 private:
  static constexpr const char* name = "ranks";
};

/// The gradients of a norm as a graph over x, weight and the gradient of y. Statistics are computed
/// once more, from x. **Ranks** all, here and in the backward pass of the result. **Host** blocks,
/// or on a GPU enqueues.
template <class Exchange>
NormGradients norm_gradient_graph(const NormTensors& norm, const at::Tensor& gradient,
                                  const NormNeeds& needs, double eps, const at::Tensor& all_count,
                                  const std::shared_ptr<const Exchange>& exchange) {
  const at::ScalarType type =
      norm.x.is_cpu() || norm.x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<std::int64_t> over;
  std::vector<std::int64_t> channels(static_cast<std::size_t>(norm.x.dim()), 1);
  channels[1] = norm.x.size(1);
  for (std::int64_t axis = 0; axis != norm.x.dim(); ++axis) {
    if (axis != 1) over.push_back(axis);
  }
  const auto sum = [&](const at::Tensor& values) { return values.sum(over); };
  const auto mean_over_ranks = [&](const at::Tensor& own) {
    return (SumOverRanks<Exchange>::apply(own, exchange) / all_count).view(channels);
  };
  const at::Tensor x = norm.x.to(type);
  const at::Tensor dy = gradient.to(type);
  const at::Tensor deviation = x - mean_over_ranks(sum(x));
  const at::Tensor inverse = at::rsqrt(mean_over_ranks(sum(deviation * deviation)) + eps);
  const at::Tensor sum_dy = sum(dy);
  const at::Tensor sum_product = sum(dy * deviation);
  NormGradients gradients;
  if (needs.x) {
    const at::Tensor slope = mean_over_ranks(sum_product) * inverse * inverse;
    at::Tensor dx = (dy - mean_over_ranks(sum_dy) - deviation * slope) * inverse;
    if (norm.weight.defined()) dx = dx * norm.weight.to(type).view(channels);
    gradients.x = dx.to(norm.x.scalar_type());
  }
  if (needs.weight)
    gradients.weight = (sum_product * inverse.view(-1)).to(norm.weight.scalar_type());
  if (needs.bias) gradients.bias = sum_dy.to(norm.bias.scalar_type());
  return gradients;
}

/// One norm that shares its statistics.
struct NormMark {
  /// The name in its module.
  std::string name;
  std::shared_ptr<NormExchange> exchange;
  /// The tensor by which the norm is found. While the mark stands, its address is no other's.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  std::weak_ptr<const ::torch::nn::Module> module;
  /// Is the tensor a weight of ones that only serves to find the norm?
  bool is_tag = false;

  /// A norm without running statistics normalises with the batch's in an evaluation too, and then
  /// with its own rank's. A module that is no shared pointer's cannot be asked.
  bool trains() const {
    const auto norm = module.lock();
    return norm == nullptr || is_in_training(*norm);
  }
};

/// What a norm's forward pass leaves for its backward pass, which may run on another thread.
struct NormPassing : ::torch::CustomClassHolder {
  NormPassing(std::shared_ptr<const NormMark> mark_of, const NormNumbers& of_norm)
      : mark(std::move(mark_of)), numbers(of_norm) {}

  std::shared_ptr<const NormMark> mark;
  NormNumbers numbers;
  std::variant<HostTensorNorm, DeviceTensorNorm> work;
};

/// Statistics are those of all ranks' samples: their means and squared deviations are merged by
/// their counts, of which some may be zero. The backward pass sums over ranks what a sample's
/// gradient takes from the others'. Running statistics move as for one batch of all samples.
template <class Exchange>
class SyncedNorm : public ::torch::autograd::Function<SyncedNorm<Exchange>> {
 public:
  using Passing = c10::intrusive_ptr<NormPassing>;

  /// **Ranks** all of a step, in the order of their norms. **Host** blocks, or on a GPU enqueues.
  static at::Tensor forward(::torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const Passing& passing,
                            const NormTensors& norm) {
    context->save_for_backward({x, weight.value_or(at::Tensor()), bias.value_or(at::Tensor())});
    context->saved_data[name] = c10::IValue::make_capsule(passing);
    const auto run = [&](auto& work) {
      const at::Tensor dense = dense_tensor(x);
      const NormExchange& exchange = *passing->mark->exchange;
      work.measure(dense, passing->numbers.eps, exchange.world());
      exchange.all_gather(work.own(), work.all());
      work.settle(norm, passing->numbers, passing->mark->name);
      return x.numel() == 0 ? at::empty_like(dense) : work.normalise(norm, dense);
    };
    return x.is_cpu() ? run(passing->work.emplace<HostTensorNorm>())
                      : run(passing->work.emplace<DeviceTensorNorm>());
  }

  static ::torch::autograd::variable_list backward(
      ::torch::autograd::AutogradContext* context,
      const ::torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto capsule = context->saved_data[name].toCapsule();
    auto& passing = static_cast<NormPassing&>(*capsule);
    const NormExchange& exchange = *passing.mark->exchange;
    if (exchange.has_ended()) [[unlikely]]
      fail("backward",
           {"that of the synchronised batch norm \"", passing.mark->name,
            "\" runs after its job has ended"},
           "run backward while the job that ran forward is there");
    const NormTensors norm{saved[0], saved[1], saved[2], {}, {}};
    const NormNeeds needs = needed(*context, norm);
    const NormGradients result = std::visit(
        [&](auto& work) {
          return at::GradMode::is_enabled()
                     ? norm_gradient_graph<Exchange>(norm, gradients[0], needs, passing.numbers.eps,
                                                     work.count(), passing.mark->exchange)
                     : gradients_of(work, norm, gradients[0], needs, exchange);
        },
        passing.work);
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

  /// Those of weight and bias are sums over this rank's samples alone, which the job averages.
  template <class Work>
  static NormGradients gradients_of(Work& work, const NormTensors& norm, const at::Tensor& gradient,
                                    const NormNeeds& needs, const NormExchange& exchange) {
    const at::Tensor x = dense_tensor(norm.x);
    const at::Tensor dy = gradient.contiguous(format_of(x));
    NormGradients gradients = work.reduce_backward(norm, x, dy, needs);
    if (needs.x) {
      exchange.all_reduce(work.sums());
      gradients.x = x.numel() == 0 ? at::empty_like(x) : work.input_gradient(norm, x, dy);
    }
    return gradients;
  }
};

}  // namespace lockstep::detail
