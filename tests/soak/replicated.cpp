// SPDX-License-Identifier: Apache-2.0
// Kinds of jobs whose ranks share a host and have parameters of their own, and replicas of one
// process.
#include "soak/models.hpp"

namespace soak {

std::optional<int> run_replicated(int argc, char** argv) {
  Kinds kinds{argc, argv};
  using Small = Buckets<BucketLimits{64, 256}>;
  kinds.kind<Deep<double>, Sharding<Replicated>, Small, Progress<HelperThread>, Optimizer<Adam>,
             Accumulate<2, Tail::drop>>("helper_thread");
  kinds.kind<Deep<double>, Sharding<Replicated>, Small, Optimizer<Adam>, UnusedParameters<Zero>>(
      "unused");
  kinds.kind<Deep<double>, Sharding<Replicated>, Optimizer<SGDMomentum>,
             UnevenInputs<Join, DivideByLive>, Sampler<Distributed, Exact>, Accumulate<2>>(
      "join", {.by_rank = true});
  kinds.kind<Normed, Sharding<Replicated>, Optimizer<SGDNesterov>, Norms<Synced>>("norm_synced");
  kinds.kind<Deep<float>, Hooks<CompressTo<BFloat16>>, Optimizer<AdamW>>("compressed");
  kinds.kind<Deep<double>, Hooks<LocalSGD<3>>, Optimizer<SGDMomentum>>("local_sgd");
  kinds.kind<Deep<BFloat16>, Optimizer<SGDMomentum>, Anomaly<Skip>>("bfloat16");
  kinds.kind<Deep<double>, ParallelStrategy<DP>, Optimizer<AdamW>, Clip<0.3>>("dp");
  kinds.kind<Deep<double>, ParallelStrategy<DP>, Sharding<Replicated>, Small,
             Optimizer<SGDMomentum>, Accumulate<2>>("dp_replicated");
  return kinds.status;
}

}  // namespace soak
