// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Norms<Synced>` for LibTorch modules: batch norms over all ranks, as `SyncBatchNorm`.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>
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
  bool has_ended_ = false;
};

/// A batch norm that shares its statistics. Modules call norms non-virtually, so a norm cannot be
/// replaced, but its member `running_mean` can. The mark is that tensor, with the same memory and
/// one more dispatch key, by which `aten::batch_norm` of this norm calls lockstep.
class NormMark : public c10::TensorImpl {
 public:
  /// LibTorch reserves this key for libraries outside of it; torchdistx, long ended, had it.
  static constexpr c10::DispatchKey key = c10::DispatchKey::DeferredInit;

  /// `memory` is the norm's running mean, or any tensor for a norm without running statistics.
  NormMark(const at::Tensor& memory, auto& norm, std::string name_of)
      : c10::TensorImpl(c10::Storage(memory.storage()), memory.key_set().add(key), memory.dtype()),
        name(std::move(name_of)),
        running_mean(norm.running_mean),
        member_(norm.running_mean),
        batches_(norm.num_batches_tracked),
        options_(norm.options),
        module_(norm) {
    follow();
  }

  /// The mark of a norm with this `running_mean`, or null.
  static NormMark* of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(key)) return nullptr;
    return dynamic_cast<NormMark*>(tensor.unsafeGetTensorImpl());
  }

  /// Begins a pass. LibTorch's norm rejects a rank with one value per channel, also if others have
  /// more, unless it evaluates: until `end_pass` it does, and the mark knows that it trains.
  void begin_pass(const std::shared_ptr<NormExchange>& job) {
    follow();
    exchange = job;
    has_trained_alone_ = false;
    trains = module_.is_training();
    if (!trains) return;
    tracks_ = std::exchange(options_.track_running_stats(), true);
    module_.train(false);
  }
  void end_pass() {
    if (!std::exchange(trains, false)) return;
    options_.track_running_stats(tracks_);
    module_.train(true);
  }

  /// The norm trains in no pass of a job. Where no job knows it yet, that may be right.
  void note_training_outside() {
    if (!is_in_training(module_)) return;
    if (exchange) reject_outside();
    has_trained_alone_ = true;
  }
  /// Rejects a norm that has trained on this rank's samples alone since it was converted.
  void require_shared() const {
    if (has_trained_alone_ && !exchange) reject_outside();
  }

  /// Counts a batch, as the norm does when it trains. The result is the batch's weight.
  double count_batch() const {
    if (tracks_ && batches_.defined()) batches_.add_(1);
    if (options_.momentum()) return *options_.momentum();
    return tracks_ ? 1 / batches_.item<double>() : 0.0;
  }

  /// The job has ended: the norm is a plain one, unless the program converted it.
  void end_job() {
    exchange.reset();
    follow();
    if (!is_converted) member_ = at::Tensor(running_mean);
  }

  std::string name;
  std::shared_ptr<NormExchange> exchange{};  // of the job whose module has the norm
  at::Tensor running_mean;                   // the norm's own, which may be undefined
  bool trains = false;                       // in the current pass
  bool is_converted = false;                 // by convert_sync_batchnorm

 private:
  /// The norm's own tensor may have moved, for example into the memory of a job.
  void follow() {
    if (!running_mean.defined()) return;
    key_set_ = running_mean.key_set().add(key);
    set_storage_and_dtype(running_mean.storage(), running_mean.dtype());
    set_sizes_and_strides(running_mean.sizes(), running_mean.strides(),
                          running_mean.storage_offset());
    set_version_counter(running_mean.unsafeGetTensorImpl()->version_counter());
  }

  [[noreturn, gnu::cold]] void reject_outside() const {  // ranks could deadlock
    fail("Norms<Synced>",
         {"the synchronised batch norm \"", name,
          "\" trains outside of a step of its job, which knows the ranks"},
         "run the module in the job's steps, or through DistributedDataParallel, or in "
         "evaluation: module->eval()");
  }

  at::Tensor& member_;
  at::Tensor& batches_;
  ::torch::nn::BatchNormOptions& options_;
  ::torch::nn::Module& module_;
  bool tracks_ = true;
  bool has_trained_alone_ = false;
};

/// What a forward pass leaves for its backward pass, which may run on another thread.
struct NormPassing : ::torch::CustomClassHolder {
  NormPassing(const NormMark& mark, const BatchNormOptions& of_norm)
      : name(mark.name), exchange(mark.exchange), options(of_norm) {}

