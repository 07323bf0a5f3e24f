// SPDX-License-Identifier: Apache-2.0
// Every case of ddp.json again, through sockets: Gloo among all ranks, and between hosts.
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/gloo_ranks.hpp"
#include "lockstep/gloo.hpp"
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
      run_by_steps<ranks::PlayedHosts, SmallBuckets, Backend<Hierarchical<Shm, Gloo>>>);
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
