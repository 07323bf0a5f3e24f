// SPDX-License-Identifier: Apache-2.0
// Every case of syncbn_train.json through sockets: Gloo among all ranks, with states and gradients
// of the optimizer divided among them, and between hosts.
#include <boost/test/unit_test.hpp>

#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#include "train/norm_mlp.hpp"

BOOST_AUTO_TEST_SUITE(norms_through_sockets)

namespace {

using namespace train;

template <class... Ps>
using Job = DistributedDataParallel<NormMlp, Optimizer<SGDMomentum>, Norms<Synced>,
                                    Buckets<BucketLimits{0, 0}>, Ps...>;

}  // namespace

BOOST_AUTO_TEST_CASE(gloo_trains_norms_as_pytorch_does) {
  check_every_norm_case<ranks::Sockets, Job<Backend<Gloo>>>(4);
}
BOOST_AUTO_TEST_CASE(states_are_scattered_while_norms_communicate) {
  check_every_norm_case<ranks::Sockets, Job<Backend<Gloo>, Sharding<ZeroRedundancy, Gradients>>>(4);
}
BOOST_AUTO_TEST_CASE(a_hierarchy_trains_norms_as_pytorch_does) {
  check_every_norm_case<ranks::EmulatedHosts, Job<Backend<Hierarchical<Shm, Gloo>>>>(4);
}

BOOST_AUTO_TEST_SUITE_END()
