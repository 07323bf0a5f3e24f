// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Buffers<Broadcast>` and `Buffers<Synced>`: ranks have the same buffers.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/comm/collective.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/strategy/features.hpp"

namespace lockstep::detail {

/// Buffers become their average over ranks, and integers, such as counts of batches, the largest:
/// one call for each element type. **Ranks** all.
template <class Traits>
void average_buffers(auto& comm, const auto& layout, std::byte* buffers, JobCall part_of) {
  for (const Bucket& bucket : layout.plan().buckets()) {
    with_element<typename Traits::model, TensorRole::buffer, typename Traits::buffer_types>(
        bucket.element, [&]<class T>(std::type_identity<T>) {
          const auto values = elements_at<T>(buffers, bucket.offset, bucket.bytes);
          if constexpr (FloatingElement<T>) {
            comm.all_reduce(values, Average{}, part_of);
          } else {
            comm.all_reduce(values, Max{}, part_of);
          }
        });
  }
}

/// All ranks get rank 0's buffers before every forward pass that synchronizes.
struct BroadcastBuffers : Stages<BroadcastBuffers> {
  constexpr explicit BroadcastBuffers(const auto& /*gradients*/) {}

  static void before_forward(auto& replica, JobCall part_of) {
    replica.synchronize_buffers(part_of);
  }
};

struct BuffersFeature {
  template <class Traits>
  static constexpr bool applies = Traits::broadcasts_buffers;
  template <class Traits, class Comm>
  using type = BroadcastBuffers;
};

}  // namespace lockstep::detail
