// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Gradient hooks: `CompressTo`, `PowerSGD`, `LocalSGD`, and the concept of one's own.

#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/hook.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
