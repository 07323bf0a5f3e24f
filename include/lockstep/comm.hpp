// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communication without training: process groups, collectives, groups of ranks.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/topology/groups.hpp"
#include "lockstep/detail/trainer/process_group.hpp"
#include "lockstep/launch.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/comm/comm.ipp"
#endif
