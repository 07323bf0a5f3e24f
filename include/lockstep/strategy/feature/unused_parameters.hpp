// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `UnusedParameters<Zero>`: a missing gradient counts as zero, and parameters that no rank
/// has used are not updated.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/features.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Which parameters this rank has used since the last update.
template <class Traits>
class UsedParameters {
  using layout = typename Traits::layout;

 public:
  using Usage = typename Traits::Usage;

  explicit UsedParameters(const layout& where)
      : used_(make_kept_table<std::uint8_t, layout::count>(where.infos().size())) {}

  const Usage& used() const { return used_; }

  /// Which parameters any rank has used. **Ranks** all. **Host** blocks. Waits for the buckets
  /// under way first: a communicator that finishes them inside of another call no longer knows
  /// their types.
  const Usage& agree_on_usage(auto& gradients) {
    if constexpr (!Traits::alone && !Traits::subgraphs_agree) {
      if constexpr (Traits::reduces_early) gradients.reduce();
      gradients.comm().all_reduce(used_, Max{}, step_call<Traits, JobCall::backward>());
    }
    return used_;
  }

 protected:
  void forget_usage() { std::ranges::fill(used_, std::uint8_t{0}); }

  Usage used_;
};

template <class Traits, class Comm>
class UnusedParametersAsZero : public Stages<UnusedParametersAsZero<Traits, Comm>>,
                               public UsedParameters<Traits> {
 public:
  explicit UnusedParametersAsZero(const auto& gradients)
      : UsedParameters<Traits>(gradients.layout()) {}

  template <class T>
  void gradient_ready(auto& /*gradients*/, std::size_t parameter) {
    this->used_[parameter] = 1;
  }
  static void after_backward(auto& gradients) { gradients.take_missing_as_zero(); }
  void after_update() { this->forget_usage(); }
};

}  // namespace lockstep::detail