  std::string name;
  std::shared_ptr<NormExchange> exchange;
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
      const NormExchange& exchange = *passing->exchange;
      work.measure(dense, passing->options.eps, exchange.world());
      work.gather(exchange);
      work.finalize(norm, passing->options, passing->name);
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
    const NormExchange& exchange = *passing.exchange;
    if (exchange.has_ended()) [[unlikely]]
      fail("backward",
           {"that of the synchronised batch norm \"", passing.name,
            "\" runs after its job has ended"},
           "run backward while the job that ran forward is there");
    if (at::GradMode::is_enabled()) [[unlikely]]
      fail("backward",
           {"a graph of gradients (create_graph) would go through the synchronised batch norm \"",
            passing.name, "\", which has no second derivatives"},
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

/// `aten::batch_norm` of marked norms.
template <class Exchange>
at::Tensor batch_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias,
                      const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum,
                      double eps, bool cudnn_enabled) {
  const auto given = [](const std::optional<at::Tensor>& tensor) {
    return tensor && tensor->defined() ? tensor : std::nullopt;
  };
  NormMark* const mark = running_mean ? NormMark::of(*running_mean) : nullptr;
  if (mark != nullptr && mark->trains) {
    const std::optional<at::Tensor> scale = given(weight);
    const std::optional<at::Tensor> shift = given(bias);
    return SyncedNorm<Exchange>::apply(
        x, scale, shift,
        c10::make_intrusive<NormPassing>(*mark, BatchNormOptions{eps, mark->count_batch()}),
        NormTensors{x, scale.value_or(at::Tensor()), shift.value_or(at::Tensor()),
                    mark->running_mean, running_var.value_or(at::Tensor())});
  }
  if (mark != nullptr && training) mark->note_training_outside();
  // A view of a mark is a tensor like any other.
  const c10::impl::ExcludeDispatchKeyGuard plain(NormMark::key);
  return at::native::batch_norm(x, given(weight), bias,
                                mark != nullptr ? given(mark->running_mean) : running_mean,
                                running_var, training, momentum, eps, cudnn_enabled);
}

/// Registers the operation of marked norms, once per process.
template <class Exchange>
void register_marked_norms() {
  static const auto registered = [] {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (dispatcher.hasBackendFallbackForDispatchKey(NormMark::key)) [[unlikely]]
      fail("Norms<Synced>",
           {"another library of this process has LibTorch's dispatch key ",
            c10::toString(NormMark::key), ", or it has lockstep, too"},
           "link one shared library with lockstep's modules into the process");
    std::array<::torch::Library, 2> libraries{
        ::torch::Library(::torch::Library::IMPL, "_", NormMark::key, __FILE__, __LINE__),
        ::torch::Library(::torch::Library::IMPL, "aten", NormMark::key, __FILE__, __LINE__)};
    libraries[0].fallback(::torch::CppFunction::makeFallthrough());
    libraries[1].impl("batch_norm", TORCH_FN(batch_norm<Exchange>));
    return libraries;
  }();
}

/// Calls `f(norm, name, owner)` for all batch norms of a module; the owner of itself is null.
inline void for_each_batch_norm(::torch::nn::Module& module, const auto& f) {
  const auto visit = [&](::torch::nn::Module& inner, const std::string& name,
                         const std::shared_ptr<::torch::nn::Module>& owner) {
    const auto call = [&](auto* norm) {
      if (norm != nullptr) f(*norm, name, owner);
    };
    call(dynamic_cast<::torch::nn::BatchNorm1dImpl*>(&inner));
    call(dynamic_cast<::torch::nn::BatchNorm2dImpl*>(&inner));
    call(dynamic_cast<::torch::nn::BatchNorm3dImpl*>(&inner));
  };
  visit(module, module.name(), nullptr);
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    visit(*item.value(), item.key(), item.value());
}

/// Marks a norm that is not marked yet.
template <class Exchange = NormExchange>
NormMark& mark_norm(auto& norm, const std::string& name) {
  register_marked_norms<Exchange>();
  if (NormMark::of(norm.running_mean) == nullptr) {
    const at::Tensor memory = norm.running_mean.defined() ? norm.running_mean : at::empty({0});
    norm.running_mean = at::Tensor(c10::make_intrusive<NormMark>(memory, norm, name));
  }
  return *NormMark::of(norm.running_mean);
}

/// A model's member, opened in every pass of a training step:
///
///     const auto norms = norms_.open<All>(module, step.norm_ranks());
///
/// Until the end of the scope, and in the backward pass of what ran in it, the module's batch norms
/// share their statistics with the step's ranks, which may have different numbers of samples: with
/// `All` every norm, else those that `convert_sync_batchnorm` has met, without which the program
/// does not compile their passes. In an evaluation, with one rank, and in a `clone()` of the
/// module, norms are plain. A norm that trains when the pass begins trains in it.
///
/// As in PyTorch, all ranks run the same norms in the same order, and the job averages weight and
/// bias gradients.
class SyncedNorms {
 public:
  struct EndPass {
    void operator()(SyncedNorms* norms) const {
      if (--norms->passes_ == 0) norms->for_each_mark([](NormMark& mark) { mark.end_pass(); });
    }
  };
  /// Of a pass; null where norms are plain.
  using Scope = std::unique_ptr<SyncedNorms, EndPass>;

