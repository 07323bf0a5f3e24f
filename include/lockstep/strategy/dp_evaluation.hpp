// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of `DP` that evaluates: losses and outputs of batches that are not trained on.

#include <cstddef>
#include <utility>
#include <vector>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/model/output.hpp"
#include "lockstep/strategy/scatter.hpp"
#include "lockstep/strategy/feature/subgraphs.hpp"

namespace lockstep::detail {

/// A base of `Self`, replicas of a model.
template <class Self>
class DpEvaluation {
 public:
  /// The loss of a batch, with nothing kept for backward. **Host** blocks.
  template <class Batch, class S = Self>
  typename S::Loss evaluate(const Batch& batch) {
    if constexpr (S::traits::alone) {
      [[maybe_unused]] const auto on = self().on_device();
      return self().first().evaluate(self().first().place(batch));
    } else {
      self().template run_to_loss<false>(
          batch, self().scatter(batch),
          [&](std::size_t i) { self().replicas_[i]->template evaluate<Batch>(); },
          [&](std::size_t i) { self().replicas_[i]->end_evaluation(); });
      return self().whole_loss();
    }
  }
  /// The model's own evaluation: `model.evaluate(step, batch, tally)`, or its mean loss. Every
  /// replica has a tally of its own; they are added up. **Host** blocks.
  template <class Batch, class Tally>
  void evaluate(const Batch& batch, Tally& tally) {
    using traits = typename Self::traits;
    if constexpr (traits::alone) {
      [[maybe_unused]] const auto on = self().on_device();
      self().first().evaluate(self().first().place(batch), tally, [&] { return row_count(batch); });
    } else if constexpr (traits::gathers_outputs &&
                         !Self::LedReplica::template has_evaluation<Batch, Tally>) {
      const double loss = evaluate(batch);
      const auto samples = static_cast<double>(self().shares_.samples());
      tally.add("loss", loss * samples, samples);
    } else {
      const BatchCut cut = self().scatter(batch);
      std::vector<Tally> tallies(self().replicas());
      self().run([&](std::size_t i) { self().take(i, batch, cut); },
                 [&](std::size_t i) { self().replicas_[i]->template evaluate<Batch>(tallies[i]); });
      for (const Tally& part : tallies)
        for (const auto& entry : part) tally.add(entry.name, entry.sum, entry.count);
    }
  }

  /// The same with one of `Subgraphs`: `dp.evaluate<"with_adapter"_s>(batch)`.
  template <auto Set, class... Arguments>
  auto evaluate(Arguments&&... arguments) {
    const EvaluatedSubgraph<Self> in(self(), Set);
    return evaluate(std::forward<Arguments>(arguments)...);
  }
  /// Evaluations and predictions use a sub-graph, by its number, from now on.
  void evaluate_subgraph(std::size_t set) {
    for (const auto& replica : self().replicas_) replica->replica().evaluate_subgraph(set);
  }

  /// The model's outputs of a whole batch in evaluation, a row for each sample, in order. They are
  /// valid until the next prediction, step or evaluation. **Host** blocks until they are there; on
  /// GPUs they are in the memory of the output device.
  template <class Batch>
  auto predict(const Batch& batch) {
    using traits = typename Self::traits;
    if constexpr (!require_output<typename Self::model_type>()) {
      return;
    } else if constexpr (traits::alone) {
      [[maybe_unused]] const auto on = self().on_device();
      return self().first().predict(self().first().place(batch), row_count(batch));
    } else {
      const BatchCut cut = self().scatter(batch);
      if constexpr (!traits::gathers_outputs) self().make_room(batch, self().shares_.samples());
      self().run([&](std::size_t i) { self().take(i, batch, cut); },
                 [&](std::size_t i) { self().replicas_[i]->template predict_only<Batch>(); });
      return std::as_const(*self().replicas_[self().root_]).all_outputs();
    }
  }
  template <auto Set, class Batch>
  auto predict(const Batch& batch) {
    const EvaluatedSubgraph<Self> in(self(), Set);
    return predict(batch);
  }
  /// Copies such outputs into the host's memory. **Host** blocks.
  template <class Rows>
  void copy_outputs(const Rows& rows, void* to) {
    self().first().copy_outputs(rows, to);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
};

}  // namespace lockstep::detail
