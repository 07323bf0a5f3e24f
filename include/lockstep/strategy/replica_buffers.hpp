// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that gives all ranks the same buffers.

#include <type_traits>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/comm/call.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/tensor.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica.
template <class Self>
class ReplicaBuffers {
 public:
  /// Gives all ranks rank 0's buffers, or under `UnevenInputs<Join>` those of the lowest rank that
  /// had a batch in the step before. With `Buffers<Synced>` they become their average over ranks,
  /// and integers, such as counts of batches, the largest. **Ranks** all. **Host** blocks, or on a
  /// GPU enqueues.
  void synchronize_buffers(JobCall part_of = current_job_call()) {
    using traits = typename Self::traits;
    [[maybe_unused]] const auto on = self().on_device();
    if constexpr (traits::averages_buffers) {
      average_buffers(part_of);
    } else {
      Rank root{0};
      if constexpr (traits::joins && traits::broadcasts_buffers) root = self().gradients_.newest();
      broadcast_buffers(part_of, root);
    }
  }

 protected:
  void broadcast_buffers(JobCall part_of = current_job_call(), Rank root = Rank{0}) {
    self().broadcast(self().buffers_, self().layouts_.buffers.plan().bytes, part_of, root);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }

  /// One call for each element type that buffers have.
  void average_buffers(JobCall part_of) {
    using traits = typename Self::traits;
    for (const Bucket& bucket : self().layouts_.buffers.plan().buckets()) {
      with_element<typename traits::model, TensorRole::buffer, typename traits::buffer_types>(
          bucket.element, [&]<class T>(std::type_identity<T>) {
            const auto values = elements_at<T>(self().buffers_, bucket.offset, bucket.bytes);
            if constexpr (FloatingElement<T>) {
              self().comm_.all_reduce(values, Average{}, part_of);
            } else {
              self().comm_.all_reduce(values, Max{}, part_of);
            }
          });
    }
  }
};

}  // namespace lockstep::detail
