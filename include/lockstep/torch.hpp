// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LibTorch modules: wrappers for hand-written loops, and `TorchModel` for jobs, whose header
/// (`lockstep/trainer.hpp`, say) is included too. Does not include all of `torch/torch.h`.

#include "lockstep/comm.hpp"
#include "lockstep/detail/torch/autocast.hpp"
#include "lockstep/detail/torch/batch.hpp"
#include "lockstep/detail/torch/collate.hpp"
#include "lockstep/detail/torch/data.hpp"
#include "lockstep/detail/torch/data_parallel.hpp"
#include "lockstep/detail/torch/distributed_data_parallel.hpp"
#include "lockstep/detail/torch/grad_scaler.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/torch/module.hpp"
#include "lockstep/detail/torch/state_dict.hpp"
#include "lockstep/detail/torch/sync_batch_norm.hpp"
#include "lockstep/detail/torch/tensors.hpp"
#include "lockstep/hooks.hpp"

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/detail/data/data.ipp"
#include "lockstep/detail/norm/norm.ipp"
#include "lockstep/detail/strategy/strategy.ipp"
#endif
