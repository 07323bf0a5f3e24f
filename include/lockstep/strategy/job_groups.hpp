// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The communicators of a job with `Groups<Grid<W, G>>`: this rank's group, and the ranks
/// that have its place in the other groups.

#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/comm/groups.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/topology.hpp"

namespace lockstep::detail {

/// A job without groups.
template <class T, class Comm>
struct JobGroups {
  static constexpr bool has_groups = false;
  constexpr explicit JobGroups(Comm&) {}
};

/// Stands for the other direction of groups that have different sizes.
struct NothingAcross {
  constexpr explicit NothingAcross(auto&, const auto&) {}
  static constexpr void abandon(std::string_view) {}
};

/// The communicators of a topology's rows and columns. They are made once, rows first, on all ranks
/// in the same order, and use the GPU and the compute stream of the job's.
template <JobTopology T, class Comm>
class JobGroups<T, Comm> {
  template <class Topo>
  struct Joined {
    decltype(join_groups(std::declval<Comm&>(), std::declval<const Topo&>())) comm;

    Joined(Comm& all, const Topo& topology) : comm(join_groups(all, topology)) {}
    void abandon(std::string_view reason) { comm.abandon(reason); }
  };
  template <class Topo>
  struct Columns : std::type_identity<NothingAcross> {};
  template <EvenTopology Topo>
  struct Columns<Topo> : std::type_identity<Joined<Transposed<Topo>>> {};

 public:
  static constexpr bool has_groups = true;
  static constexpr bool is_even = EvenTopology<T>;

  /// **Ranks** all. **Host** blocks until all have come.
  explicit JobGroups(Comm& comm)
      : all_(comm),
        topology_(topology_for<T>(comm.world_size())),
        rows_(comm, topology_),
        columns_(comm, transposed(topology_)) {}

  const T& topology() const { return topology_; }
  auto& group() { return rows_.comm; }
  auto& across()
    requires is_even
  {
    return columns_.comm;
  }

  // A rank that fails tells all ranks, whichever call they are in.

  Rank rank() const { return all_.rank(); }
  void abandon(std::string_view reason) {
    all_.abandon(reason);
    rows_.abandon(reason);
    columns_.abandon(reason);
  }

 private:
  static auto transposed(const T& topology) {
    if constexpr (is_even) {
      return transpose(topology);
    } else {
      return topology;
    }
  }

  Comm& all_;
  [[no_unique_address]] T topology_;
  Joined<T> rows_;
  [[no_unique_address]] typename Columns<T>::type columns_;
};

/// The groups of a job's policies.
template <class Traits, class Comm>
using JobGroupsOf = JobGroups<typename Traits::job_topology, Comm>;

}  // namespace lockstep::detail
