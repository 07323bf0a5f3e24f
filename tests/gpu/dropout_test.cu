// SPDX-License-Identifier: Apache-2.0
// Dropout and random numbers of steps on a GPU: the bits are the host's.
#include <boost/test/unit_test.hpp>

#include "gpu/device.cuh"
#include "gpu/dropout_checks.cuh"

BOOST_FIXTURE_TEST_SUITE(gpu_dropout, thread_ranks::GpuCase)

BOOST_AUTO_TEST_CASE(kernels_drop_what_the_host_drops) {
  if (!gpu_test::has_gpu()) return;
  dropout_checks::compare_all_with_host({0, 1, 2, 7, 8, 1023, 8195, 1'000'003});
}

BOOST_AUTO_TEST_CASE(captured_steps_of_ranks_draw_the_hosts_numbers) {
  if (!gpu_test::has_gpu()) return;
  for (const std::size_t ranks : {1u, 2u, 4u}) dropout_checks::ranks_draw_the_hosts_numbers(ranks);
}

// Replicas share the GPU where there is one: LOCKSTEP_SHARE_GPUS=1, as tests/gpu/run says.
BOOST_AUTO_TEST_CASE(captured_steps_of_replicas_draw_the_hosts_numbers) {
  if (!gpu_test::has_gpu()) return;
  dropout_checks::replicas_draw_the_hosts_numbers(2);
}

BOOST_AUTO_TEST_SUITE_END()
