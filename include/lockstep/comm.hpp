// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Communication without training: process groups, collectives, groups of ranks.

#include "lockstep/comm/backends/loopback.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/launch.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/trainer/process_group.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/comm.ipp"
#endif
