// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Observers<TensorBoard>` and `Observers<Prometheus>`: metrics where people look.

#include "lockstep/detail/observe/prometheus.hpp"
#include "lockstep/detail/observe/tensorboard.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/observe/metrics.ipp"
#endif
