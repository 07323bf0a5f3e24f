// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shared memory inside hosts and Gloo between them.

#include "lockstep/detail/comm/gloo/communicator.hpp"
#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"

namespace lockstep {

/// Creates the communicator of a job whose hosts (the ranks discover them) have equally many ranks;
/// `name` distinguishes several of one job. **Ranks** all. **Host** blocks until all have joined.
inline auto make_hierarchical_communicator(const Membership& member, Store& store,
                                           const std::string& name = "world") {
  return detail::make_hierarchy(member, store, name, make_gloo_communicator<>,
                                make_shm_communicator<>);
}

}  // namespace lockstep
