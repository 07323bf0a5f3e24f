// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that hooks have a word in: what ranks send, and parameters that they
/// average.

#include <cstdint>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica of `Traits`. In a job without hooks there is nothing in it.
template <class Self, class Traits>
class ReplicaHooks {
 public:
  /// All ranks' parameters become their average, where `LocalSGD` lets ranks train alone: before a
  /// model is used elsewhere, in the middle of a period. **Ranks** all. **Host** as `update`.
  void average_parameters()
    requires(Traits::averages_parameters)
  {
    [[maybe_unused]] const auto on = self().on_device();
    for (const Bucket& bucket : self().layouts_.parameters.plan().buckets()) {
      Traits::with_element(bucket.element, [&]<class T>(std::type_identity<T>) {
        const auto values = elements_at<T>(self().parameters_, bucket.offset, bucket.bytes);
        const auto average = [&](const auto& own) {
          self().gradients_.hooked_reductions().count_sent(own.size_bytes());
          self().comm_.all_reduce(own, Average{}, JobCall::step);
        };
        if constexpr (Traits::keeps_masters) {
          const auto masters = self().updater_.masters_of(bucket);
          average(masters);
          self().execution_.cast(values, masters);
        } else {
          average(values);
        }
      });
    }
  }

  /// The bytes that this rank has handed to collectives for gradients, or parameters, since it was
  /// made: what hooks save on the wire.
  std::uint64_t bytes_sent()
    requires(Traits::is_hooked)
  {
    return self().gradients_.hooked_reductions().bytes_sent();
  }

 protected:
  /// An update has been made.
  void count_hooked_step() {
    if constexpr (Traits::is_hooked) self().gradients_.hooked_reductions().count_step();
    if constexpr (Traits::averages_parameters) {
      if (Traits::hooks::stages::averages_after(self().updates())) average_parameters();
    }
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }
};

}  // namespace lockstep::detail
