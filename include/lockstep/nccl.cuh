// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, NCCL included: link with -lnccl.

#include "lockstep/comm/groups.hpp"
#include "lockstep/lockstep.cuh"
#include "lockstep/trainer/nccl.cuh"
