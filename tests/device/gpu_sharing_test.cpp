// SPDX-License-Identifier: Apache-2.0
#include "lockstep/device/gpu_sharing.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <string>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(gpu_sharing)

namespace {

std::string refusal(std::size_t local_rank, std::size_t local_world, std::size_t gpus,
                    bool may_share) {
  try {
    detail::gpu_index(Rank{5}, local_rank, local_world, gpus, may_share);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_rank_takes_the_gpu_of_its_place_on_the_host) {
  for (std::size_t r = 0; r < 4; ++r) BOOST_TEST(detail::gpu_index(Rank{r}, r, 4, 4, false) == r);
  BOOST_TEST(detail::gpu_index(Rank{9}, 1, 2, 8, false) == 1u);  // GPUs may be left over
}

BOOST_AUTO_TEST_CASE(more_ranks_than_gpus_are_refused_unless_they_were_asked_for) {
  const std::string said = refusal(1, 3, 2, false);
  BOOST_TEST(said.find("rank 5, Device<Cuda>: 3 ranks on this host have 2 GPUs") !=
             std::string::npos);
  BOOST_TEST(said.find("LOCKSTEP_SHARE_GPUS=1") != std::string::npos);
  BOOST_TEST(refusal(0, 3, 2, false) == said);  // all ranks say it, not only the last
  BOOST_TEST(detail::gpu_index(Rank{2}, 2, 3, 2, true) == 0u);
  BOOST_TEST(detail::gpu_index(Rank{7}, 7, 8, 1, true) == 0u);
}

BOOST_AUTO_TEST_CASE(without_a_gpu_nothing_is_shared) {
  BOOST_TEST(refusal(0, 1, 0, true).find("this process sees no GPU") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(a_refusal_says_which_gpus_are_visible) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  BOOST_TEST(refusal(0, 1, 0, true).find("sees no GPU (CUDA_VISIBLE_DEVICES is empty); ") !=
             std::string::npos);
  ::setenv("CUDA_VISIBLE_DEVICES", "7", 1);
  BOOST_TEST(refusal(0, 1, 0, true).find("sees no GPU (CUDA_VISIBLE_DEVICES is 7); ") !=
             std::string::npos);
  ::setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
  BOOST_TEST(refusal(0, 3, 2, false).find("have 2 GPUs (CUDA_VISIBLE_DEVICES is 0,1); ") !=
             std::string::npos);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  BOOST_TEST(refusal(0, 3, 2, false).find("have 2 GPUs; ") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(the_environment_asks_for_sharing) {
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
  BOOST_TEST(!detail::wants_shared_gpus());
  ::setenv("LOCKSTEP_SHARE_GPUS", "0", 1);
  BOOST_TEST(!detail::wants_shared_gpus());
  ::setenv("LOCKSTEP_SHARE_GPUS", "1", 1);
  BOOST_TEST(detail::wants_shared_gpus());
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
}

BOOST_AUTO_TEST_SUITE_END()
