// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that is told which sub-graph its model uses.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/subgraphs.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica of `Traits`. In a job without sub-graphs there is nothing in it.
template <class Self, class Traits>
class ReplicaSubgraphs {
 public:
  /// The next micro-batch uses a sub-graph, by its number, or the whole model.
  void choose_subgraph([[maybe_unused]] std::size_t set) {
    if constexpr (Traits::has_subgraphs) self().gradients_.subgraphs().choose(set);
  }
  /// Evaluations and predictions use one from now on.
  void evaluate_subgraph([[maybe_unused]] std::size_t set) {
    if constexpr (Traits::has_subgraphs) evaluated_.number = set;
  }

  /// Where ranks compare sub-graphs: collectives of this thread are part of a step that uses those
  /// since the last update, while the result lives.
  auto in_step() const {
    if constexpr (Traits::compares_subgraphs) {
      return InJobCall(step_of_subgraphs(self().gradients_.subgraphs().chosen()));
    } else {
      return 0;
    }
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  struct Evaluated {
    std::size_t number = whole_model;
  };
  struct Whole {};

 protected:
  [[no_unique_address]] std::conditional_t<Traits::has_subgraphs, Evaluated, Whole> evaluated_;
};

}  // namespace lockstep::detail
