// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: convert_sync_batchnorm takes a shared pointer to a module, or a holder
#include "lockstep/detail/torch/sync_batch_norm.hpp"

#ifdef REJECT
void convert(::torch::nn::BatchNorm2d& net) { lockstep::convert_sync_batchnorm(*net); }
#else
void convert(::torch::nn::BatchNorm2d& net) { lockstep::convert_sync_batchnorm(net); }
#endif
