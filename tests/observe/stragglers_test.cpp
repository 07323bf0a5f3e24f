// SPDX-License-Identifier: Apache-2.0
// Who is named as the rank for which the others wait, while a job runs.

#include "lockstep/detail/observe/stragglers.hpp"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/comm.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/trainer.hpp"

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;

BOOST_AUTO_TEST_SUITE(stragglers)

namespace {

std::optional<Rank> found(const std::vector<double>& shares) {
  const auto straggler = find_straggler(shares);
  return straggler ? std::optional(straggler->rank) : std::nullopt;
}

}  // namespace

BOOST_AUTO_TEST_CASE(the_rank_that_does_not_wait_while_all_others_do_is_one) {
  BOOST_TEST((found({0.3, 0.3, 0.01, 0.3}) == Rank{2}));
  BOOST_TEST((found({0.0, 0.2}) == Rank{0}));
  BOOST_TEST(find_straggler(std::vector<double>{0.5, 0.1})->share == 0.4);
}

BOOST_AUTO_TEST_CASE(short_waits_and_ranks_that_take_turns_are_none) {
  BOOST_TEST(!found({0.1, 0.1, 0.0, 0.1}));
  BOOST_TEST(!found({0.4, 0.4, 0.2, 0.4}));
  BOOST_TEST(!found({0.5}));
  BOOST_TEST(!found({}));
}

BOOST_AUTO_TEST_CASE(overlapping_waits_count_once_and_those_before_do_not) {
  constexpr Rank unused{78};
  FlightRecorder recorder("shm", GroupMember{"world", Rank{0}, WorldSize{2}, unused});
  FlightRecorder other("gloo", GroupMember{"hosts", Rank{0}, WorldSize{2}, unused});
  const Call call = calls::AllReduce<float, Sum>{{}, {}, 1}.call();
  recorder.start(recorder.schedule(call));
  const std::uint64_t since = ticks_now();
  const std::uint64_t first = recorder.schedule(call);
  const std::uint64_t second = other.schedule(call);
  std::this_thread::sleep_for(60ms);
  recorder.start(first);
  other.start(second);
  recorder.schedule(call);  // nobody has come yet
  BOOST_TEST(waiting_share(unused, since) > 0.8);
  BOOST_TEST(waiting_share(unused, since) <= 1.0);
  BOOST_TEST(waiting_share(unused, ticks_now()) == 0.0);
  BOOST_TEST(waiting_share(Rank{79}, since) == 0.0);
}

BOOST_AUTO_TEST_CASE(rank_0_names_the_slow_rank_once) {
  for (const std::size_t slow : {0, 2}) {
    std::vector<std::string> lines;
    spawn<3>([&](const Membership& member, Store& store) {
      Session session(member, store.share());
      auto comm = make_shm_communicator(member, store);
      StragglerWatch watch(session, 100ms);
      for (int step = 0; step != 60; ++step) {
        if (session.rank() == Rank{slow}) std::this_thread::sleep_for(15ms);
        comm.barrier();
        const std::string line = watch.look(session);
        if (line.empty()) continue;
        if (session.rank() != Rank{0}) throw std::runtime_error("rank 0 alone has a line");
        lines.push_back(line);
      }
    });
    BOOST_TEST_REQUIRE(lines.size() == 1u);
    BOOST_TEST(lines[0].starts_with(text({"rank ", slow, " is slow: the others wait for it in "})));
  }
}

BOOST_AUTO_TEST_SUITE_END()
