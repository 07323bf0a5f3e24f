// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shared memory inside hosts and a network between them.

#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/shm/communicator.hpp"

namespace lockstep::detail {

/// See `make_hierarchy`.
template <class MakeNetwork>
auto make_shm_hierarchy(const Membership& member, Store& store, const std::string& name,
                        const MakeNetwork& make_network) {
  return make_hierarchy(member, store, name, make_network, make_shm_communicator<>);
}

}  // namespace lockstep::detail
