// SPDX-License-Identifier: Apache-2.0
// Data sets in GPU memory and pinned batches, against the host's loader.
#include <boost/test/unit_test.hpp>
#include <cstddef>

#include "gpu/data_checks.cuh"

namespace {

namespace bt = boost::unit_test;

boost::test_tools::assertion_result gpu_is_there(bt::test_unit_id) {
  boost::test_tools::assertion_result result(lockstep::detail::visible_gpus() > 0);
  result.message() << "there is no GPU here";
  return result;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_data, *bt::precondition(gpu_is_there))

BOOST_AUTO_TEST_CASE(batches_are_those_of_the_hosts_loader) {
  data_checks::compare_all_batches();
  data_checks::load_by_hand();
}

BOOST_AUTO_TEST_CASE(ranks_train_on_them_as_on_the_hosts_batches) {
  for (const std::size_t ranks : {1, 2, 4}) data_checks::train_with_all_batches(ranks);
}

BOOST_AUTO_TEST_CASE(replicas_train_on_them_as_on_the_hosts_batches) {
  for (const std::size_t replicas : {1, 2}) data_checks::train_replicas_with_all_batches(replicas);
}

BOOST_AUTO_TEST_SUITE_END()
