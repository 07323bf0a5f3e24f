// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json again, through sockets: Gloo among all ranks, and between hosts.
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/gloo_ranks.hpp"
#include "data/fed.hpp"
#include "lockstep/gloo.hpp"
#include "train/join.hpp"
#include "train/parity.hpp"

BOOST_AUTO_TEST_SUITE(gloo_parity)

namespace {

using namespace parity;

}  // namespace

BOOST_AUTO_TEST_CASE(gloo_trains_as_pytorch_does) {
  check_every_case(run_by_steps<ranks::Sockets, SmallBuckets, Backend<Gloo>>);
}

BOOST_AUTO_TEST_CASE(a_hierarchy_trains_as_pytorch_does) {
  check_every_case(
      run_by_steps<ranks::EmulatedHosts, SmallBuckets, Backend<Hierarchical<Shm, Gloo>>>);
}

// Exhausted ranks before others: one way to divide through each of the two.
BOOST_AUTO_TEST_CASE(ranks_with_different_numbers_of_batches_train_as_in_pytorch) {
  const std::size_t live = joining::train_cases<ranks::Sockets, true, Backend<Gloo>>();
  const std::size_t initial =
      joining::train_cases<ranks::EmulatedHosts, false, Backend<Hierarchical<Shm, Gloo>>>();
  BOOST_TEST(live + initial == reference("join.json").size());
}

BOOST_AUTO_TEST_CASE(groups_of_a_job_meet_through_sockets) {
  const auto sums = [](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    detail::JobGroups<Grid<4, 2>, Comm> groups(comm);
    const std::size_t me = comm.rank().value();
    ranks::require(groups.group().all_reduce(me) == (me < 2 ? 1u : 5u), "the sum in the group");
    ranks::require(groups.across().all_reduce(me) == 2 + 2 * (me % 2), "the sum across groups");
  };
  for (const Ends& ends :
       {ranks::run_processes<ranks::Sockets>(4, std::chrono::seconds(20), sums),
        ranks::run_processes<ranks::EmulatedHosts>(4, std::chrono::seconds(20), sums)}) {
    for (std::size_t r = 0; r < ends.size(); ++r)
      BOOST_TEST(ends[r] == "", "rank " << r << ": " << ends[r]);
  }
}

BOOST_AUTO_TEST_CASE(ranks_are_fed_through_sockets) {
  const auto feed = [](auto& comm) {
    fed::check<DistributedSampler<Masked, TorchShuffle>>(comm, {{7, 29}});
  };
  for (const Ends& ends :
       {ranks::run_processes<ranks::Sockets>(4, std::chrono::seconds(20), feed),
        ranks::run_processes<ranks::EmulatedHosts>(4, std::chrono::seconds(20), feed)}) {
    for (std::size_t r = 0; r < ends.size(); ++r)
      BOOST_TEST(ends[r] == "", "rank " << r << ": " << ends[r]);
  }
}

// From a job's policies to its communicator, as a trainer does it.
BOOST_AUTO_TEST_CASE(policies_lead_to_communicators) {
  const auto sum_ranks = []<class... Ps>(const Membership& member) {
    setenv("LOCKSTEP_HOST", std::to_string(member.rank.value() % 2).c_str(), 1);
    Session session(member, Store(member.host, member.port, member.secret, member.timeout));
    auto comm = detail::make_communicator<CanonicalPolicies<Ps...>>(session);
    std::vector<std::size_t> sum(5, member.rank.value());
    comm.all_reduce(sum);
    detail::check(sum[4] == 0 + 1 + 2 + 3, "the sum is wrong");
  };
  BOOST_CHECK_NO_THROW(spawn<4>(AsProcesses{}, [&](const Membership& member, Store&) {
    sum_ranks.operator()<Backend<Gloo>, World<4>>(member);
  }));
  BOOST_CHECK_NO_THROW(spawn<4>(AsProcesses{}, [&](const Membership& member, Store&) {
    sum_ranks.operator()<Backend<Hierarchical<Shm, Gloo>>, World<4>>(member);
  }));
  BOOST_CHECK_EXCEPTION(spawn<2>(AsProcesses{},
                                 [&](const Membership& member, Store&) {
                                   sum_ranks.operator()<Backend<Gloo>, World<4>>(member);
                                 }),
                        Error, [](const Error& error) {
                          return std::string(error.what()).find("for 4 ranks and the job has 2") !=
                                 std::string::npos;
                        });
}

BOOST_AUTO_TEST_CASE(process_groups_of_several_backends_live_side_by_side) {
  BOOST_CHECK_NO_THROW(spawn<4>(AsProcesses{}, [](const Membership& member, Store&) {
    Session session(member, Store(member.host, member.port, member.secret, member.timeout));
    ProcessGroup<Backend<Gloo>> group(session);
    ProcessGroup beside(session);
    detail::check(group->all_reduce(1) == 4 && beside->all_reduce(1) == 4, "a sum is wrong");
    auto shared = new_group<Backend<Shm>>(group, {Rank{3}, Rank{1}});
    auto sockets = new_group<Backend<Gloo>>(beside, {Rank{0}, Rank{3}, Rank{2}});
    if (shared) detail::check(shared->all_reduce(1) == 2, "the sum in shared memory is wrong");
    if (sockets) {
      detail::check(sockets->all_reduce(1) == 3, "the sum through sockets is wrong");
      detail::check(sockets->broadcast(member.rank.value(), Rank{1}) == 3, "the order is wrong");
    }
    setenv("LOCKSTEP_HOST", std::to_string(member.rank.value() / 2).c_str(), 1);
    ProcessGroup<Backend<Hierarchical<Shm, Gloo>>> hosts(session);
    auto three = new_group(hosts, {Rank{0}, Rank{1}, Rank{3}});
    if (three) detail::check(three->all_reduce(1.5) == 4.5, "the sum of a hierarchy is wrong");
  }));
}

BOOST_AUTO_TEST_SUITE_END()
