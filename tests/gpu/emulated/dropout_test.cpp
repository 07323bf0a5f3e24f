// SPDX-License-Identifier: Apache-2.0
// Dropout and random numbers of steps on GPUs that the host plays: the bits are the host's.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>

#include "gpu/dropout_checks.cuh"
#include "gpu/emulated/machine.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_dropout)

BOOST_AUTO_TEST_CASE(kernels_drop_what_the_host_drops) {
  const emulated::Machine machine(1);
  dropout_checks::compare_all_with_host({0, 1, 2, 7, 8, 1023, 8195});
}

BOOST_AUTO_TEST_CASE(captured_steps_of_ranks_draw_the_hosts_numbers) {
  for (const std::size_t ranks : {1u, 2u}) {
    const emulated::Machine machine(ranks);
    dropout_checks::ranks_draw_the_hosts_numbers(ranks);
  }
}

BOOST_AUTO_TEST_CASE(captured_steps_of_replicas_draw_the_hosts_numbers) {
  const emulated::Machine machine(2);
  dropout_checks::replicas_draw_the_hosts_numbers(2);
}

BOOST_AUTO_TEST_SUITE_END()
