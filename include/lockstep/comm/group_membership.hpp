// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The place of a rank in a group that meets anew, through a backend of its own.

#include <string>
#include <vector>

#include "lockstep/comm/group_place.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/membership.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail {

/// The part of a group's member in the world of its group. Its GPU stays the one that its place
/// among all ranks of the host gives it. **Ranks** the members. **Host** blocks until all have
/// come.
Membership membership_in_group(const Membership& member, Store& store, const GroupPlace& place,
                               const std::string& name);

/// The same name on all members, and another for other members.
std::string group_name(const std::vector<Rank>& members);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/group_membership.ipp"
#endif
