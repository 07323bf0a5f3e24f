// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step that a model sees in a world of one.

#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/element_types.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/bucket/write_gradient.hpp"
#include "lockstep/core/random_stream.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/model/lookup.hpp"

namespace lockstep {

/// Is a declared parameter trained in steps of this type, or is it frozen? A model that is trained
/// with different policies asks before it writes a gradient:
///
///     if constexpr (trains<decltype(step)>("embed.weight"_p)) { ... }
template <class Step, class Key>
  requires requires(Key key) { std::remove_cvref_t<Step>::trains(key); }
constexpr bool trains(Key key) {
  return std::remove_cvref_t<Step>::trains(key);
}

/// Does a step of this type use a declared parameter, or is it none of the step's sub-graph?
///
///     if constexpr (uses<decltype(step)>("adapter.weight"_p)) { ... }
template <class Step, class Key>
  requires requires(Key key) { std::remove_cvref_t<Step>::uses(key); }
constexpr bool uses(Key key) {
  return std::remove_cvref_t<Step>::uses(key);
}

}  // namespace lockstep

namespace lockstep::detail {

/// Where a replica's tensors start. Each arena is as long as its layout's plan says and aligned to
/// `arena_alignment`.
struct Arenas {
  std::byte* parameters = nullptr;
  std::byte* gradients = nullptr;
  std::byte* buffers = nullptr;
};

/// The ranks that a step's batch norms share statistics with, where there are none.
struct NoNormRanks {
  static constexpr bool communicates = false;
  static constexpr std::size_t world() { return 1; }
};

/// Hands a model its tensors as views into arenas. `ready` does nothing with one rank, and the
/// compiler removes the call. Steps for more ranks have the same members.
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

  /// A parameter, to read. Only optimizers write parameters.
  template <class Key>
  constexpr auto param(Key key) const {
    return parameters_.template view<Memory, true>(arenas_.parameters, key);
  }

  /// A parameter's gradient, to write.
  template <class Key>
  constexpr auto grad(Key key) const {
    if constexpr (LayoutOfParameters::freezes) parameters_.require_trained(key);
    return parameters_.template view<Memory, false>(arenas_.gradients, key);
  }

  /// A buffer, to read and write.
  template <class Key>
  constexpr auto buffer(Key key) const {
    return buffers_.template view<Memory, false>(arenas_.buffers, key);
  }

  /// Calls `f(name, view)` for all tensors of a kind, with the views of the members above.
  template <class F>
  constexpr void for_each_parameter(F&& f) const {
    parameters_.template for_each<Memory, true>(arenas_.parameters, f);
  }
  template <class F>
  constexpr void for_each_gradient(F&& f) const {
    parameters_.template for_each<Memory, false, true>(arenas_.gradients, f);
  }
  template <class F>
  constexpr void for_each_buffer(F&& f) const {
    buffers_.template for_each<Memory, false>(arenas_.buffers, f);
  }

  /// Says that a gradient is complete.
  template <class Key>
  constexpr void ready(Key key) const {
    // A misspelt name is an error here too.
    if constexpr (TensorListing<Model>) {
      static_cast<void>(find_tensor<Model, TensorRole::parameter>(key));
    } else {
      static_cast<void>(NamedTensor<Model, TensorRole::parameter, Key>::index);
    }
    if constexpr (LayoutOfParameters::freezes) parameters_.require_trained(key);
  }

  /// Is a parameter trained, or frozen?
  template <class Key>
  static constexpr bool trains(Key key)
    requires(!TensorListing<Model>)
  {
    return LayoutOfParameters::trains(key);
  }
  template <class Key>
  bool trains(Key key) const
    requires TensorListing<Model>
  {
    return parameters_.trains(key);
  }

  /// Does this step use a parameter? Steps of sub-graphs do not use all.
  template <class Key>
  static constexpr bool uses(Key)
    requires(!TensorListing<Model>)
  {
    static_cast<void>(NamedTensor<Model, TensorRole::parameter, Key>::index);
    return true;
  }
  template <class Key>
  bool uses(Key) const
    requires TensorListing<Model>
  {
    return true;
  }
  /// The sub-graph that this step uses: here the whole model.
  static constexpr UsedSubgraph<NoSubgraphs, whole_model> subgraph() { return {}; }

  /// Writes a gradient and says that it is complete. `value` is a number for a scalar parameter; a
  /// view, a range or a list in braces, with a number for every element, for a tensor.
  template <class Key, class Value = std::initializer_list<double>>
  constexpr void set_grad(Key key, const Value& value) const {
    write_grad(key, value);
    ready(key);
  }

  /// True in forward and backward of a training step, false in an evaluation or a prediction. A
  /// constant: `if (step.is_training())` costs nothing.
  static constexpr bool is_training() { return true; }

  /// Has this step random numbers? Those of models that say so have, see `RandomStep`.
  static constexpr bool draws = false;
  template <class Layer>
  constexpr LayerRandom random(const Layer&) const {
    static_assert(sizeof(Layer) == 0,
                  "lockstep: this model draws random numbers, and its steps have none; say so in "
                  "the model: static constexpr bool draws = true;");
    return {};
  }

  /// The ranks over which batch norms take their statistics: with `Norms<Synced>` another type, see
  /// `NormStep`.
  static constexpr NoNormRanks norm_ranks() { return {}; }

 protected:
  /// Empty for a number that no listed parameter has.
  template <class Key>
  constexpr std::string_view name_of(Key key) const {
    const std::size_t parameter = find_tensor<Model, TensorRole::parameter>(key).index;
    return parameter < parameters_.infos().size() ? parameters_.name(parameter) : "";
  }

  template <class Key, class Value>
  constexpr void write_grad(Key key, const Value& value) const {
    static_assert(std::is_same_v<Memory, HostMemory>,
                  "lockstep: this step's gradients are in device memory, which host code cannot "
                  "write; write them in a kernel and call step.ready");
    if constexpr (std::is_same_v<Memory, HostMemory>) write_gradient(grad(key), key, value);
  }

 private:
  [[no_unique_address]] LayoutOfParameters parameters_;
  [[no_unique_address]] LayoutOfBuffers buffers_;
  Arenas arenas_;
};

/// The step of evaluations and predictions: the same tensors, and `is_training()` is false.
template <class Step>
class EvaluationStep : public Step {
 public:
  explicit EvaluationStep(const Step& step) : Step(step) {}
  static constexpr bool is_training() { return false; }
  /// The numbers of every evaluation are the same: they depend on the seed, the rank and the layer.
  template <class Layer>
  constexpr auto random(const Layer& layer) const {
    if constexpr (Step::draws) {
      return Step::random_in_evaluation(layer);
    } else {
      return Step::random(layer);  // which says what is missing
    }
  }
  static constexpr NoNormRanks norm_ranks() { return {}; }
};

}  // namespace lockstep::detail
