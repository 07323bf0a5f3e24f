// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that evaluates: losses and outputs of batches that are not trained
/// on, and the outputs of those that are.

#include <cstddef>
#include <exception>
#include <type_traits>

#include "lockstep/model/model.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/strategy/gathered_outputs.hpp"
#include "lockstep/strategy/gradient_buckets.hpp"
#include "lockstep/strategy/subgraph_step.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica.
template <class Self>
class ReplicaEvaluation {
 public:
  // With nothing kept for backward and no communication.

  template <class Batch, class S = Self>
  typename S::Loss evaluate(const Batch& placed) {
    using Model = typename S::model_type;
    if constexpr (require_forward<Model, typename S::evaluation_step, Batch>()) {
      return with_evaluation_step(
          [&](auto& step) { return self().execution_.forward(self().model_, step, placed); });
    } else {
      std::terminate();  // never reached: the missing forward has been reported
    }
  }
  /// The model's own evaluation, or its mean loss over `samples()`.
  template <class Batch, class Tally, class Samples, class S = Self>
  void evaluate(const Batch& placed, Tally& tally, const Samples& samples) {
    using Model = typename S::model_type;
    if constexpr (EvaluationRunning<Model, typename S::evaluation_step, Batch, Tally>) {
      with_evaluation_step([&](auto& step) { self().model_.evaluate(step, placed, tally); });
    } else {
      const auto count = static_cast<double>(samples());
      tally.add("loss", evaluate(placed) * count, count);
    }
  }

  /// Calls `f(step)` with the step of an evaluation.
  template <class F>
  auto with_evaluation_step(const F& f) {
    self().await_parameters();
    if constexpr (Self::traits::has_subgraphs) {
      using sets = typename Self::subgraphs;
      return with_subgraph<sets::count>(self().evaluated_.number, [&](auto set) {
        EvaluationStep<SubgraphStep<typename Self::bare_step, sets, set>> step(
            SubgraphStep<typename Self::bare_step, sets, set>(self().step_));
        return f(step);
      });
    } else {
      typename Self::evaluation_step step(self().step_);
      return f(step);
    }
  }

  // Outputs of models that declare them.

  /// Does the hand-written `forward` keep the outputs of such a batch?
  template <class Batch>
  static constexpr bool keeps_outputs() {
    using traits = typename Self::traits;
    using Model = typename Self::model_type;
    if constexpr (OutputDeclaring<Model> && !traits::scatters && traits::takes_loss_of_outputs) {
      using Memory = typename traits::memory;
      return PartsRunning<Model, typename Self::step_type, Batch, OutputRows<Model, Memory, false>,
                          OutputRows<Model, Memory, true>>;
    } else {
      return false;
    }
  }

  /// The model's outputs of a batch of `rows` samples, in evaluation. They are valid until the next
  /// call. **Host** on a GPU, blocks until they are there.
  template <class Batch>
  auto predict(const Batch& placed, std::size_t rows) {
    using Model = typename Self::model_type;
    static_assert(require_prediction<Model, typename Self::evaluation_step, Batch,
                                     OutputRows<Model, typename Self::traits::memory, false>>());
    make_room(rows);
    with_evaluation_step([&](auto& step) { self().model_.predict(step, placed, rows_of(rows)); });
    self().await_device();
    return self().outputs_.all_outputs(rows);
  }

  /// `forward` in two parts: outputs, which are kept, and the loss that is taken of them.
  template <class Batch>
  auto forward_with_outputs(const Batch& placed, std::size_t rows, Sync sync) {
    [[maybe_unused]] const auto in = self().in_step();
    if constexpr (Self::traits::broadcasts_buffers) {
      if (sync == Sync::yes) self().synchronize_buffers();
    }
    make_room(rows);
    const auto loss = self().with_step([&](auto& step) {
      self().model_.predict(step, placed, rows_of(rows));
      return self().execution_.loss(self().model_, step, placed, self().outputs_.all_outputs(rows),
                                    self().outputs_.all_gradients(rows));
    });
    self().require_finite_loss(loss);
    return loss;
  }
  auto outputs(std::size_t rows) const {
    [[maybe_unused]] const auto on = self().on_device();
    self().await_device();
    return self().outputs_.all_outputs(rows);
  }
  auto output_gradients(std::size_t rows) const { return self().outputs_.gradients({0, rows}); }

  /// Copies rows of outputs into the host's memory. **Host** blocks.
  template <class Rows>
  void copy_outputs(const Rows& rows, void* to) {
    [[maybe_unused]] const auto on = self().on_device();
    self().execution_.copy(static_cast<std::byte*>(to),
                           reinterpret_cast<const std::byte*>(rows.data_handle()),
                           rows.size() * sizeof(typename Rows::value_type));
    self().await_device();
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  auto rows_of(std::size_t rows) { return self().outputs_.outputs({0, rows}); }

  void make_room(std::size_t rows) {
    if (rows <= self().outputs_.capacity()) return;
    self().await_device();  // the memory may be in use
    self().outputs_.reserve(self().model_, rows);
  }
};

}  // namespace lockstep::detail
