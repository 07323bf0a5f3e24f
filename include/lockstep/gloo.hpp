// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything a CPU job needs, Gloo included: link with -lgloo.

#include "lockstep/comm/groups.hpp"
#include "lockstep/lockstep.hpp"
#include "lockstep/trainer/gloo.hpp"
