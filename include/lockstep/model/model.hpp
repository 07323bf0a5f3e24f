// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The model concept, clause by clause, and the sentences for clauses that are missing.

#include <concepts>
#include <type_traits>

#include "lockstep/model/declaration.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep {

/// A model that declares its parameters: `using Parameters = ParameterList<...>;` with at least
/// one.
template <class M>
concept ParameterDeclaring =
    requires { typename M::Parameters; } &&
    detail::DeclarationListOf<typename M::Parameters, detail::TensorRole::parameter> &&
    M::Parameters::tensors != 0;

/// A model with `forward(step, batch)`, which reads `step.param("name"_p)`.
template <class M, class Step, class Batch>
concept ForwardRunning =
    requires(M& model, Step& step, const Batch& batch) { model.forward(step, batch); };

/// A model whose forward returns the loss of the batch. On a GPU it writes it to `step.loss()`
/// instead, so that the host need not wait for it.
template <class M, class Step, class Batch>
concept LossGiving =
    requires(Step& step) { *step.loss(); } || requires(M& model, Step& step, const Batch& batch) {
      { model.forward(step, batch) } -> std::convertible_to<double>;
    };

/// A model with `backward(step, batch)`, which writes `step.grad("name"_p)` and calls
/// `step.ready("name"_p)`, last layer first.
template <class M, class Step, class Batch, class... OutputGradients>
concept BackwardRunning =
    requires(M& model, Step& step, const Batch& batch, const OutputGradients&... gradients) {
      model.backward(step, batch, gradients...);
    };

/// A model with `evaluate(step, batch, tally)`, which adds figures of a batch to the tally.
template <class M, class Step, class Batch, class Tally>
concept EvaluationRunning = requires(M& model, Step& step, const Batch& batch, Tally& tally) {
  model.evaluate(step, batch, tally);
};

/// A model that a strategy can train on batches of this type.
template <class M, class Step, class Batch>
concept Trainable =
    ParameterDeclaring<M> && LossGiving<M, Step, Batch> && BackwardRunning<M, Step, Batch>;

namespace detail {

/// A model whose layers draw random numbers: `static constexpr bool draws = true;`.
template <class M>
concept Drawing = requires { typename std::bool_constant<M::draws>; } && bool{M::draws};

/// The sentence about forward. A model trains and evaluates with steps of two types, and misses it
/// for both: what depends on neither is said once.
template <class M, class Batch, bool HasForward>
consteval bool require_forward() {
  static_assert(HasForward,
                "lockstep: the model has no forward(step, batch) for this batch; write "
                "float forward(auto& step, const Batch& batch)");
  return HasForward;
}
template <class M, class Step, class Batch>
consteval bool require_forward() {
  return require_forward<M, Batch, ForwardRunning<M, Step, Batch>>();
}

/// Reports the first clause that M misses, as a sentence. Called where a batch's type is first
/// known.
template <class M, class Step, class Batch>
consteval bool require_model() {
  constexpr bool forward = require_forward<M, Step, Batch>();
  constexpr bool loss = LossGiving<M, Step, Batch>;
  constexpr bool backward = BackwardRunning<M, Step, Batch>;
  static_assert(
      !forward || loss,
      "lockstep: the model's forward(step, batch) does not return the loss; return a number");
  static_assert(!loss || backward,
                "lockstep: the model has no backward(step, batch) for this batch; write "
                "void backward(auto& step, const Batch& batch)");
  return forward && loss && backward;
}

}  // namespace detail

}  // namespace lockstep
