// SPDX-License-Identifier: Apache-2.0
// Ranks with different numbers of batches, and a job's groups, on several GPUs that the host plays.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <set>
#include <type_traits>

#include "gpu/emulated/machine.hpp"
#include "gpu/join_case.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/trainer/cuda.cuh"

BOOST_AUTO_TEST_SUITE(gpu_played_join)

namespace {

using namespace lockstep;

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_that_are_through_train_as_in_pytorch) {
  std::set<std::size_t> worlds;
  for (const nlohmann::json& c : reference("join.json"))
    worlds.insert(c.at("world").get<std::size_t>());
  for (const std::size_t world : worlds) {
    const emulated::Machine machine(2);
    thread_ranks::expect_all_fine(thread_ranks::run(world, [](auto& comm) {
      joining::train_cases_of_world<>(comm);
      // A norm that clips nothing: the numbers of a step are decided on the GPU.
      joining::train_cases_of_world<Clip<1e9>>(comm);
    }));
  }
}

BOOST_AUTO_TEST_CASE(groups_of_a_job_share_its_gpus) {
  const emulated::Machine machine(4);
  thread_ranks::expect_all_fine(thread_ranks::run(4, [](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    detail::JobGroups<Grid<dynamic, 2>, Comm> groups(comm);
    static_assert(std::is_same_v<decltype(groups.group()), ThreadCommunicator<2>&>);
    const std::size_t me = comm.rank().value();
    thread_ranks::require(groups.group().gpu().index() == comm.gpu().index(), "another GPU");
    thread_ranks::require(groups.group().all_reduce(me) == (me < 2 ? 1u : 5u), "in the group");
    thread_ranks::require(groups.across().all_reduce(me) == 2 + 2 * (me % 2), "across groups");
  }));
}

BOOST_AUTO_TEST_SUITE_END()
