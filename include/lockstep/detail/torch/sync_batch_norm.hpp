// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Norms<Synced>` for LibTorch modules: batch norms over all ranks, as `SyncBatchNorm`.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/ones.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>
#include <mutex>
#include <shared_mutex>
#include <variant>

#include "lockstep/detail/torch/module.hpp"
#include "lockstep/detail/torch/norm_passes.hpp"

namespace lockstep {

namespace detail {

/// The collectives of a job's norms: `step.norm_ranks()` behind function pointers.
class NormExchange {
 public:
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
  /// Is a step of the job running?
  bool& is_in_step() { return is_in_step_; }
  /// Marks the job and its communicator as gone.
  void end() { has_ended_ = true; }
  bool has_ended() const { return has_ended_; }

  /// All-gathers `count` doubles or floats per rank. **Ranks** all of these, in the order of their
  /// norms. **Host** blocks, or on a GPU enqueues. **Stream** the step's.
  void all_gather(const void* own, void* all, std::size_t count, bool doubles) const {
    gather_(*this, own, all, count, doubles);
  }
  /// Sums over ranks in place. **Ranks**, **Host** and **Stream** as `all_gather`.
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

/// A norm that shares its statistics.
struct NormMark {
  std::string name;
  std::shared_ptr<NormExchange> exchange;
  /// The tensor that identifies the norm. The weak pointer keeps its address from being reused.
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  std::weak_ptr<const ::torch::nn::Module> module;
  /// Is the tensor a weight of ones that only identifies the norm?
  bool is_tag = false;

  /// A norm without running statistics uses batch statistics in evaluation too, then only its own
  /// rank's. A module outside of a shared pointer counts as training.
  bool trains() const {
    const auto norm = module.lock();
    return norm == nullptr || is_in_training(*norm);
  }
};

/// What a forward pass leaves for its backward pass, which may run on another thread.
struct NormPassing : ::torch::CustomClassHolder {
  NormPassing(std::shared_ptr<const NormMark> mark_of, const BatchNormOptions& of_norm)
      : mark(std::move(mark_of)), options(of_norm) {}

  std::shared_ptr<const NormMark> mark;
  BatchNormOptions options;  // momentum: the weight of this batch in the running statistics
  std::variant<HostTensorNorm, DeviceTensorNorm> work;
};

// Templates over `NormExchange`, so that only programs with synchronised norms compile them.

/// Statistics over all ranks' samples, merged by counts, which may be zero. The backward pass sums
/// over ranks what each input gradient takes from the other samples.
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
      work.finalize(norm, passing->options, passing->mark->name);
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
    // Autograd indexes only defined inputs.
    std::size_t input = 0;
    NormMask needs{};
    for (std::size_t i = 0; i != needs.size(); ++i)
      needs[i] = saved[i].defined() && context->needs_input_grad(input++);
    const at::Tensor x = dense_tensor(norm.x);
    const at::Tensor dy = gradients[0].contiguous(format_of(x));
    return std::visit(
        [&](auto& work) -> ::torch::autograd::variable_list {
          // Sums over this rank's samples, which the job averages.
          const auto [weight, bias] = work.reduce_backward(norm, x, dy, needs);
          at::Tensor dx;
          if (needs[0]) {
            work.sum(exchange);
            dx = x.numel() == 0 ? at::empty_like(x) : work.input_gradient(norm, x, dy);
          }
          return {dx, weight, bias, at::Tensor(), at::Tensor()};
        },
        passing.work);
  }

 private:
  static constexpr const char* name = "passing";
};

class NormMarks {
 public:
  static NormMarks& all() {
    static NormMarks marks;
    return marks;
  }

  /// Marks a norm, identified by its running mean or else its weight; a norm with neither gets a
  /// weight of ones, which is not registered as a parameter.
  void add(auto& norm, const std::string& name, const std::shared_ptr<NormExchange>& exchange) {
    const bool is_tag = !norm.running_mean.defined() && !norm.weight.defined();
    if (is_tag) norm.weight = at::ones({norm.options.num_features()});
    const at::Tensor& tensor = norm.running_mean.defined() ? norm.running_mean : norm.weight;
    const std::unique_lock lock(mutex_);
    marks_[tensor.unsafeGetTensorImpl()] = std::make_shared<const NormMark>(
        NormMark{name, exchange, c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                 norm.weak_from_this(), is_tag});
  }

  /// Turns the norms of a job that has ended into plain ones.
  void remove(const NormExchange* exchange) {
    const std::unique_lock lock(mutex_);
    std::erase_if(marks_,
                  [&](const auto& item) { return item.second->exchange.get() == exchange; });
  }

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

/// Overrides `aten::batch_norm` under autograd: norms cannot be replaced, but what they call can.
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
        if (!mark->exchange->is_in_step()) [[unlikely]]  // ranks could deadlock
          fail("Norms<Synced>",
               {"the synchronised batch norm \"", mark->name,
                "\" trains outside of a step of its job, which knows the ranks"},
               "run the module in the job's steps, or through DistributedDataParallel, or in "
               "evaluation: module->eval()");
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

/// Installs the override, once per process.
template <class Exchange>
void override_batch_norm() {
  const auto install = [](c10::DispatchKey key) {
    ::torch::Library library(::torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library.impl("batch_norm", TORCH_FN(batch_norm<Exchange>));
    return library;
  };
  static const ::torch::Library cpu = install(c10::DispatchKey::AutogradCPU);
  static const ::torch::Library cuda = install(c10::DispatchKey::AutogradCUDA);
}

/// Marks all batch norms of a job's module, which may be one itself and need no shared pointer.
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

/// A model's member, opened in every pass of a training step:
///
///     const auto norms = norms_.open(module, step.norm_ranks());
///
/// Until the end of the scope, and in the backward pass of what ran in it, the module's batch norms
/// share their statistics with the step's ranks, which may have different numbers of samples. In an
/// evaluation, with one rank, and in a `clone()` of the module, the norms are plain.
///
/// As in PyTorch, all ranks run the same norms in the same order, and the job averages weight and
/// bias gradients. Unlike PyTorch's, LibTorch's norms reject a rank with one value per channel.
class SyncedNorms {
 public:
  SyncedNorms() = default;
  /// A copied model has its own module and ranks.
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
  bool nothing_ = false;  // the flag of norms that share nothing
};

}  // namespace detail

inline namespace torch_modules {

/// A compile error that names the policy.
template <class M>
void convert_sync_batchnorm(M&&) {
  static_assert(sizeof(M) == 0,
                "lockstep: give the job the policy Norms<Synced>, which synchronises all batch "
                "norms of its module; there is nothing to convert");
}

}  // namespace torch_modules

}  // namespace lockstep
