// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Norms<Synced>` for LibTorch modules: their batch norms take statistics over all ranks of
/// the job, as PyTorch's `SyncBatchNorm` does.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <cstring>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <unordered_map>
#include <variant>

#include "lockstep/core/error.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/torch/module.hpp"
#include "lockstep/torch/norm_passes.hpp"
#include "lockstep/torch/tensors.hpp"

namespace lockstep {

namespace detail {

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

  /// all = every rank's own, by rank: `count` doubles, or floats, of each. **Ranks** all of these,
  /// in the order of their norms. **Host** blocks, or on a GPU enqueues. **Stream** the step's.
  void all_gather(const void* own, void* all, std::size_t count, bool doubles) const {
    gather_(*this, own, all, count, doubles);
  }
  /// values = their sum over ranks. **Ranks**, **Host** and **Stream** as `all_gather`.
  void all_reduce(void* values, std::size_t count, bool doubles) const {
    reduce_(*this, values, count, doubles);
  }

 private:
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
  NormPassing(std::shared_ptr<const NormMark> mark_of, const BatchNormOptions& of_norm)
      : mark(std::move(mark_of)), options(of_norm) {}

  std::shared_ptr<const NormMark> mark;
  BatchNormOptions options;  // the momentum is this batch's share in the running statistics
  std::variant<HostTensorNorm, DeviceTensorNorm> work;
};

// What follows are templates, of which `Exchange` is `NormExchange`, so that LibTorch's machinery
// for functions of autograd is compiled in programs that synchronise norms, and in no others.

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
      work.measure(dense, passing->options.eps, exchange.world());
      work.gather(exchange);
      work.settle(norm, passing->options, passing->mark->name);
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
    if (at::GradMode::is_enabled()) [[unlikely]]
      fail("backward",
           {"a graph of gradients (create_graph) would go through the synchronised batch norm \"",
            passing.mark->name, "\", which has no second derivatives"},
           "use Norms<Local> for gradients of gradients, or keep this norm in evaluation");
    const NormTensors norm{saved[0], saved[1], saved[2], {}, {}};
    const NormNeeds needs = needed(*context, norm);
    const NormGradients result = std::visit(
        [&](auto& work) { return gradients_of(work, norm, gradients[0], needs, exchange); },
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
      work.sum(exchange);
      gradients.x = x.numel() == 0 ? at::empty_like(x) : work.input_gradient(norm, x, dy);
    }
    return gradients;
  }
};

/// The marks of all jobs of the process.
class NormMarks {
 public:
  static NormMarks& all() {
    static NormMarks marks;
    return marks;
  }

  /// Marks a norm of a job. It is found by its running mean, else by its weight; one that has
  /// neither is given a weight of ones, which is none of its parameters.
  template <class Norm>
  void add(Norm& norm, const std::string& name, const std::shared_ptr<NormExchange>& exchange) {
    const bool is_tag = !norm.running_mean.defined() && !norm.weight.defined();
    if (is_tag) norm.weight = at::ones({norm.options.num_features()});
    const at::Tensor& tensor = norm.running_mean.defined() ? norm.running_mean : norm.weight;
    const std::unique_lock lock(mutex_);
    marks_[tensor.unsafeGetTensorImpl()] = std::make_shared<const NormMark>(
        NormMark{name, exchange, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                 norm.weak_from_this(), is_tag});
  }

  /// The norms of a job that has ended are plain ones again.
  void remove(const NormExchange* exchange) {
    const std::unique_lock lock(mutex_);
    std::erase_if(marks_,
                  [&](const auto& item) { return item.second->exchange.get() == exchange; });
  }

  /// The mark of the norm that has these tensors, or null.
  std::shared_ptr<const NormMark> find(const at::Tensor& running_mean,
                                       const at::Tensor& weight) const {
    const at::Tensor& tensor = running_mean.defined() ? running_mean : weight;
    if (!tensor.defined()) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto found = marks_.find(tensor.unsafeGetTensorImpl());
    return found == marks_.end() ? nullptr : found->second;
  }

  std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return marks_.size();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, std::shared_ptr<const NormMark>> marks_;
};

/// Ranks that do not all run this norm would wait for each other.
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_outside(const NormMark& mark) {
  fail("Norms<Synced>",
       {"the synchronised batch norm \"", mark.name,
        "\" trains outside of a step of its job, which knows the ranks"},
       "run the module in the job's steps, or through DistributedDataParallel, or in evaluation: "
       "module->eval()");
}

