// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicators of `Groups<Grid<W, G>>`: of this rank's group, and across groups.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/topology/groups.hpp"

namespace lockstep::detail {

/// A job without groups.
template <class T, class Comm>
struct JobGroups {
  constexpr explicit JobGroups(Comm&) {}
};

/// The communicator across groups; nothing if groups differ in size.
template <class T, class Comm>
auto join_across(Comm& all, const T& topology) {
  if constexpr (EvenTopology<T>) {
    return join_groups(all, transpose(topology));
  } else {
    return NoGroups{};
  }
}

/// The communicators of a topology's rows and columns, on the job's GPU and compute stream.
template <JobTopology T, class Comm>
class JobGroups<T, Comm> {
 public:
  static constexpr bool is_even = EvenTopology<T>;

  /// **Ranks** all. **Host** blocks until all have come.
  explicit JobGroups(Comm& comm)
      : all_(comm),
        topology_(topology_for<T>(comm.world_size())),
        rows_(join_groups(comm, topology_)),
        columns_(join_across(comm, topology_)) {}

  auto& group() { return rows_; }
  auto& across()
    requires is_even
  {
    return columns_;
  }

  // A failure aborts all ranks, whichever call they are in.

  Rank rank() const { return all_.rank(); }
  void abort(std::string_view reason) {
    all_.abort(reason);
    rows_.abort(reason);
    if constexpr (is_even) columns_.abort(reason);
  }

 private:
  Comm& all_;
  [[no_unique_address]] T topology_;
  decltype(join_groups(std::declval<Comm&>(), std::declval<const T&>())) rows_;
  [[no_unique_address]] decltype(join_across(std::declval<Comm&>(),
                                             std::declval<const T&>())) columns_;
};

template <class Traits, class Comm>
using JobGroupsOf = JobGroups<typename Traits::job_topology, Comm>;

}  // namespace lockstep::detail
