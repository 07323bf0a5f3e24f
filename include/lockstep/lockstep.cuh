// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, but for NCCL: that is <lockstep/nccl.cuh>.

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/data/pinned.cuh"
#include "lockstep/detail/data/resident.cuh"
#include "lockstep/detail/norm/device_layer_norm.cuh"
#include "lockstep/detail/norm/device_norm.cuh"
#include "lockstep/detail/norm/dropout.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/lockstep.hpp"
