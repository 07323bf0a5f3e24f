// SPDX-License-Identifier: Apache-2.0
// Kinds of jobs whose ranks share the memory of a host.
#include "soak/models.hpp"

namespace soak {

std::optional<int> run_shared_memory(int argc, char** argv) {
  Kinds kinds{argc, argv};
  using Small = Buckets<BucketLimits{64, 256}>;  // several, also of a small network
  using Keyed = Sampler<Distributed, Padding, KeyedShuffle>;
  kinds.kind<Deep<double>, Optimizer<SGDMomentum>, Keyed>("shared");
  kinds.kind<Deep<double>, Optimizer<AdamW>, Accumulate<3>, Clip<0.3>, Schedule<Cosine>>(
      "shared_adamw");
  kinds.kind<Deep<double>, Optimizer<AdamW>, Frozen<"0.*">, Sampler<Distributed, DropLast>>(
      "frozen", {.frozen = "0."});
  kinds.kind<Deep<double, true>, Optimizer<AdamW>, Accumulate<2>>("dropout", {.by_rank = true});
  kinds.kind<Normed, Optimizer<SGDMomentum>, Buffers<Synced>>("norm_local", {.by_rank = true});
  kinds.kind<Deep<double>, Sharding<Replicated>, Small, Optimizer<SGDNesterov>, Schedule<StepDecay>,
             Sampler<Distributed, DropLast>, ParameterGroups<NoDecay<"*.bias">, Named<"0.*">>>(
      "replicated", {.named = "0.weight", .vectors_decay = false});
  return kinds.status;
}

}  // namespace soak
