// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Starting ranks: `launch(argc, argv, function)`, `spawn`, and the options of a program's
/// command line. Nothing here trains.

#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/program_options.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/core.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#endif
