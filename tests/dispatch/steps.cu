// SPDX-License-Identifier: Apache-2.0
// Steps of jobs on GPUs, whose host side is to be looked at in machine code: tests/dispatch/run.
#include <cuda_runtime_api.h>

#include "lockstep/lockstep.cuh"
#if __has_include(<nccl.h>)
#include "lockstep/nccl.cuh"
#endif
#if __has_include(<gloo/allreduce.h>)
#include "lockstep/gloo.cuh"
#endif

namespace {

using namespace lockstep;

/// The kernels of a model are its own; here there are none.
struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 100, 30>, Parameter<"b", float, 100>>;
  using Batch = LabelledBatch<float, std::int32_t>;

  void forward(auto& step, const auto&) {
    cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream());
  }
  void backward(auto& step, const auto&) {
    step.ready("b"_p);
    step.ready("w"_p);
  }
};

template <class... Ps>
using Ddp = DistributedDataParallel<Net, Device<Cuda>, Optimizer<AdamW>,
                                    Buckets<BucketLimits{0, 0}>, Ps...>;
using Mixed16 = Precision<Mixed<Half>>;

}  // namespace

// The roots of the walk.
extern "C" {
void step_gpu_threads(Ddp<Backend<Shm>>& ddp, const Net::Batch& x) { ddp.step(x); }
void step_gpu_threads_captured(Ddp<Backend<Shm>, CapturedStep, Mixed16>& ddp, const Net::Batch& x) {
  ddp.step(x);
}
void step_gpu_dp(DataParallel<Net, Device<Cuda>>& dp, const Net::Batch& x) { dp.step(x); }
#if __has_include(<nccl.h>)
void step_gpu_nccl(Ddp<Backend<Nccl>>& ddp, const Net::Batch& x) { ddp.step(x); }
void step_gpu_zero(Ddp<Backend<Nccl>, Sharding<ZeroRedundancy>, Precision<ScaledLoss>>& ddp,
                   const Net::Batch& x) {
  ddp.step(x);
}
void step_gpu_power_sgd(Ddp<Backend<Nccl>, Hooks<PowerSGD<2>>>& ddp, const Net::Batch& x) {
  ddp.step(x);
}
void step_gpu_trainer(Trainer<Net, Device<Cuda>, CapturedStep>& job, const Net::Batch& x) {
  job.step(x);
}
#endif
#if __has_include(<gloo/allreduce.h>)
void step_gpu_gloo(Ddp<Backend<Gloo>>& ddp, const Net::Batch& x) { ddp.step(x); }
#endif
}
