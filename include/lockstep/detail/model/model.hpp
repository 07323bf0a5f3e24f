// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The model concepts, and the messages for missing members.

#include "lockstep/detail/model/declaration.hpp"

namespace lockstep {

/// A model that declares at least one parameter: `using Parameters = ParameterList<...>;`.
template <class M>
concept ParameterDeclaring =
    requires { typename M::Parameters; } &&
    detail::DeclarationListOf<typename M::Parameters, detail::TensorRole::parameter> &&
    M::Parameters::tensors != 0;

/// A model with `forward(step, batch)`, which reads `step.param("name"_p)`.
template <class M, class Step, class Batch>
concept ForwardRunning =
    requires(M& model, Step& step, const Batch& batch) { model.forward(step, batch); };

/// A model whose forward returns the loss of the batch. On a GPU, forward writes the loss to
/// `step.loss()` instead, so that the host need not wait.
template <class M, class Step, class Batch>
concept LossGiving =
    requires(Step& step) { *step.loss(); } || requires(M& model, Step& step, const Batch& batch) {
      { model.forward(step, batch) } -> std::convertible_to<double>;
    };

/// A model whose `backward` writes `step.grad("name"_p)` and calls `step.ready`, last layer first.
template <class M, class Step, class Batch, class... OutputGradients>
concept BackwardRunning =
    requires(M& model, Step& step, const Batch& batch, const OutputGradients&... gradients) {
      model.backward(step, batch, gradients...);
    };

/// A model with `evaluate(step, batch, tally)`, which adds a batch's metrics to the tally.
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

/// Independent of the step's type, so that training and evaluation report a missing forward once.
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

/// Reports the first missing member of M. Called where the type of the batch is first known.
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

/// A model's output for one sample, from which the loss is computed: `using Output =
/// OutputOf<float, 10>;`. A model with outputs has, beside forward and backward,
///
///     void predict(auto& step, const Batch& batch, auto outputs);
///     float loss(auto& step, const Batch& batch, auto outputs, auto gradients);
///     void backward(auto& step, const Batch& batch, auto gradients);
///
/// `predict` writes a row of outputs for each sample; `loss` returns the mean over a batch (on a
/// GPU it writes the mean to `step.loss()`) and writes the gradient of every output; `backward`
/// continues from there. Rows are views whose first extent is the number of samples. Under
/// `ParallelStrategy<DP>` with `LossOnOutput`, replicas run `predict` and `backward` on their
/// shares, and `loss` is called once, with the whole batch. If an extent is `dynamic`, the model
/// has `output_extents() const`, which returns all extents as an array.
template <FloatingElement T, std::size_t... E>
struct OutputOf {
  using element = T;
  using Sizes = std::array<std::size_t, sizeof...(E)>;

  static Sizes sizes(const auto& model) {
    if constexpr (((E == dynamic) || ...)) return model.output_extents();
    return Sizes{E...};
  }
};

namespace detail {
template <class T>
inline constexpr bool is_output = false;
template <class T, std::size_t... E>
inline constexpr bool is_output<OutputOf<T, E...>> = true;
}  // namespace detail

/// A model with a type of outputs: `using Output = ...;`.
template <class M>
concept OutputNaming = requires { typename M::Output; };

/// A model whose outputs and loss are separate functions.
template <class M>
concept OutputDeclaring = OutputNaming<M> && detail::is_output<typename M::Output>;

namespace detail {

template <class M, class Step, class Batch, class Rows>
concept Predicting = requires(M& model, Step& step, const Batch& batch, Rows rows) {
  model.predict(step, batch, rows);
};

/// Reports a missing `predict`. `Rows` are writable rows of outputs.
template <class M, class Step, class Batch, class Rows>
consteval bool require_prediction() {
  static_assert(Predicting<M, Step, Batch, Rows>,
                "lockstep: the model declares an Output and has no predict for this batch; give it "
                "void predict(auto& step, const Batch& batch, auto outputs)");
  return Predicting<M, Step, Batch, Rows>;
}

/// A model with all members that `OutputOf` names, for batches of this type.
template <class M, class Step, class Batch, class Written, class Read>
concept PartsRunning =
    Predicting<M, Step, Batch, Written> && BackwardRunning<M, Step, Batch, Read> &&
    requires(M& model, Step& step, const Batch& batch, Written rows, Read outputs) {
      model.loss(step, batch, outputs, rows);
    };

template <class M>
consteval bool require_output() {
  static_assert(OutputDeclaring<M>,
                "lockstep: the model declares no outputs to predict; give it using Output = "
                "OutputOf<float, 10>; and void predict(auto& step, const Batch& batch, auto "
                "outputs)");
  return OutputDeclaring<M>;
}

/// Reports the first missing member of a model with outputs. Called where the type of the batch is
/// first known; `Written` and `Read` are rows of outputs.
template <class M, class Step, class Batch, class Whole, class Written, class Read>
consteval bool require_parts() {
  constexpr bool predict = Predicting<M, Step, Batch, Written>;
  constexpr bool loss =
      requires(M& model, Step& step, const Whole& batch, Read outputs, Written gradients) {
        model.loss(step, batch, outputs, gradients);
      };
  constexpr bool number = requires(Step& step) {
    *step.loss();
  } || requires(M& model, Step& step, const Whole& batch, Read outputs, Written gradients) {
    { model.loss(step, batch, outputs, gradients) } -> std::convertible_to<double>;
  };
  constexpr bool backward = BackwardRunning<M, Step, Batch, Read>;
  static_assert(predict,
                "lockstep: the model declares an Output and does not write it; give it void "
                "predict(auto& step, const Batch& batch, auto outputs), or use LossOnReplica");
  static_assert(!predict || loss,
                "lockstep: the model declares an Output and takes no loss of it; give it float "
                "loss(auto& step, const Batch& batch, auto outputs, auto gradients)");
  static_assert(!loss || number, "lockstep: the model's loss(...) does not return a number");
  static_assert(!number || backward,
                "lockstep: the model declares an Output and does not go on from its gradient; give "
                "it void backward(auto& step, const Batch& batch, auto gradients)");
  return predict && loss && number && backward;
}

}  // namespace detail

}  // namespace lockstep
