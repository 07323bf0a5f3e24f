// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradient hooks: `CompressTo`, `PowerSGD`, `LocalSGD`, and the concept of one's own.

#include "lockstep/hook/compress_to.hpp"
#include "lockstep/hook/hook.hpp"
#include "lockstep/hook/local_sgd.hpp"
#include "lockstep/hook/power_sgd.hpp"
