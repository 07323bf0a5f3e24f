// SPDX-License-Identifier: Apache-2.0
// Steps of jobs on CPUs, to be looked at in machine code: tests/dispatch/run.
#include "dispatch/net.hpp"
#include "lockstep/lockstep.hpp"
#if __has_include(<gloo/allreduce.h>)
#include "lockstep/gloo.hpp"
#endif

namespace dispatch::steps {

template <class... Ps>
using Ddp = DistributedDataParallel<Net, Optimizer<AdamW>, Ps...>;

using SharedJob = Ddp<>;
using SharedClipJob = Ddp<Clip<1.0>, Accumulate<2>>;
using ReplicatedJob = Ddp<Sharding<Replicated>, Pieces>;
using ReplicatedZeroJob = Ddp<Sharding<Replicated>, Pieces, UnusedParameters<Zero>, World<4>>;
using SubgraphJob = Ddp<UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"all", "w", "b">>>,
                        Hooks<SkipZeroGradients>>;
using DpJob = DataParallel<BatchNet, Optimizer<AdamW>>;
using TrainerJob = Trainer<BatchNet, Optimizer<AdamW>, Clip<1.0>>;
using DpTrainerJob = Trainer<BatchNet, ParallelStrategy<DP>, World<2>>;

// The roots of the walk.
extern "C" {
double step_shared(SharedJob& ddp, const float& x) { return ddp.step(x); }
double step_shared_by_hand(SharedJob& ddp, const float& x) {
  return ddp.forward(x).backward().reduce().update();
}
double step_shared_clipped(SharedClipJob& ddp, const float& x) { return ddp.step(x); }
double step_replicated(ReplicatedJob& ddp, const float& x) { return ddp.step(x); }
double step_replicated_zero(ReplicatedZeroJob& ddp, const float& x) { return ddp.step(x); }
double step_subgraph(SubgraphJob& ddp, const SubgraphChoice& set, const float& x) {
  return ddp.step<"all"_s>(x) + ddp.step(set, x);
}
double step_dp(DpJob& dp, const BatchNet::Batch& x) { return dp.step(x); }
double step_trainer(TrainerJob& job, const BatchNet::Batch& x) { return job.step(x); }
double step_dp_trainer(DpTrainerJob& job, const BatchNet::Batch& x) { return job.step(x); }
#if __has_include(<gloo/allreduce.h>)
double step_gloo(Ddp<Backend<Gloo>, Pieces>& ddp, const float& x) { return ddp.step(x); }
double step_hierarchical(Ddp<Backend<Hierarchical<Shm, Gloo>>, Pieces>& ddp, const float& x) {
  return ddp.step(x);
}
#endif
}

}  // namespace dispatch::steps
