// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The steps through which a model reads its tensors and writes its gradients.

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/bucket/subgraphs.hpp"
#include "lockstep/detail/core/random_stream.hpp"

namespace lockstep::detail {

/// `char` is excluded: text is no range of numbers.
template <class V>
inline constexpr bool is_number =
    (std::is_arithmetic_v<V> || Element<V>) && !std::is_same_v<V, char>;

template <class V>
concept NumberRange = requires(const V& values) {
  std::begin(values) != std::end(values);
  requires is_number<std::remove_cvref_t<decltype(*std::begin(values))>>;
  std::size(values);
};

template <class V>
inline constexpr bool is_view = false;
template <class Memory, class T, std::size_t... E>
inline constexpr bool is_view<View<Memory, T, E...>> = true;

/// How many numbers a type holds, or `dynamic`.
template <class V>
inline constexpr std::size_t number_count = dynamic;
template <class Memory, class T, std::size_t... E>
inline constexpr std::size_t number_count<View<Memory, T, E...>> =
    ((E == dynamic) || ...) ? dynamic : (std::size_t{1} * ... * E);
template <class T, std::size_t N>
inline constexpr std::size_t number_count<T[N]> = N;
template <class T, std::size_t N>
inline constexpr std::size_t number_count<std::span<T, N>> = N;
template <template <class, std::size_t> class Array, class T, std::size_t N>
inline constexpr std::size_t number_count<Array<T, N>> = N;  // std::array, without its header

template <class T, class V>
constexpr T converted(const V& number) {
  if constexpr (FloatingElement<V>) {
    return static_cast<T>(static_cast<Accumulator<T>>(static_cast<Accumulator<V>>(number)));
  } else {
    return static_cast<T>(static_cast<Accumulator<T>>(number));
  }
}

template <class Key>
[[noreturn, gnu::cold, gnu::noinline]] void reject_gradient(Key key, std::size_t elements,
                                                            std::size_t given) {
  std::string name;
  if constexpr (requires { Key::name; }) {
    name = Key::name;
  } else if constexpr (requires { key.index; }) {
    name = text({"parameter ", key.index});
  } else {
    name = text({"parameter ", key});
  }
  fail("set_grad",
       {"the gradient of ", name, " has ", elements, " elements, and was given ", given},
       "give it a number for every element, in the order of rows");
}

/// Have two views the same extents? A view of rank 1 matches any view of its size.
template <class Gradient, class Values>
constexpr bool has_shape_of(const Gradient& gradient, const Values& values) {
  if constexpr (Values::rank() == 1 || Gradient::rank() == 1) {
    return values.size() == gradient.size();
  } else {
    static_assert(Values::rank() == Gradient::rank(),
                  "lockstep: set_grad was given a view of another rank than the parameter has");
    bool same = true;
    for (std::size_t axis = 0; axis != Gradient::rank(); ++axis)
      same = same && values.extent(axis) == gradient.extent(axis);
    return same;
  }
}

/// Reports at compile time why a host gradient cannot be written from `Value`.
template <class Gradient, class Value>
consteval bool require_gradient_value() {
  constexpr bool number = is_number<Value>;
  constexpr bool view = is_view<Value>;
  constexpr bool known = number || view || NumberRange<Value>;
  static_assert(known,
                "lockstep: set_grad takes a number for a scalar parameter, and a vector, span, "
                "array or view of numbers for a tensor");
  constexpr std::size_t wanted = number_count<Gradient>;
  constexpr std::size_t given = number ? 1 : number_count<Value>;
  constexpr bool fits = wanted == dynamic || given == dynamic || wanted == given;
  static_assert(!known || fits,
                "lockstep: set_grad was given another number of elements than the parameter has; "
                "give it one number for every element");
  return known && fits;
}

template <class Gradient, class Key, class Value>
constexpr void write_gradient(const Gradient& gradient, Key key, const Value& value) {
  using T = typename Gradient::value_type;
  if constexpr (require_gradient_value<Gradient, Value>()) {
    T* const to = gradient.data_handle();
    if constexpr (is_number<Value>) {
      if (gradient.size() != 1) reject_gradient(key, gradient.size(), 1);
      *to = converted<T>(value);
    } else if constexpr (is_view<Value>) {
      static_assert(std::is_same_v<typename Value::memory, HostMemory>,
                    "lockstep: set_grad of a CPU job was given a view of device memory; copy it to "
                    "the host first");
      if (!has_shape_of(gradient, value)) reject_gradient(key, gradient.size(), value.size());
      for (std::size_t i = 0; i != gradient.size(); ++i)
        to[i] = converted<T>(value.data_handle()[i]);
    } else {
      if (std::size(value) != gradient.size())
        reject_gradient(key, gradient.size(), std::size(value));
      std::size_t i = 0;
      for (const auto& number : value) to[i++] = converted<T>(number);
    }
  }
}

}  // namespace lockstep::detail

