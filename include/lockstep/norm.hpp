// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norm, layer norm and dropout for models that write their own passes.

#include "lockstep/detail/norm/batch_norm.hpp"
#include "lockstep/detail/norm/dropout.hpp"
#include "lockstep/detail/norm/layer_norm.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/comm/comm.ipp"
#include "lockstep/detail/core/core.ipp"
#include "lockstep/detail/launch/launch.ipp"
#include "lockstep/detail/norm/norm.ipp"
#include "lockstep/detail/store/store.ipp"
#endif
