// SPDX-License-Identifier: Apache-2.0
// Random sequences of collectives through shared memory, against a model.
#include "sequences.hpp"

using namespace ranks;

BOOST_AUTO_TEST_SUITE(comm_sequences)

BOOST_AUTO_TEST_CASE(random_sequences_of_processes_are_those_of_the_model) {
  random_sequences<SharedMemory>(As::processes, 25, 1000);
}

BOOST_AUTO_TEST_CASE(random_sequences_of_threads_are_those_of_the_model) {
  random_sequences<SharedMemory>(As::threads, 25, 1000);
}

BOOST_AUTO_TEST_SUITE_END()
