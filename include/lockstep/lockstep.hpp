// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs.

#include "lockstep/core/error.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/host_arena.hpp"
#include "lockstep/model/model.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/groups.hpp"
#include "lockstep/topology/split.hpp"
#include "lockstep/topology/transposed.hpp"
#include "lockstep/trainer/trainer.hpp"
#include "lockstep/version.hpp"
