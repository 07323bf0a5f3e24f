// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Starting ranks without training: `launch(argc, argv, f)`, `spawn`, a program's options.

#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/launch/program_options.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/core/core.ipp"
#include "lockstep/detail/launch/launch.ipp"
#include "lockstep/detail/store/store.ipp"
#endif
