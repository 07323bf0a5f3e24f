// SPDX-License-Identifier: Apache-2.0
// Batch norms and layer norms on a GPU, against plain loops in double: random shapes of both
// layouts, all types, aligned and not, alone and with merged statistics.
#include <boost/test/unit_test.hpp>

#include "gpu/device.cuh"
#include "gpu/norm_checks.cuh"

BOOST_AUTO_TEST_SUITE(gpu_batch_norm)

using namespace norm_checks;
using gpu_test::has_gpu;

// For the sanitizers, under which others take too long.
BOOST_AUTO_TEST_CASE(small_shapes) {
  if (!has_gpu()) return;
  check_batch_norms<float>(2000, 9);
  check_layer_norms<float>(9);
}
BOOST_AUTO_TEST_CASE(batch_norms_of_floats) {
  if (!has_gpu()) return;
  for (unsigned seed = 0; seed != 4; ++seed) check_batch_norms<float>(200000, seed);
}
#if LOCKSTEP_RUNS_ON_GPU
BOOST_AUTO_TEST_CASE(batch_norms_of_other_types) {
  if (!has_gpu()) return;
  check_batch_norms<double, double, Fusion::relu>(200000, 5);
  check_batch_norms<Half, Half, Fusion::none, Fusion::add_relu>(200000, 6);
  check_batch_norms<BFloat16, float, Fusion::relu>(200000, 7);
}
BOOST_AUTO_TEST_CASE(layer_norms_of_other_types) {
  if (!has_gpu()) return;
  check_layer_norms<double>(4);
  check_layer_norms<Half, Half>(5);
  check_layer_norms<BFloat16>(6);
  check_layer_norm<BFloat16>(3001, 1024, 0, 2);
}
#endif
BOOST_AUTO_TEST_CASE(large_tensors) {
  if (!has_gpu()) return;
  for (const NormShape& shape : {NormShape{8, 64, 3136}, NormShape{4, 600, 49},
                                 NormShape{30000, 32, 1}, NormShape{3000, 520, 1}})
    check_batch_norm<Fusion::relu, float, float>(shape, {}, 8);
}
BOOST_AUTO_TEST_CASE(large_means_lose_nothing) {
  if (has_gpu()) check_large_means();
}
BOOST_AUTO_TEST_CASE(evaluation_takes_the_running_statistics) {
  if (has_gpu()) check_running();
}
BOOST_AUTO_TEST_CASE(layer_norms) {
  if (!has_gpu()) return;
  for (unsigned seed = 0; seed != 4; ++seed) check_layer_norms<float>(seed);
  check_layer_norm<float>(3001, 1024, 0, 2);
  check_layer_norm<float>(1100, 4096, 0, 3);
  check_sums_of_many_rows();
}

BOOST_AUTO_TEST_SUITE_END()
