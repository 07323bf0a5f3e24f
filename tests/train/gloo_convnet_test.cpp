// SPDX-License-Identifier: Apache-2.0
// Every case of convnet.json again, through sockets: Gloo among all ranks, and between hosts.
#include <boost/test/unit_test.hpp>

#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#include "train/convnet_case.hpp"

BOOST_AUTO_TEST_SUITE(gloo_convolutional_networks)

BOOST_AUTO_TEST_CASE(norms_are_synced_through_gloo) {
  convnets::check_every_case<ranks::Sockets, Norms<Synced>, Backend<Gloo>>(4);
}

BOOST_AUTO_TEST_CASE(norms_are_synced_through_a_hierarchy) {
  convnets::check_every_case<ranks::EmulatedHosts, Norms<Synced>, Backend<Hierarchical<Shm, Gloo>>>(
      4);
}

BOOST_AUTO_TEST_SUITE_END()
