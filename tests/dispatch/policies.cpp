// SPDX-License-Identifier: Apache-2.0
// A step of every policy's every choice on CPUs, to be looked at in machine code
// (tests/dispatch/run). Choices of different axes share a job: each brings its own code, whatever
// it is combined with.
#include "dispatch/net.hpp"
#include "lockstep/lockstep.hpp"

namespace dispatch::policies {

template <class... Ps>
using Ddp = DistributedDataParallel<Net, Ps...>;

using MomentumJob =
    Ddp<Optimizer<SGDMomentum>, Schedule<Cosine>, ParameterGroups<NoDecay<>, Named<"w">>,
        Anomaly<Skip>, Buffers<Local>, Progress<HelperThread>, Sharding<Replicated>, Pieces>;
using NesterovJob = Ddp<Optimizer<SGDNesterov>, Schedule<StepDecay>, Anomaly<Ignore>, Frozen<"b">,
                        Buffers<Synced>, World<2>>;
using AloneJob = Ddp<World<1>, Accumulate<2>>;
using NormJob = DistributedDataParallel<NormNet, Norms<Synced>>;
using GroupNormJob =
    DistributedDataParallel<NormNet, Groups<Grid<dynamic, 2>>, Norms<Synced, WithinGroup>>;
using ReplicaNormJob = DataParallel<NormNet, Norms<Synced>, LossOnReplica>;
using OutputJob = DataParallel<OutputNet, LossOnOutput>;
using SubgraphsJob = Ddp<UnusedParameters<Subgraphs<Subgraph<"all", "w", "b">, Subgraph<"b", "b">>>,
                         Pieces, Sharding<Replicated>, Accumulate<2, Tail::drop>, Optimizer<Adam>>;
using ZeroJob = Ddp<Sharding<ZeroRedundancy>, Pieces, Optimizer<Adam>, Clip<1.0>>;
using ZeroGradientsJob =
    Ddp<Sharding<ZeroRedundancy, Gradients>, Pieces, Optimizer<AdamW>, Groups<Grid<dynamic, 2>>>;
using CompressedJob = Ddp<Hooks<CompressTo<BFloat16>>, Sharding<Replicated>, Pieces>;
using PowerJob = Ddp<Hooks<PowerSGD<2>>, Sharding<Replicated>, Pieces>;
using LocalJob = Ddp<Hooks<LocalSGD<4>>, Sharding<Replicated>, Pieces>;
using JoinJob = Ddp<UnevenInputs<Join>, Sharding<Replicated>, Pieces>;
using JoinLiveJob = Ddp<UnevenInputs<Join, DivideByLive>, Hooks<CompressTo<Half>>,
                        Sharding<Replicated>, Pieces, Clip<1.0>>;

extern "C" {
double step_momentum(MomentumJob& ddp, const float& x) { return ddp.step(x); }
double step_nesterov(NesterovJob& ddp, const float& x) { return ddp.step(x); }
double step_alone(AloneJob& ddp, const float& x) { return ddp.step(x); }
double step_norm(NormJob& ddp, const NormNet::Batch& x) { return ddp.step(x); }
double step_norm_of_group(GroupNormJob& ddp, const NormNet::Batch& x) { return ddp.step(x); }
double step_norm_on_replica(ReplicaNormJob& dp, const NormNet::Batch& x) { return dp.step(x); }
double step_loss_on_output(OutputJob& dp, const OutputNet::Batch& x) { return dp.step(x); }
double step_subgraphs(SubgraphsJob& ddp, const float& x) { return ddp.step<"b"_s>(x); }
double step_zero(ZeroJob& ddp, const float& x) { return ddp.step(x); }
double step_zero_gradients(ZeroGradientsJob& ddp, const float& x) { return ddp.step(x); }
double step_compressed(CompressedJob& ddp, const float& x) { return ddp.step(x); }
double step_power_sgd(PowerJob& ddp, const float& x) { return ddp.step(x); }
double step_local_sgd(LocalJob& ddp, const float& x) { return ddp.step(x); }
double step_join(JoinJob& ddp, const float& x) { return ddp.step(x); }
double step_join_live(JoinLiveJob& ddp, const float& x) { return ddp.step(x); }
// The steps of others, which an exhausted rank answers.
void step_join_through(JoinJob& ddp) { ddp.finish_join(); }
}

}  // namespace dispatch::policies
