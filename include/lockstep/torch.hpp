// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch modules: wrappers for hand-written loops, and `TorchModel` for jobs, whose header
/// (`lockstep/trainer.hpp`, say) is included too. Does not include all of `torch/torch.h`.

#include "lockstep/comm.hpp"
#include "lockstep/hooks.hpp"
#include "lockstep/torch/autocast.hpp"
#include "lockstep/torch/batch.hpp"
#include "lockstep/torch/collate.hpp"
#include "lockstep/torch/data.hpp"
#include "lockstep/torch/data_parallel.hpp"
#include "lockstep/torch/distributed_data_parallel.hpp"
#include "lockstep/torch/model.hpp"
#include "lockstep/torch/module.hpp"
#include "lockstep/torch/state_dict.hpp"
#include "lockstep/torch/sync_batch_norm.hpp"
#include "lockstep/torch/tensors.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/data.ipp"
#include "lockstep/norm/norm.ipp"
#include "lockstep/strategy/strategy.ipp"
#endif
