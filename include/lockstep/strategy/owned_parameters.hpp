// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parameters that a rank updates on the host: all, or its slice of those that ranks
/// share.

#include <cstddef>
#include <span>
#include <utility>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/gradient_reduction.hpp"
#include "lockstep/strategy/replica_traits.hpp"

namespace lockstep::detail {

// Two policies say which parameters a rank owns, and so updates: `slice<T>(count)` of the elements
// of every run. `reduce` hands the averages of a slice to `consume(at, averages)`, piece by piece;
// `add_others` completes a sum over slices; `publish` makes new parameters known to all ranks.

/// `Sharding<Replicated>`: a rank owns all parameters. A bucket's averages are there as soon as it
/// lands.
template <class Traits, class Comm>
struct OwnsAll {
  constexpr explicit OwnsAll(Comm&) {}

  template <class T>
  static constexpr std::pair<std::size_t, std::size_t> slice(std::size_t count) {
    return {0, count};
  }
  template <class T, class Gradients, class Consume>
  static void reduce(Gradients& gradients, const auto& plan, const Run& run,
                     const Consume& consume) {
    for (std::size_t b = run.first_bucket; b != run.first_bucket + run.buckets; ++b) {
      const Bucket& bucket = plan.bucket_table[b];
      gradients.wait(b);
      consume((bucket.offset - run.offset) / sizeof(T),
              std::span<const T>(gradients.template averages<T>(bucket.offset, bucket.bytes)));
    }
  }
  static constexpr void add_others(double&) {}
  static constexpr void publish() {}
  static const char* whose() { return Traits::alone ? "" : "as the average over ranks"; }
};

/// `Sharding<HostShared>`: a rank owns a slice of the parameters, which lie in memory that ranks
/// share. Its gradients are reduced in the pass that consumes them.
template <class Traits, class Comm>
struct OwnsSlice {
  Comm& comm;

  template <class T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return comm.template slice<T>(count);
  }
  template <class T, class Gradients, class Consume>
  void reduce(Gradients& gradients, const auto&, const Run& run, const Consume& consume) const {
    comm.reduce_slice(gradients.template own<T>(run.offset, run.bytes),
                      reduction_of_gradients<gradient_reduction<Traits, Comm>()>(1), consume,
                      step_call<Traits>());
  }
  void add_others(double& squares) const {
    comm.all_reduce(std::span(&squares, 1), Sum{}, step_call<Traits>());
  }
  void publish() const { comm.barrier(step_call<Traits>()); }
  static const char* whose() { return "as the average over ranks"; }
};

}  // namespace lockstep::detail