/// `aten::batch_norm` for all tensors that autograd sees. A LibTorch module calls its norms' own
/// `forward`, so that they cannot be exchanged for others; what these call can.
template <class Exchange>
at::Tensor batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  std::optional<at::Tensor> scale = weight && weight->defined() ? weight : std::nullopt;
  if (training) {
    const at::Tensor mean = running_mean.value_or(at::Tensor());
    if (const auto mark = NormMarks::all().find(mean, scale.value_or(at::Tensor()))) {
      if (mark->is_tag) scale.reset();
      if (mark->trains()) {
        if (!mark->exchange->is_in_step()) [[unlikely]]
          refuse_outside(*mark);
        const std::optional<at::Tensor> shift = bias && bias->defined() ? bias : std::nullopt;
        return SyncedNorm<Exchange>::apply(
            x, scale, shift,
            c10::make_intrusive<NormPassing>(mark, BatchNormOptions{eps, momentum}),
            NormTensors{x, scale.value_or(at::Tensor()), shift.value_or(at::Tensor()), mean,
                        running_var.value_or(at::Tensor())});
      }
    }
  }
  return at::native::batch_norm(x, scale, bias, running_mean, running_var, training, momentum, eps,
                                cudnn_enabled);
}

/// From the first conversion on, LibTorch calls the function above.
template <class Exchange>
void override_batch_norm() {
  struct Override {
    explicit Override(c10::DispatchKey key)
        : library(::torch::Library::IMPL, "aten", key, __FILE__, __LINE__) {
      library.impl("batch_norm", TORCH_FN(batch_norm<Exchange>));
    }
    ::torch::Library library;
  };
  static const Override cpu(c10::DispatchKey::AutogradCPU);
  static const Override cuda(c10::DispatchKey::AutogradCUDA);
}

/// Marks all batch norms of a job's module, which may be one itself and need not be a shared
/// pointer's.
template <class Exchange = NormExchange>
void convert_norms(::torch::nn::Module& module, const std::shared_ptr<NormExchange>& exchange) {
  override_batch_norm<Exchange>();
  const auto visit = [&](::torch::nn::Module& inner, const std::string& name) {
    const auto mark = [&](auto* norm) {
      if (norm != nullptr) NormMarks::all().add(*norm, name, exchange);
    };
    mark(dynamic_cast<::torch::nn::BatchNorm1dImpl*>(&inner));
    mark(dynamic_cast<::torch::nn::BatchNorm2dImpl*>(&inner));
    mark(dynamic_cast<::torch::nn::BatchNorm3dImpl*>(&inner));
  };
  visit(module, module.name());
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(*item.value(), item.key());
}

/// A model's member. In every pass of a training step the model says
///
///     const auto norms = norms_.open(module, step.norm_ranks());
///
/// and the batch norms of the module share their statistics with the step's ranks, which may have
/// different numbers of samples, until the end of the scope, and in the backward pass of what ran.
/// In an evaluation, and with one rank, they are what they were; the module is the same one, with
/// the same tensors, and a `clone()` is a plain module.
///
/// As in PyTorch, all ranks run the same norms in the same order, and gradients of weight and bias
/// are those of a rank's own samples, which the job averages. LibTorch's norms refuse a rank that
/// has one value per channel; PyTorch's `SyncBatchNorm` takes it.
class SyncedNorms {
 public:
  SyncedNorms() = default;
  /// A copied model has another module and other ranks.
  SyncedNorms(const SyncedNorms&) {}
  SyncedNorms(SyncedNorms&&) noexcept = default;
  SyncedNorms& operator=(const SyncedNorms&) = delete;
  SyncedNorms& operator=(SyncedNorms&&) = delete;
  ~SyncedNorms() {
    if (!exchange_) return;
    exchange_->end();
    NormMarks::all().remove(exchange_.get());
  }

  template <class Ranks>
  ValueWhile<bool> open(::torch::nn::Module& module, const Ranks& ranks) {
    if constexpr (Ranks::communicates) {
      if (!exchange_ && ranks.world() != 1) {
        exchange_ = std::make_shared<NormExchange>(ranks);
        convert_norms(module, exchange_);
      }
    }
    return {exchange_ ? exchange_->is_in_step() : nothing_, true};
  }

 private:
  std::shared_ptr<NormExchange> exchange_;
  bool nothing_ = false;  // is set where norms share nothing
};

}  // namespace detail

inline namespace torch_modules {

/// Removed: what it says, a job's policy says.
template <class M>
void convert_sync_batchnorm(M&&) {
  static_assert(sizeof(M) == 0,
                "lockstep: give the job the policy Norms<Synced>, which synchronises all batch "
                "norms of its module; there is nothing to convert");
}

}  // namespace torch_modules

}  // namespace lockstep
