// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the gradients of a job are reduced, bucket by bucket.

#include <type_traits>

#include "lockstep/strategy/bucket_reductions.hpp"
#include "lockstep/strategy/hooked_reductions.hpp"
#include "lockstep/strategy/shard_reductions.hpp"

namespace lockstep::detail {

template <class Traits, class Comm, class Execution>
struct ReductionsFor {
  using type = BucketReductions<Traits, Comm>;
};
template <class Traits, class Comm, class Execution>
  requires(Traits::is_hooked)
struct ReductionsFor<Traits, Comm, Execution> {
  using type = HookedReductions<Traits, Comm, Execution>;
};
template <class Traits, class Comm, class Execution>
  requires(Traits::scatters_buckets)
struct ReductionsFor<Traits, Comm, Execution> {
  using type = ShardReductions<Traits, Comm>;
};

/// The reductions of a job's buckets. All kinds are made from the communicator, the execution and
/// the layout, and have `start(comm, bucket, gradients)` when a bucket is complete,
/// `wait<T>(bucket)`, after which its averages lie where its gradients were, and `forget()`.
template <class Traits, class Comm, class Execution>
using ReductionsOf = typename ReductionsFor<Traits, Comm, Execution>::type;

}  // namespace lockstep::detail
