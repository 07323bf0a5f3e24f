// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `TorchModel`: a LibTorch module as a model that lockstep trains.

#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/torch/step_tensors.hpp"
#include "lockstep/detail/torch/sync_batch_norm.hpp"

namespace lockstep {

namespace detail {
/// LibTorch's part of a step in a CUDA graph, in `torch.cuh`.
template <class Stream>
class TorchCapture;
}  // namespace detail

inline namespace torch_modules {

/// The base of a model whose parameters are a LibTorch module's and whose gradients autograd
/// computes. `Net` is a module or a holder; `Ts` are its parameter types. A model defines its loss:
///
///     struct Digits : TorchModel<Digits, Net> {
///       torch::Tensor loss(const TensorBatch& batch) {
///         return torch::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
///       }
///     };
///
/// and optionally `void score(const Batch&, auto& tally)`, in evaluation mode without gradients.
///
/// A module that the job makes, by default or by a function, draws its initial values from the
/// job's seed (`--seed`), as after `torch::manual_seed(seed)`. A model that draws from LibTorch's
/// generators, such as for dropout, says `static constexpr bool draws = true;`: its random numbers
/// then differ between ranks and steps, and continue after a restart.
///
/// Parameters and buffers live in lockstep's memory from the first step to the end of the job;
/// those that require no gradient are not trained. Copying a model deep-copies its module.
template <class Self, class Net, Element... Ts>
class TorchModel {
  using Source = detail::ModuleSource<Net>;

 public:
  /// Buffers may also hold integers or booleans, which are communicated as bytes.
  using Elements = detail::TorchElements<Ts...>;
  /// The module's tensors are the job's parameters, all of them at any time.
  static constexpr bool holds_all_parameters = true;

  TorchModel()
    requires std::default_initializable<typename Source::Contained>
      : module_(std::make_shared<typename Source::Contained>()) {}
  template <class First, class... Arguments>
    requires std::constructible_from<typename Source::Contained, First, Arguments...>
  explicit TorchModel(First&& first, Arguments&&... arguments)
      : module_(std::make_shared<typename Source::Contained>(
            std::forward<First>(first), std::forward<Arguments>(arguments)...)) {}
  /// A module that the program keeps, too: it owns its memory again after this model's end.
  explicit TorchModel(std::shared_ptr<typename Source::Contained> module)
      : module_(std::move(module)) {}

  TorchModel(const TorchModel& other)
      : module_(detail::clone_of<typename Source::Contained>(other.base())),
        ties_(detail::ties_of(other.base(), other.ties_)) {}
  TorchModel(TorchModel&&) noexcept = default;
  TorchModel& operator=(const TorchModel&) = delete;
  TorchModel& operator=(TorchModel&&) = delete;
  ~TorchModel() {
    // Not at class scope, where deduction of a wrapper's arguments checks it with other types.
    static_assert(detail::ModuleOrHolder<Net>,
                  "lockstep: TorchModel takes a torch::nn::Module or a holder of one: struct Model "
                  ": TorchModel<Model, Net>, where Net derives from torch::nn::Module");
  }

  auto& module() { return Source::get(module_); }
  const auto& module() const { return Source::get(module_); }

  // Called by lockstep.

  /// Makes a model whose module draws its initial values from the job's seed.
  static Self make_seeded(Seed seed, Rank rank, bool on_gpu, const auto& make) {
    return detail::make_seeded_module(seed, rank, on_gpu, make);
  }

  void tensors(TensorList& list) const {
    for (const detail::ModuleTensor& parameter : adopted().parameters()) {
      const auto extents = detail::shape_of(parameter.tensor);
      const ElementKind kind = kind_of(parameter);
      if (parameter.tensor.requires_grad()) {
        list.parameter(parameter.name, kind, extents);
      } else {
        list.frozen_parameter(parameter.name, kind, extents);
      }
      for (const std::string& name : parameter.other_names) list.alias(name, parameter.name);
    }
    for (const detail::ModuleTensor& buffer : adopted().buffers()) {
      list.buffer(buffer.name, kind_of(buffer), detail::shape_of(buffer.tensor));
      for (const std::string& name : buffer.other_names) list.alias(name, buffer.name);
    }
  }

  /// Copies the module's values when the job begins, on rank 0.
  void initialize(auto& initial) {
    const at::NoGradGuard quiet;
    const auto copy = [](const std::vector<detail::ModuleTensor>& tensors, const auto& find) {
      for (std::size_t i = 0; i != tensors.size(); ++i) {
        const at::Tensor& tensor = tensors[i].tensor;
        Elements::with(kind_of(tensors[i]), [&]<class T>(std::type_identity<T>) {
          detail::tensor_at(find(Listed<T>{i}).data_handle(), tensor.sizes(), tensor.scalar_type(),
                            at::kCPU)
              .copy_(tensor);
        });
      }
    };
    copy(adopted().parameters(), [&](auto key) { return initial.param(key); });
    copy(adopted().buffers(), [&](auto key) { return initial.buffer(key); });
  }

  template <class Step, class Batch>
  auto forward(Step& step, const Batch& batch) {
    using Device = detail::TorchDevice<Step>;
    const typename Device::Scope scope(step);
    prepare(step);
    if constexpr (Step::is_training()) {
      const auto norms = norms_.open<true>(base(), step.norm_ranks());
      loss_ = loss_of(batch);
      if (!loss_.requires_grad()) [[unlikely]]
        detail::fail("torch", {"the model's loss requires no gradient, so nothing can be trained"},
                     "compute it from the module's outputs, without detach(), item() or a "
                     "NoGradGuard");
      return Device::publish(step, loss_.detach());
    } else {
      const at::NoGradGuard quiet;
      const EvaluationMode evaluates(base());
      return Device::publish(step, loss_of(batch));
    }
  }

  template <class Step, class Batch>
  void backward(Step& step, const Batch&) {
    using Device = detail::TorchDevice<Step>;
    const typename Device::Scope scope(step);
    typename Device::Gradients gradients(step);
    const auto take = [&](std::size_t parameter, const at::Tensor& gradient) {
      write_gradient(step, gradients, parameter, gradient);
    };
    const detail::GradientReceiver::Take receive(take);
    const auto norms = norms_.open<true>(base(), step.norm_ranks());
    const detail::ValueWhile open(adopted().receiver().take, &receive);
    const at::Tensor loss = std::exchange(loss_, at::Tensor());
    if constexpr (requires { step.unused(std::size_t{}); }) {
      detail::for_each_unreached(loss, adopted().nodes(),
                                 [&](std::size_t parameter) { step.unused(parameter); });
    }
    loss.backward(Device::gradient(step, loss, one_));
    gradients.finish();
  }

  template <class Step, class Batch, class Tally>
    requires requires(Self& self, const Batch& batch, Tally& tally) { self.score(batch, tally); }
  void evaluate(Step& step, const Batch& batch, Tally& tally) {
    using Device = detail::TorchDevice<Step>;
    const typename Device::Scope scope(step);
    prepare(step);
    const at::NoGradGuard quiet;
    const EvaluationMode evaluates(base());
    self().score(batch, tally);
  }

  /// Before a step or its replay (`CapturedStep`): checks for replaced memory, seeds generators.
  template <class Step>
  void prepare_step(Step& step) {
    const typename detail::TorchDevice<Step>::Scope scope(step);
    prepare(step);
  }

  /// Around the capture of a step (`CapturedStep`).
  template <class Stream>
  detail::TorchCapture<Stream> guard_capture(Stream stream, bool jointly) {
    return detail::TorchCapture<Stream>(stream, jointly);
  }

  /// Tensors are looked up at first use: until then, the program may change the module.
  detail::AdoptedTensors& adopted() const {
    if (!tensors_) tensors_ = std::make_unique<detail::AdoptedTensors>(base(), ties_);
    return *tensors_;
  }

  /// Moves the module's tensors to the step's memory in the first step, then checks them.
  template <class Step>
  void keep_in(Step& step) {
    detail::AdoptedTensors& all = adopted();
    const auto parameter_at = [&](std::size_t i) {
      detail::AdoptedTensors::Target target{};
      Elements::with_parameter(all.parameters()[i].listed, [&]<class T>(std::type_identity<T>) {
        target = address_of(step.param(Listed<T>{i}));
      });
      return target;
    };
    const auto buffer_at = [&](std::size_t i) {
      detail::AdoptedTensors::Target target{};
      Elements::with(all.buffers()[i].listed, [&]<class T>(std::type_identity<T>) {
        target = address_of(step.buffer(Listed<T>{i}));
      });
      return target;
    };
    if (!all.are_adopted()) {
      all.adopt(
          parameter_at, buffer_at, [&](std::size_t i) { return step.trains(i); },
          detail::TorchDevice<Step>::device(step));
    } else {
      all.require_adopted(parameter_at, buffer_at);
      // Comparing names costs more than a small step: only steps 1, 2, 4, 8, ... do it.
      ++uses_;
      if ((uses_ & (uses_ - 1)) == 0) all.require_same(base());
    }
  }

  /// While the result lives, all batch norms of the module, or those that were converted, know the
  /// step's ranks.
  template <bool All>
  auto open_norms(const auto& ranks) {
    return norms_.open<All>(base(), ranks);
  }
  void require_shared_norms() const { norms_.require_shared(); }

 private:
  template <class View>
  static detail::AdoptedTensors::Target address_of(const View& view) {
    return {view.data_handle(), element_kind<typename View::value_type>()};
  }

  Self& self() { return static_cast<Self&>(*this); }
  ::torch::nn::Module& base() const { return *Source::pointer(module_); }

  static ElementKind kind_of(const detail::ModuleTensor& tensor) {
    const ElementKind kind = detail::kind_of(tensor.tensor.scalar_type());
    if (Elements::contains(kind)) [[likely]]
      return kind;
    detail::fail("torch",
                 {tensor.name, " has elements of ", c10::toString(tensor.tensor.scalar_type()),
                  ", which the model does not list"},
                 "name all types of parameters: TorchModel<Model, Net, float, double>, or with a "
                 "wrapper ParameterTypes<float, double>, or convert the tensor");
  }

  template <class Step>
  void prepare(Step& step) {
    keep_in(step);
    adopted().note_update();
    if constexpr (detail::Drawing<Self>) detail::TorchDevice<Step>::seed(step);
  }

  template <class Batch>
  at::Tensor loss_of(const Batch& batch) {
    constexpr bool has_loss = requires(Self& self) {
      { self.loss(batch) } -> std::convertible_to<at::Tensor>;
    };
    static_assert(has_loss,
                  "lockstep: the model has no loss(batch) for this batch that returns a tensor; "
                  "write torch::Tensor loss(const Batch& batch), a public member");
    at::Tensor loss;
    if constexpr (has_loss) loss = self().loss(batch);
    if (loss.numel() != 1) [[unlikely]]
      detail::fail("torch", {"the model's loss has ", loss.numel(), " elements"},
                   "return the mean over the batch, a tensor of one number");
    return loss;
  }

  /// Writes a complete gradient; an undefined one is zero.
  template <class Step, class Gradients>
  void write_gradient(Step& step, Gradients& gradients, std::size_t parameter,
                      const at::Tensor& gradient) {
    const ElementKind kind = adopted().parameters()[parameter].listed;
    Elements::with_parameter(kind, [&]<class T>(std::type_identity<T>) {
      const auto view = step.grad(Listed<T>{parameter});
      using Held = typename decltype(view)::value_type;
      if (!gradient.defined()) {
        detail::TorchDevice<Step>::zero(step, view.data_handle(), view.size() * sizeof(Held));
        step.ready(parameter);
      } else {
        gradients.write(parameter, view.data_handle(), detail::scalar_type<Held>,
                        gradient.is_sparse() ? gradient.to_dense() : gradient);
      }
    });
  }

  /// Destroyed last: only tensors that somebody else keeps then need memory of their own.
  mutable std::unique_ptr<detail::AdoptedTensors> tensors_;
  typename Source::Held module_;
  detail::TensorTies ties_;  // of a copied model, whose clone has untied tensors
  at::Tensor loss_;          // between forward and backward
  at::Tensor one_;           // the gradient of a loss
  detail::SyncedNorms norms_;
  std::uint64_t uses_ = 0;
};

}  // namespace torch_modules

}  // namespace lockstep
