// SPDX-License-Identifier: Apache-2.0
// Gradient hooks through sockets: Gloo among all ranks, and between hosts.
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/gloo_ranks.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "train/piped.hpp"

BOOST_AUTO_TEST_SUITE(hooks_through_sockets)

namespace {

using namespace piped;

/// Averages that lose nothing but digits.
template <class... Hook>
void check_averages(auto& comm, double tolerance) {
  Bucket<std::remove_reference_t<decltype(comm)>, float, Hook...> bucket(
      comm, {{12, 9}, {7, 1}, {5, 20}});
  const std::size_t world = comm.world_size().value();
  for (std::size_t step = 0; step != 3; ++step) {
    bucket.reduce([&](const HookedTensor& tensor, std::size_t e) {
      return noise(5, comm.rank().value(), step, tensor.parameter, e);
    });
    for (const HookedTensor& tensor : bucket.tensors) {
      for (std::size_t e = 0; e != tensor.count(); ++e) {
        double mean = 0;
        for (std::size_t r = 0; r != world; ++r)
          mean += noise(5, r, step, tensor.parameter, e) / static_cast<double>(world);
        require_near(bucket.at(tensor, e), mean, tolerance, "step " + std::to_string(step));
      }
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(what_comes_back_is_the_average) {
  const auto reduce = [](auto& comm) {
    check_averages<PowerSGD<64, PowerSgdOptions{.start = 1, .least_compression = 0}>>(comm, 1e-5);
    check_averages<CompressTo<Half>>(comm, 2e-3);
  };
  for (const std::size_t world : {2, 3, 4}) {
    for (const ranks::Ends& ends :
         {ranks::run_processes<ranks::Sockets>(world, std::chrono::seconds(20), reduce),
          ranks::run_processes<ranks::EmulatedHosts>(world, std::chrono::seconds(20), reduce)}) {
      for (std::size_t r = 0; r < ends.size(); ++r)
        BOOST_TEST(ends[r] == "", world << " ranks, rank " << r << ": " << ends[r]);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
