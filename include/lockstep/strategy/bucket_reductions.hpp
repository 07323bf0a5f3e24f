// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reductions of buckets that are under way.

#include <cstddef>
#include <span>

#include "lockstep/comm/call.hpp"
#include "lockstep/strategy/bucket_handles.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

/// Begins to reduce a whole bucket over all ranks.
template <class Traits, class Comm>
struct ReduceWhole {
  template <class T>
  static auto on(Comm& comm, std::span<T> gradients) {
    constexpr GradientReduction how = gradient_reduction<Traits, Comm>();
    return comm.all_reduce_async(gradients, reduction_of_gradients<how>(comm.world_size().value()),
                                 step_call<Traits, JobCall::backward>());
  }
};

template <class Traits, class Comm>
class BucketReductions : public TravellingHandles<ReduceWhole<Traits, Comm>, Comm, Traits> {
 public:
  BucketReductions(const Comm&, const auto& /*execution*/, const auto& layout)
      : BucketReductions::BucketHandles(layout.plan().bucket_count) {}
};

}  // namespace lockstep::detail
