// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The updaters of the host: of parameters that every rank keeps, and of parameters that all
/// ranks share.

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/elements.hpp"
#include "lockstep/bucket/runs.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/optim/clip.hpp"
#include "lockstep/strategy/host_update.hpp"
#include "lockstep/strategy/replica_traits.hpp"
#include "lockstep/strategy/updater.hpp"

namespace lockstep::detail {

/// The rank updates everything.
struct WholeRuns {
  template <class T>
  static constexpr std::pair<std::size_t, std::size_t> slice(std::size_t count) {
    return {0, count};
  }
};

/// `Sharding<Replicated>`: every rank updates all of its own parameters.
template <class Traits, class Comm>
class ReplicatedUpdater : public HostUpdate<Traits, WholeRuns> {
 public:
  template <class Execution>
  ReplicatedUpdater(Comm&, const Execution&, const typename Traits::layout& where,
                    std::byte* parameters)
      : HostUpdate<Traits, WholeRuns>(where, parameters, {}) {}

  /// Where no norm is needed first, a bucket is updated as soon as it is averaged.
  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    if constexpr (Traits::clips) {
      update_averaged(gradients);
    } else {
      this->count_used(gradients);
      update_as_they_land(gradients);
    }
  }

  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    this->count_used(gradients);
    gradients.reduce();
    double squares = 0;
    if constexpr (Traits::clips) squares = this->squares_of(gradients);
    this->update_slices(gradients, squares);
  }

 private:
  template <class Gradients>
  void update_as_they_land(Gradients& gradients) {
    const auto& plan = this->plan();
    std::size_t b = 0;
    this->for_each_run([&]<class T>(const Run& run, const RunSlice& slice, std::type_identity<T>) {
      this->template with_pass<T>(run, slice, 0, [&](const auto& pass) {
        for (; b != plan.bucket_count && plan.bucket_table[b].offset < run.offset + run.bytes;
             ++b) {
          const Bucket& bucket = plan.bucket_table[b];
          gradients.wait(b);
          pass((bucket.offset - run.offset) / sizeof(T),
               gradients.template averages<T>(bucket.offset, bucket.bytes));
        }
      });
    });
  }
};

/// The slices that a communicator's ranks combine.
template <class Comm>
struct CommunicatorSlices {
  Comm& comm;

  template <class T>
  std::pair<std::size_t, std::size_t> slice(std::size_t count) const {
    return comm.template slice<T>(count);
  }
};

/// `Sharding<HostShared>`: parameters lie in memory that all ranks share, and each rank updates its
/// slice of every run. Where no norm is needed first, the pass that updates a slice is the one that
/// reduces it.
template <class Traits, class Comm>
class SharedUpdater : public HostUpdate<Traits, CommunicatorSlices<Comm>> {
  static constexpr auto reduction = reduction_of_gradients<Traits::sums_gradients>();

 public:
  template <class Execution>
  SharedUpdater(Comm& comm, const Execution&, const typename Traits::layout& where,
                std::byte* parameters)
      : HostUpdate<Traits, CommunicatorSlices<Comm>>(where, parameters, {comm}), comm_(comm) {}

  template <class Gradients>
  void reduce_and_update(Gradients& gradients) {
    this->count_used(gradients);
    if constexpr (Traits::clips) {
      double squares = reduce_slices(gradients);
      comm_.all_reduce(std::span(&squares, 1), Sum{});
      update_from_averages(gradients, squares);
    } else {
      this->for_each_run(
          [&]<class T>(const Run& run, const RunSlice& slice, std::type_identity<T>) {
            this->template with_pass<T>(run, slice, 0, [&](const auto& pass) {
              comm_.reduce_slice(gradients.template own<T>(run.offset, run.bytes), reduction, pass);
            });
          });
    }
  }

  template <class Gradients>
  void update_averaged(Gradients& gradients) {
    this->count_used(gradients);
    double squares = 0;
    if constexpr (Traits::clips) squares = this->squares_of(gradients);
    update_from_averages(gradients, squares);
  }

 private:
  /// Averages this rank's slices, in place, and returns the sum of their squares.
  template <class Gradients>
  double reduce_slices(Gradients& gradients) {
    double squares = 0;
    this->for_each_run([&]<class T>(const Run& run, const RunSlice& slice, std::type_identity<T>) {
      const auto mine = gradients.template own<T>(run.offset, run.bytes);
      // No other rank reads this slice of anybody's gradients: it may be overwritten at once.
      comm_.reduce_slice(mine, reduction, [&](std::size_t at, std::span<const T> averages) {
        std::copy(averages.begin(), averages.end(), &mine[at]);
      });
      squares += sum_of_squares<T>(mine.subspan(slice.begin, slice.count()));
    });
    return squares;
  }

  template <class Gradients>
  void update_from_averages(Gradients& gradients, double squares) {
    this->update_slices(gradients, squares);
    comm_.barrier();  // no rank reads parameters before all slices are new
  }

  Comm& comm_;
};

template <class Traits, class Comm>
struct UpdaterOn<Cpu, Traits, Comm> {
  using type = std::conditional_t<Traits::shares_parameters, SharedUpdater<Traits, Comm>,
                                  ReplicatedUpdater<Traits, Comm>>;
};

}  // namespace lockstep::detail