namespace lockstep {

/// Is a declared parameter trained in steps of this type, or frozen? A model for several jobs asks
/// before it writes a gradient: `if constexpr (trains<decltype(step)>("embed.weight"_p)) { ... }`.
template <class Step, class Key>
  requires requires(Key key) { std::remove_cvref_t<Step>::trains(key); }
constexpr bool trains(Key key) {
  return std::remove_cvref_t<Step>::trains(key);
}

/// Is a declared parameter part of the sub-graph of this step type? Used like `trains`.
template <class Step, class Key>
  requires requires(Key key) { std::remove_cvref_t<Step>::uses(key); }
constexpr bool uses(Key key) {
  return std::remove_cvref_t<Step>::uses(key);
}

}  // namespace lockstep

namespace lockstep::detail {

/// The start of a replica's arenas, aligned to `arena_alignment`.
struct Arenas {
  std::byte* parameters = nullptr;
  std::byte* gradients = nullptr;
  std::byte* buffers = nullptr;
};

/// The ranks of a step whose batch norms do not share statistics.
struct NoNormRanks {
  static constexpr bool communicates = false;
  std::size_t ranks = 1;

  constexpr std::size_t world() const { return ranks; }
};

/// The step of one rank: views into arenas, and a `ready` that the compiler removes.
template <class Model, class Limits = Buckets<>, class Memory = HostMemory,
          class ParameterTypes = DeclaredTypes, class BufferTypes = DeclaredTypes>
class BareStep {
  using LayoutOfParameters = Layout<Model, Limits, ParameterTypes>;
  using LayoutOfBuffers = BufferLayout<Model, BufferTypes>;

 public:
  constexpr BareStep(const Model& model, Arenas arenas)
      : BareStep(LayoutOfParameters(model), LayoutOfBuffers(model), arenas) {}
  constexpr BareStep(const LayoutOfParameters& parameters, const LayoutOfBuffers& buffers,
                     Arenas arenas)
      : parameters_(parameters), buffers_(buffers), arenas_(arenas) {}

  /// A parameter, read-only: only optimizers write parameters.
  constexpr auto param(auto key) const {
    return parameters_.template view<Memory, true>(arenas_.parameters, key);
  }

  constexpr auto grad(auto key) const {
    if constexpr (LayoutOfParameters::freezes) parameters_.require_trained(key);
    return parameters_.template view<Memory, false>(arenas_.gradients, key);
  }

  constexpr auto buffer(auto key) const {
    return buffers_.template view<Memory, false>(arenas_.buffers, key);
  }

  /// Calls `f(name, view)` for all tensors of a kind.
  constexpr void for_each_parameter(auto&& f) const {
    parameters_.template for_each<Memory, true>(arenas_.parameters, f);
  }
  constexpr void for_each_gradient(auto&& f) const {
    parameters_.template for_each<Memory, false, true>(arenas_.gradients, f);
  }
  constexpr void for_each_buffer(auto&& f) const {
    buffers_.template for_each<Memory, false>(arenas_.buffers, f);
  }

  constexpr void ready(auto key) const {
    static_cast<void>(tensor_index<Model, TensorRole::parameter>(key));  // rejects a misspelt name
    if constexpr (LayoutOfParameters::freezes) parameters_.require_trained(key);
  }

  /// Says that this pass needs no more parameters of a scope, such as `"blocks"_p / at<3>`, or of a
  /// listed parameter's unit: `Sharding<FullyShard>` frees their memory. Other jobs ignore it.
  constexpr void done(auto /*key*/) const {}

  static constexpr bool trains(auto key)
    requires(!TensorListing<Model>)
  {
    return LayoutOfParameters::trains(key);
  }
  bool trains(auto key) const
    requires TensorListing<Model>
  {
    return parameters_.trains(key);
  }

  /// Does this step use a parameter? The step of a sub-graph does not use all.
  static constexpr bool uses(auto key) {
    static_cast<void>(tensor_index<Model, TensorRole::parameter>(key));  // rejects a misspelt name
    return true;
  }
  static constexpr UsedSubgraph<NoSubgraphs, whole_model> subgraph() { return {}; }

  /// Writes a gradient and marks it as complete. `value` is a number for a scalar parameter; for a
  /// tensor a view, a range or a braced list with a number for every element.
  template <class Key, class Value = std::initializer_list<double>>
  constexpr void set_grad(Key key, const Value& value) const {
    write_view(grad(key), key, value);
    ready(key);
  }

