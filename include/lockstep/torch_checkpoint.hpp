// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Checkpoints of hand-written loops with LibTorch modules, and files of Python's
/// `torch.save`.

#include "lockstep/detail/torch/checkpoint.hpp"
#include "lockstep/torch.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/checkpoint/checkpoint.ipp"
#include "lockstep/detail/core/storage.ipp"
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/observe/observe.ipp"
#endif
