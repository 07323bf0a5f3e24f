// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that ends a loop over data: the last micro-batches, and the steps of
/// other ranks that have more.

#include <cstddef>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/strategy/gradient_buckets.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica of `Traits`.
template <class Self, class Traits>
class ReplicaUneven {
 public:
  /// A step of the micro-batches that were added up without completing one, if there are any: their
  /// mean, over as many as they are. **Ranks** all, with as many; under `UnevenInputs<Join>` those
  /// that have some, while others make a whole step. **Host** as `update`.
  void step_tail() {
    const std::size_t micro_batches = self().micro_batches();
    if (micro_batches == 0) return;
    [[maybe_unused]] const auto in = self().in_step();
    if constexpr (Traits::joins) {
      // Other ranks divide by the number of micro-batches of a whole step.
      if constexpr (Traits::broadcasts_buffers)
        self().synchronize_buffers(step_call<Traits, JobCall::forward>());
      if (Traits::micro_batches > 1 && micro_batches != Traits::micro_batches)
        self().gradients_.scale_own(static_cast<double>(Traits::micro_batches) /
                                    static_cast<double>(micro_batches));
      self().begin_update();
    } else {
      self().begin_update(micro_batches);
    }
    self().gradients_.start_late();
    self().reduce_and_update();
  }

  /// The part that a rank without batches has in a step of the others: zeros, and the same update.
  /// Returns false, without an update, where no rank had a batch. **Ranks** all. **Host** blocks
  /// until it is known who had one.
  bool answer_others()
    requires(Traits::joins)
  {
    return answer_others([&] {
      self().begin_update();
      self().reduce_and_update();
    });
  }
  /// The same with `reduce_and_update()` in place of the update.
  template <class F>
  bool answer_others(const F& reduce_and_update)
    requires(Traits::joins)
  {
    auto& gradients = self().gradients_;
    if constexpr (Traits::broadcasts_buffers)
      self().synchronize_buffers(step_call<Traits, JobCall::forward>());
    self().backward_without_samples(Sync::yes);
    const bool goes_on = gradients.live().count != 0;
    if (goes_on) {
      reduce_and_update();
    } else {
      gradients.reduce();  // no bucket stays under way
      self().discard_gradients();
      gradients.forget_live();  // all have the newest buffers
    }
    return goes_on;
  }

 private:
  const Self& self() const { return static_cast<const Self&>(*this); }
  Self& self() { return static_cast<Self&>(*this); }
};

}  // namespace lockstep::detail
