// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Observers<Trace>`: `--trace out.json` writes a trace of all ranks for Perfetto.

#include "lockstep/detail/observe/trace.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/core/storage.ipp"
#include "lockstep/detail/observe/trace.ipp"
#endif
