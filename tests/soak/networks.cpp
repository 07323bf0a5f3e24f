// SPDX-License-Identifier: Apache-2.0
// Kinds of jobs whose ranks meet over a network, or share memory on each of two hosts.
#include "lockstep/gloo.hpp"
#include "soak/models.hpp"

namespace soak {

std::optional<int> run_networks(int argc, char** argv) {
  Kinds kinds{argc, argv};
  using Small = Buckets<BucketLimits{64, 256}>;
  using Both = Backend<Hierarchical<Shm, Gloo>>;
  kinds.kind<Deep<float>, Backend<Gloo>, Optimizer<SGD>, Small>("gloo_float");
  kinds.kind<Deep<double>, Backend<Gloo>, Sharding<ZeroRedundancy>, Small, Optimizer<AdamW>,
             Clip<0.3>, Schedule<Cosine>>("gloo_zero");
  kinds.kind<Deep<double>, Backend<Gloo>, Sharding<ZeroRedundancy, Gradients>, Small,
             Optimizer<AdamW>, Accumulate<2>>("gloo_zero_gradients");
  kinds.kind<Deep<double>, Backend<Gloo>, Hooks<PowerSGD<1, PowerSgdOptions{.start = 3}>>,
             Optimizer<SGDMomentum>>("gloo_power");
  kinds.kind<Deep<double>, Both, Optimizer<SGDMomentum>, Small, Accumulate<2>>("hierarchical");
  kinds.kind<Deep<double>, Both, Sharding<ZeroRedundancy>, Optimizer<AdamW>>("hierarchical_zero");
  return kinds.status;
}

}  // namespace soak
