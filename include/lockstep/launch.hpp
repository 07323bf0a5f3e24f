// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Starting ranks without training: `launch(argc, argv, f)`, `spawn`, a program's options.

#include "lockstep/launch/launch.hpp"
#include "lockstep/launch/program_options.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/core/core.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#endif
