// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that makes the steps which its model sees.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/bare_step.hpp"
#include "lockstep/strategy/norm_step.hpp"
#include "lockstep/strategy/subgraph_step.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica of `Traits`.
template <class Self, class Traits>
class ReplicaSteps {
 public:
  /// Calls `f(step)` with the step whose gradients the model writes next.
  template <class F>
  auto with_step(const F& f) {
    if constexpr (Traits::has_subgraphs) {
      using subgraphs = typename Traits::subgraphs;
      const bool adds = !Traits::frees_gradients && self().micro_batches_ != 0;
      const auto& step = adds ? adding_step() : self().step_;
      return with_subgraph<subgraphs::count>(self().gradients_.subgraphs().set(), [&](auto set) {
        SubgraphStep<typename Self::step_type, subgraphs, set> used(step);
        return f(used);
      });
    } else if constexpr (Traits::tracks && !Traits::frees_gradients) {
      return f(self().micro_batches_ == 0 ? self().step_ : adding_step());
    } else {
      return f(self().step_);
    }
  }

 protected:
  /// The step whose gradients lie in that arena.
  auto make_step(std::byte* gradients) {
    using Step = typename Self::step_type;
    const auto bare = make_bare_step({self().parameters_, gradients, self().buffers_});
    if constexpr (Traits::shards) {
      return Step(bare, self().gradients_, self().updater_.gathers());
    } else if constexpr (Traits::tracks) {
      return Step(bare, self().gradients_);
    } else {
      return bare;
    }
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }

  /// The step of micro-batches after the first.
  auto& adding_step() {
    auto& step = self().adding_step_;
    if (!step) step.emplace(make_step(self().gradients_.second_arena()));
    return *step;
  }

  auto make_bare_step(const Arenas& arenas) {
    using Bare = typename Self::bare_step;
    using Drawing = typename Self::drawing_step;
    const Drawing step = make_drawing_step(arenas);
    if constexpr (Traits::syncs_norms) {
      return Bare{
          step, NormRanks<Traits, typename Self::communicator_type>(self().comm_, self().groups_)};
    } else if constexpr (!std::is_same_v<Bare, Drawing>) {
      return Bare{step, UnsyncedNormRanks{self().comm_.world_size().value()}};
    } else {
      return step;
    }
  }

  auto make_drawing_step(const Arenas& arenas) {
    using Drawing = typename Self::drawing_step;
    if constexpr (Traits::draws) {
      return Drawing{self().execution_.step(self().layouts_, arenas), self().random_.keys(),
                     self().random_.host_keys()};
    } else {
      return Drawing(self().execution_.step(self().layouts_, arenas));
    }
  }
};

}  // namespace lockstep::detail