  SyncedNorms() = default;
  /// A copied model has its own module and ranks.
  SyncedNorms(const SyncedNorms&) {}
  SyncedNorms(SyncedNorms&&) noexcept = default;
  SyncedNorms& operator=(const SyncedNorms&) = delete;
  SyncedNorms& operator=(SyncedNorms&&) = delete;
  ~SyncedNorms() {
    if (!exchange_) return;
    exchange_->end();
    for_each_mark([](NormMark& mark) { mark.end_job(); });
  }

  template <bool All, class Ranks>
  [[nodiscard]] Scope open(::torch::nn::Module& module, const Ranks& ranks) {
    if (ranks.world() == 1) return nullptr;
    if (!has_looked_) look<All && Ranks::communicates>(module);
    if constexpr (Ranks::communicates) {
      if (!exchange_) exchange_ = std::make_shared<NormExchange>(ranks);
      if (passes_++ == 0) for_each_mark([&](NormMark& mark) { mark.begin_pass(exchange_); });
      return Scope(this);
    } else {
      for_each_mark([](const NormMark& mark) {
        fail("Norms<Local>",
             {"convert_sync_batchnorm has met the batch norm \"", mark.name,
              "\", and the norms of this job do not share their statistics"},
             "add Norms<Synced> to the policies, in place of UnevenInputs<Join> if that is there");
      });
      return nullptr;
    }
  }

  /// Before gradients of a program's own loop are averaged: throws if a pass beside the job ran
  /// norms that `convert_sync_batchnorm` has met since the last pass of the job.
  void require_shared() const {
    if (exchange_) for_each_mark([](const NormMark& mark) { mark.require_shared(); });
  }

 private:
  template <bool Mark>
  void look(::torch::nn::Module& module) {
    for_each_batch_norm(module, [&](auto& norm, const std::string& name, const auto& owner) {
      if constexpr (Mark) mark_norm(norm, name);
      members_.emplace_back(owner, &norm.running_mean);
    });
    has_looked_ = true;
  }
  void for_each_mark(const auto& f) const {
    for (const auto& [owner, member] : members_)
      if (NormMark* const mark = NormMark::of(*member)) f(*mark);
  }

  std::shared_ptr<NormExchange> exchange_;
  std::vector<std::pair<std::shared_ptr<::torch::nn::Module>, at::Tensor*>> members_;
  bool has_looked_ = false;
  std::size_t passes_ = 0;  // open ones: a backward pass may run a module's forward pass
};

}  // namespace detail

inline namespace torch_modules {

/// PyTorch's function: lets the batch norms of a module, or of a part of it, take their statistics
/// over all ranks of a `lockstep::torch::DistributedDataParallel` around the module, before or
/// after wrapping. The module stays the same; the result is its argument, a shared pointer or a
/// holder. A `Trainer` has `Norms<Synced>`. **Ranks** all, with the same norms. **Host** does not
/// block.
template <class M>
auto convert_sync_batchnorm(M module) {
  constexpr bool points = requires { static_cast<::torch::nn::Module&>(*module); };
  static_assert(points,
                "lockstep: convert_sync_batchnorm takes a shared pointer to a module, or a holder "
                "of one: convert_sync_batchnorm(net)");
  if constexpr (points) {
    detail::for_each_batch_norm(*module, [](auto& norm, const std::string& name, const auto&) {
      detail::mark_norm(norm, name).is_converted = true;
    });
    return module;
  }
}

}  // namespace torch_modules

}  // namespace lockstep