  /// True in training, false in evaluations and predictions. A constant: `if` on it costs nothing.
  static constexpr bool is_training() { return true; }

  static constexpr bool draws = false;
  template <class Layer>
  constexpr LayerRandom random(const Layer&) const {
    static_assert(sizeof(Layer) == 0,
                  "lockstep: this model draws random numbers, and its steps have none; say so in "
                  "the model: static constexpr bool draws = true;");
    return {};
  }

  /// The ranks over which batch norms share statistics; `NormStep` replaces it for `Norms<Synced>`.
  static constexpr NoNormRanks norm_ranks() { return {}; }

 protected:
  /// The name is empty if no listed parameter has this number.
  constexpr std::string_view name_of(auto key) const {
    const std::size_t parameter = tensor_index<Model, TensorRole::parameter>(key);
    return parameter < parameters_.infos().size() ? parameters_.name(parameter) : "";
  }

  constexpr void write_view(const auto& gradient, auto key, const auto& value) const {
    static_assert(std::is_same_v<Memory, HostMemory>,
                  "lockstep: this step's gradients are in device memory, which host code cannot "
                  "write; write them in a kernel and call step.ready");
    if constexpr (std::is_same_v<Memory, HostMemory>) write_gradient(gradient, key, value);
  }

 private:
  [[no_unique_address]] LayoutOfParameters parameters_;
  [[no_unique_address]] LayoutOfBuffers buffers_;
  Arenas arenas_;
};

/// A bare step that forwards `ready` to the gradients. If other ranks' parameters are gathered
/// bucket by bucket (`Owned`), the first access to a bucket's parameter waits for it. With
/// `Gradients::gathers`, `Owned` alone has parameters.
template <class Model, class Bare, class Gradients, class Owned>
class TrackedStep : public Bare {
 public:
  TrackedStep(const Bare& bare, Gradients& gradients, Owned& owned)
      : Bare(bare), gradients_(&gradients), owned_(&owned) {}

  auto param(auto key) const {
    if constexpr (Gradients::gathers) {
      return owned_->parameter(key);
    } else {
      owned_->await_parameter(tensor_index<Model, TensorRole::parameter>(key));
      return Bare::param(key);
    }
  }
  void for_each_parameter(auto&& f) const {
    if constexpr (Gradients::gathers) {
      owned_->for_each_parameter(f);
    } else {
      owned_->await_parameters();
      Bare::for_each_parameter(f);
    }
  }
  void done(auto key) const {
    if constexpr (Gradients::gathers) owned_->done(key);
  }
  Owned& owned() const { return *owned_; }
  /// Waits for all parameters. Returns whether some were still pending.
  bool await_parameters() const { return owned_->await_parameters(); }

  /// With `Gradients::frees`, only a few buckets of gradients have memory at a time.
  auto grad(auto key) const {
    if constexpr (Gradients::frees) {
      return gradients_->freed_gradient(key);
    } else {
      return Bare::grad(key);
    }
  }
  void for_each_gradient(auto&& f) const {
    static_assert(!Gradients::frees,
                  "lockstep: with Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard> no "
                  "rank has all gradients; use ZeroRedundancy alone to look at them");
    if constexpr (!Gradients::frees) Bare::for_each_gradient(f);
  }

  /// Marks a gradient as complete. The last gradient of a bucket starts its reduction.
  void ready(auto key) const {
    Bare::ready(key);  // rejects a parameter without a gradient
    gradients_->ready(key);
  }

  /// Marks a parameter as unused in this pass (its gradient counts as zero), before backward ends.
  void unused(auto key) const
    requires(Gradients::skips_unused)
  {
    Bare::ready(key);
    gradients_->unused(tensor_index<Model, TensorRole::parameter>(key));
  }

  template <class Key, class Value = std::initializer_list<double>>
  void set_grad(Key key, const Value& value) const {
    this->write_view(grad(key), key, value);
    ready(key);
  }

 private:
  Gradients* gradients_;
  Owned* owned_;
};

template <class Step>
class EvaluationStep : public Step {
 public:
  explicit EvaluationStep(const Step& step) : Step(step) {}
  static constexpr bool is_training() { return false; }
  /// Every evaluation has the same random numbers, given by seed, rank and layer.
  constexpr auto random(const auto& layer) const {
    if constexpr (Step::draws) {
      return Step::random_in_evaluation(layer);
    } else {
      return Step::random(layer);  // reports the missing declaration
    }
  }
  static constexpr NoNormRanks norm_ranks() { return {}; }
};

}  // namespace lockstep::detail
