// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The parameters that a rank updates on the host: all, or its slices.

#include <cstddef>
#include <span>

#include "lockstep/bucket/plan.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/strategy/reduction.hpp"
#include "lockstep/strategy/parameter_gathers.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/shards.hpp"

namespace lockstep::detail {

// Four policies say which parameters a rank owns, and so updates: `slice<T>(run)` of the elements
// of every run, where `Runs` are what it walks over. `reduce` hands the averages of a slice to
// `consume(at, averages)`, piece by piece; `averages` gives them afterwards, and `own` the memory
// in which they stay; `add_others` completes a sum over slices; `publish` makes new parameters
// known to all ranks, and comes after `reduce` too where that does not (`publishes_late`).

/// `Sharding<Replicated>`: a rank owns all parameters. A bucket's averages are there as soon as it
/// lands.
template <class Traits, class Comm>
struct OwnsAll {
  using Runs = LayoutRuns<typename Traits::layout>;
  static constexpr bool publishes_late = false;

  constexpr OwnsAll(Comm&, const auto& /*layout*/, std::byte* /*parameters*/) {}

  template <class T>
  static constexpr Shard slice(const Run& run) {
    return {0, run.count()};
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
  template <class T, class Gradients>
  static std::span<T> averages(Gradients& gradients, const Run& run, Shard slice) {
    return gradients.template averages<T>(run.offset, run.bytes)
        .subspan(slice.begin, slice.count());
  }
  static constexpr void add_others(double&) {}
  static constexpr void publish() {}
  static const char* whose() { return Traits::alone ? "" : "as the average over ranks"; }
};

/// `Sharding<HostShared>`: a rank owns a slice of the parameters, which lie in memory that ranks
/// share. Its gradients are reduced in the pass that consumes them.
template <class Traits, class Comm>
struct OwnsSlice {
  using Runs = LayoutRuns<typename Traits::layout>;
  static constexpr bool publishes_late = false;

  OwnsSlice(Comm& communicator, const auto& /*layout*/, std::byte* /*parameters*/)
      : comm(communicator) {}

  template <class T>
  Shard slice(const Run& run) const {
    const auto [begin, end] = comm.template slice<T>(run.count());
    return {begin, end};
  }
  template <class T, class Gradients, class Consume>
  void reduce(Gradients& gradients, const auto&, const Run& run, const Consume& consume) const {
    comm.reduce_slice(gradients.template own<T>(run.offset, run.bytes),
                      reduction_of_gradients<gradient_reduction<Traits, Comm>()>(1), consume,
                      step_call<Traits>());
  }
  template <class T, class Gradients>
  static std::span<T> averages(Gradients& gradients, const Run& run, Shard slice) {
    return gradients.template own<T>(run.offset, run.bytes).subspan(slice.begin, slice.count());
  }
  void add_others(double& squares) const {
    comm.all_reduce(std::span(&squares, 1), Sum{}, step_call<Traits>());
  }
  void publish() const { comm.barrier(step_call<Traits>()); }
  static const char* whose() { return "as the average over ranks"; }

  Comm& comm;
};

/// `Sharding<ZeroRedundancy>`: a rank owns a slice of every bucket. It gets the averages of its
/// slices alone, and all ranks get the parameters of all slices afterwards.
template <class Traits, class Comm>
class OwnsShard {
 public:
  using Runs = LayoutRuns<typename Traits::layout>;  // buckets: there is room between them
  using Gathers = ParameterGathers<Traits, Comm>;
  static constexpr bool publishes_late = true;

  OwnsShard(Comm& comm, const typename Traits::layout& where, std::byte* parameters)
      : gathers_(comm, where, parameters) {}

  template <class T>
  Shard slice(const Run& run) const {
    return gathers_.space().template slice<T>(run.count());
  }
  template <class T, class Gradients, class Consume>
  void reduce(Gradients& gradients, const auto&, const Run& run, const Consume& consume) const {
    gradients.wait(run.first_bucket);
    const Shard owned = slice<T>(run);
    consume(owned.begin, std::span<const T>(averages<T>(gradients, run, owned)));
  }
  template <class T, class Gradients>
  static std::span<T> averages(Gradients& gradients, const Run& run, Shard slice) {
    return gradients.template slice_averages<T>(run.first_bucket, slice);
  }
  void add_others(double& squares) const { gathers_.space().add_others(squares); }
  void publish() { gathers_.start_all(); }
  static const char* whose() { return "as the average over ranks"; }

  Gathers& gathers() { return gathers_; }

 private:
  Gathers gathers_;
};

}  // namespace lockstep::detail
