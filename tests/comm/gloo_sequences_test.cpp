// SPDX-License-Identifier: Apache-2.0
// Random sequences of collectives through Gloo, and through a hierarchy, against a model.
#include "gloo_ranks.hpp"
#include "sequences.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(gloo_sequences)

BOOST_AUTO_TEST_CASE(random_sequences_through_gloo_are_those_of_the_model) {
  random_sequences<Sockets>(As::processes, 6, 300);
}

BOOST_AUTO_TEST_CASE(random_sequences_through_a_hierarchy_are_those_of_the_model) {
  random_sequences<EmulatedHosts>(As::processes, 6, 300);
}

BOOST_AUTO_TEST_SUITE_END()
