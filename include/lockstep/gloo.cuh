// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a GPU job needs, Gloo included: link with -lgloo.

#include "lockstep/comm/groups.hpp"
#include "lockstep/lockstep.cuh"
#include "lockstep/trainer/gloo.cuh"
#include "lockstep/gloo.hpp"
