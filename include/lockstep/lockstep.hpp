// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Everything for CPU jobs. A program may include only the headers that it uses instead.

#include "lockstep/checkpoint.hpp"
#include "lockstep/comm.hpp"
#include "lockstep/data.hpp"
#include "lockstep/ddp.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/random_stream.hpp"
#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/device/device.hpp"
#include "lockstep/dp.hpp"
#include "lockstep/hooks.hpp"
#include "lockstep/launch.hpp"
#include "lockstep/norm.hpp"
#include "lockstep/trainer.hpp"
#include "lockstep/version.hpp"
