// SPDX-License-Identifier: Apache-2.0
// The cases of syncbn.json through sockets: Gloo among all ranks, and between hosts.
#include <boost/test/unit_test.hpp>

#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
#include "norm/synced.hpp"

BOOST_AUTO_TEST_SUITE(synced_norms_through_gloo)

BOOST_AUTO_TEST_CASE(uneven_batches_are_normalised_as_pytorch_does) {
  synced::check_every_case<ranks::Sockets, lockstep::Backend<lockstep::Gloo>>();
}

BOOST_AUTO_TEST_CASE(a_hierarchy_normalises_as_pytorch_does) {
  synced::check_every_case<
      ranks::EmulatedHosts,
      lockstep::Backend<lockstep::Hierarchical<lockstep::Shm, lockstep::Gloo>>>();
}

BOOST_AUTO_TEST_SUITE_END()
