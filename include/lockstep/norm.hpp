// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norm, layer norm and dropout for models that write their own passes.

#include "lockstep/norm/batch_norm.hpp"
#include "lockstep/norm/dropout.hpp"
#include "lockstep/norm/layer_norm.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/comm/comm.ipp"
#include "lockstep/core/core.ipp"
#include "lockstep/launch/launch.ipp"
#include "lockstep/launch/store.ipp"
#include "lockstep/norm/norm.ipp"
#endif
