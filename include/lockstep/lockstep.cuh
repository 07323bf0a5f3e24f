// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, but for NCCL: that is <lockstep/nccl.cuh>.

#include "lockstep/comm/groups.hpp"
#include "lockstep/data/device_batch.cuh"
#include "lockstep/data/pinned.cuh"
#include "lockstep/data/resident.cuh"
#include "lockstep/lockstep.hpp"
#include "lockstep/norm/device_layer_norm.cuh"
#include "lockstep/norm/device_norm.cuh"
#include "lockstep/norm/dropout.cuh"
#include "lockstep/trainer/cuda.cuh"
