// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a GradScaler looks for gradients that are not finite
#include "lockstep/detail/torch/grad_scaler.hpp"

using namespace lockstep;

#ifdef REJECT
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Anomaly<Skip>>;
#else
using Wrapper = lockstep::torch::DistributedDataParallel<::torch::nn::Module, Anomaly<Ignore>>;
#endif

bool is_enabled(Wrapper& ddp) { return lockstep::torch::GradScaler(ddp).is_enabled(); }
