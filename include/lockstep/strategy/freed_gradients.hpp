// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of gradients that hands out memory for a few buckets at a time.

#include <cstddef>
#include <string_view>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/model/lookup.hpp"

namespace lockstep::detail {

/// A base of `Self`, the gradients, which have a ring of buckets where a rank gives them away.
template <class Self, class Traits>
class FreedGradients {
 public:
  /// A parameter's gradient, where memory is handed out bucket by bucket.
  template <class Key>
  auto freed_gradient(Key key)
    requires(Traits::frees_gradients)
  {
    self().layout_.require_trained(key);
    const std::size_t parameter =
        find_tensor<typename Traits::model, TensorRole::parameter>(key).index;
    const std::size_t b = parameter < self().layout_.infos().size()
                              ? self().layout_.plan().placements[parameter].bucket
                              : 0;  // refused where its view is made
    if (!self().ring_.holds(b)) claim(b, parameter);
    return self().layout_.template view<typename Traits::memory, false>(self().ring_.arena_of(b),
                                                                        key);
  }

 protected:
  /// Gradients that are missing are zero, bucket by bucket, each of which gets its memory when the
  /// one before has travelled.
  void take_missing_as_zero_in_turn() {
    for (std::size_t b = 0; b != self().layout_.plan().bucket_count; ++b) {
      for (const std::size_t p : self().layout_.plan().members(b)) {
        if (self().readiness_.is_ready(p)) continue;
        if (!self().ring_.holds(b)) claim(b, p);
        const Placement& placement = self().layout_.plan().placements[p];
        self().execution_.zero(self().ring_.arena_of(b) + placement.offset, placement.bytes);
        self().readiness_.mark(p);
      }
      self().start_complete_buckets();
    }
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }

  /// Gives a bucket its memory, which an earlier one may have: that one has travelled first.
  [[gnu::noinline]] void claim(std::size_t b, std::size_t parameter) {
    const std::size_t earlier = self().ring_.holder(b);
    if (b >= self().next_ + self().ring_.slots())
      refuse_gradient(parameter, " was asked for before those of later layers were complete");
    if (earlier != no_bucket) {
      if (earlier > b) refuse_gradient(parameter, " was asked for when its bucket had been sent");
      for (std::size_t k = 0; k <= earlier; ++k) self().wait(k);  // in the same order on all ranks
    }
    self().ring_.take(b);
    self().ring_.clear_padding(self().execution_, b);
    self().features_.bucket_claimed(self(), b);
  }
  [[noreturn, gnu::cold, gnu::noinline]] void refuse_gradient(std::size_t parameter,
                                                              std::string_view when) const {
    fail("backward", {"the gradient of ", self().layout_.name(parameter), when},
         "write gradients last layer first, and ask for each when it is written; "
         "Sharding<ZeroRedundancy, Gradients> keeps few at a time");
  }
};

}  // namespace lockstep::detail
