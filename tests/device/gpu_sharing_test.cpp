// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/device/gpu_sharing.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <string>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(gpu_sharing)

namespace {

std::string rejection(std::size_t local_rank, std::size_t local_world, std::size_t gpus,
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

BOOST_AUTO_TEST_CASE(more_ranks_than_gpus_are_rejected_unless_they_were_asked_for) {
  const std::string said = rejection(1, 3, 2, false);
  BOOST_TEST(said.find("rank 5, Device<Cuda>: 3 ranks on this host have 2 GPUs") !=
             std::string::npos);
  BOOST_TEST(said.find("LOCKSTEP_SHARE_GPUS=1") != std::string::npos);
  BOOST_TEST(rejection(0, 3, 2, false) == said);  // all ranks say it, not only the last
  BOOST_TEST(detail::gpu_index(Rank{2}, 2, 3, 2, true) == 0u);
  BOOST_TEST(detail::gpu_index(Rank{7}, 7, 8, 1, true) == 0u);
}

BOOST_AUTO_TEST_CASE(a_rank_takes_the_gpu_that_is_listed_for_it) {
  const std::vector<std::size_t> devices{4, 0, 2};
  for (std::size_t r = 0; r < 3; ++r)
    BOOST_TEST(detail::listed_gpu(Rank{r + 8}, r, devices, 5, false) == devices[r]);
  BOOST_TEST(detail::listed_gpu(Rank{1}, 1, {3, 3}, 4, true) == 3u);
  const auto says = [](const std::string& words) {
    return [words](const Error& error) {
      return std::string(error.what()).find(words) != std::string::npos;
    };
  };
  BOOST_CHECK_EXCEPTION(detail::listed_gpu(Rank{9}, 3, devices, 5, false), Error,
                        says("rank 9, Device<Cuda>: local rank 3 has no device: 3 are listed"));
  BOOST_CHECK_EXCEPTION(detail::listed_gpu(Rank{0}, 0, devices, 4, false), Error,
                        says("device 4 is wanted, and this process sees 4 GPUs"));
  BOOST_CHECK_EXCEPTION(detail::listed_gpu(Rank{0}, 0, devices, 0, false), Error,
                        says("this process sees 0 GPUs"));
  BOOST_CHECK_EXCEPTION(detail::listed_gpu(Rank{0}, 0, {3, 3}, 4, false), Error,
                        says("device 3 is listed twice"));
}

BOOST_AUTO_TEST_CASE(without_a_gpu_nothing_is_shared) {
  BOOST_TEST(rejection(0, 1, 0, true).find("this process sees no GPU") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(a_refusal_says_which_gpus_are_visible) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  BOOST_TEST(rejection(0, 1, 0, true).find("sees no GPU (CUDA_VISIBLE_DEVICES is empty); ") !=
             std::string::npos);
  ::setenv("CUDA_VISIBLE_DEVICES", "7", 1);
  BOOST_TEST(rejection(0, 1, 0, true).find("sees no GPU (CUDA_VISIBLE_DEVICES is 7); ") !=
             std::string::npos);
  ::setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
  BOOST_TEST(rejection(0, 3, 2, false).find("have 2 GPUs (CUDA_VISIBLE_DEVICES is 0,1); ") !=
             std::string::npos);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  BOOST_TEST(rejection(0, 3, 2, false).find("have 2 GPUs; ") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(ranks_that_each_see_one_gpu_share_nothing_if_the_gpus_differ) {
  // What Slurm's --gpus-per-task=1 shows to four tasks of two nodes.
  const std::vector<detail::GpuIdentity> gpus = {
      {"a", "GPU-1", "01"}, {"a", "GPU-2", "02"}, {"b", "GPU-3", "01"}, {"b", "GPU-4", "02"}};
  const detail::GpuSharing verdict(gpus);
  BOOST_TEST(!verdict.shared);
  BOOST_TEST(!verdict.is_one_host);
  for (std::size_t r = 0; r < 4; ++r) BOOST_TEST(!verdict.has_neighbour[r]);
  for (const bool may_share : {false, true})
    BOOST_CHECK_NO_THROW(detail::require_own_gpus(verdict, gpus, Rank{0}, may_share));
}

BOOST_AUTO_TEST_CASE(ranks_with_one_gpu_are_named_on_all_ranks_unless_they_may_share) {
  const std::vector<detail::GpuIdentity> gpus = {
      {"a", "GPU-1", "01"}, {"a", "GPU-2", "02"}, {"a", "GPU-2", "02"}, {"a", "GPU-1", "01"}};
  const detail::GpuSharing verdict(gpus);
  BOOST_TEST(verdict.is_one_host);
  BOOST_TEST_REQUIRE(verdict.shared.has_value());
  for (std::size_t r = 0; r < 4; ++r) {
    BOOST_TEST(verdict.has_neighbour[r]);
    std::string said;
    try {
      detail::require_own_gpus(verdict, gpus, Rank{r}, false);
    } catch (const Error& error) {
      said = error.what();
    }
    BOOST_TEST(said.find("ranks 1 and 2 have the same GPU, GPU-2") != std::string::npos);
    BOOST_TEST(said.find("LOCKSTEP_SHARE_GPUS=1") != std::string::npos);
    BOOST_CHECK_NO_THROW(detail::require_own_gpus(verdict, gpus, Rank{r}, true));
  }
}

BOOST_AUTO_TEST_CASE(slices_of_a_gpu_are_different_and_still_neighbours) {
  const detail::GpuSharing slices(
      {{"a", "MIG-1", "01"}, {"a", "MIG-2", "01"}, {"a", "GPU-3", "02"}});
  BOOST_TEST(!slices.shared);
  BOOST_TEST(slices.has_neighbour[0]);
  BOOST_TEST(slices.has_neighbour[1]);
  BOOST_TEST(!slices.has_neighbour[2]);
}

BOOST_AUTO_TEST_CASE(hosts_that_are_one_machine_share_for_nccl_only) {
  const detail::GpuSharing pretended({{"a", "GPU-1", "01"}, {"b", "GPU-1", "01"}});
  BOOST_TEST(!pretended.shared);
  BOOST_TEST(pretended.has_neighbour[0]);
  BOOST_TEST(pretended.has_neighbour[1]);
}

BOOST_AUTO_TEST_CASE(lists_of_devices_have_entries) {
  BOOST_TEST(detail::listed_entry("0,MIG-7,2", 1) == "MIG-7");
  BOOST_TEST(detail::listed_entry("0,MIG-7,2", 2) == "2");
  BOOST_TEST(detail::listed_entry("0,MIG-7,2", 3) == "");
  BOOST_TEST(detail::listed_entry("", 0) == "");
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
