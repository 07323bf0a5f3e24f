// SPDX-License-Identifier: Apache-2.0
// Ranks that compare their calls through the store, without a communicator.

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/comm/call/fault_channel.hpp"
#include "lockstep/detail/comm/call/peers.hpp"
#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/core/reduce_op.hpp"
#include "store/served.hpp"

using namespace lockstep;
using namespace lockstep::detail;
using namespace std::chrono_literals;

BOOST_AUTO_TEST_SUITE(call_log)

namespace {

const Call sum = calls::AllReduce<float, Sum>{{}, {}, 100}.call();
const Call average = calls::AllReduce<float, Average>{{}, {}, 100}.call();
const Call cast = calls::Broadcast<float>{{}, {}, 100, JobCall::none, Rank{1}}.call();

CallLog log_of(std::initializer_list<Call> calls) {
  CallLog log;
  for (const Call& call : calls) log.add(call);
  return log;
}

struct Boards : Served {
  std::shared_ptr<Store> shared = std::make_shared<Store>(another());
  FaultChannel first{shared, "world", Rank{0}};
  FaultChannel second{shared, "world", Rank{1}};
};

}  // namespace

BOOST_AUTO_TEST_CASE(equal_calls_have_equal_heads) {
  BOOST_TEST((log_of({sum, cast}).head() == log_of({sum, cast}).head()));
  BOOST_TEST((log_of({sum, cast}).head() != log_of({cast, sum}).head()));
  BOOST_TEST((log_of({sum}).head() != log_of({average}).head()));
  for (int field = 0; field < 4; ++field) {
    Call other = sum;
    if (field == 0) other.kind = CollectiveKind::reduce;
    if (field == 1) other.element = ElementKind::f64;
    if (field == 2) other.root = 3;
    if (field == 3) other.count = 101;
    BOOST_TEST((log_of({sum}).head() != log_of({other}).head()), "field " << field);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_tells_by_the_head_alone_whether_it_differs) {
  const CallLog rank0 = log_of({sum, sum, cast});
  BOOST_TEST((log_of({sum, sum, cast, sum}).differs(rank0.head()) == std::optional(false)));
  BOOST_TEST((log_of({sum, average, cast, sum}).differs(rank0.head()) == std::optional(true)));
  BOOST_TEST(!log_of({sum, average}).differs(rank0.head()), "it is behind and cannot tell");
  BOOST_TEST((CallLog{}.differs(Position{}) == std::optional(false)));
}

BOOST_AUTO_TEST_CASE(only_the_last_calls_are_kept_and_all_are_compared) {
  CallLog early;
  CallLog late;
  early.add(average);
  late.add(sum);
  for (std::size_t i = 0; i < CallLog::kept; ++i) {
    early.add(sum);
    late.add(sum);
  }
  BOOST_TEST((late.differs(early.head()) == std::optional(true)));
  BOOST_TEST(late.find(0) == nullptr);
  BOOST_TEST((*late.find(1) == sum));
  BOOST_TEST(late.first() == 1u);
  BOOST_TEST(!find_disagreement(late, early.bytes(), Rank{1}, Rank{0}),
             "the call is no longer kept");
  BOOST_TEST(!late.differs(log_of({sum}).head()), "too far ahead to tell");
}

BOOST_AUTO_TEST_CASE(a_broken_log_is_compared_as_far_as_it_goes) {
  const CallLog rank0 = log_of({sum, sum});
  const std::string bytes = log_of({average, cast}).bytes();
  BOOST_TEST(find_disagreement(rank0, bytes.substr(0, bytes.size() - 1), Rank{1}, Rank{0})
                 .value()
                 .operation() == "call 0");
  BOOST_TEST(!find_disagreement(rank0, bytes.substr(0, 20), Rank{1}, Rank{0}));
  BOOST_TEST(!find_disagreement(rank0, "", Rank{1}, Rank{0}));
}

BOOST_AUTO_TEST_CASE(a_disagreement_names_the_first_calls_that_differ) {
  const auto found = find_disagreement(log_of({sum, sum, cast}),
                                       log_of({sum, cast, cast, sum}).bytes(), Rank{2}, Rank{0});
  BOOST_TEST(found.value().operation() == "call 1");
  BOOST_TEST(found.value().problem() ==
             "ranks disagree: rank 0 called all_reduce(sum of 100 float) and rank 2 called "
             "broadcast(100 float, root 1)");
  BOOST_TEST(!find_disagreement(log_of({sum}), log_of({sum, cast}).bytes(), Rank{1}, Rank{0}),
             "one is only further ahead");
}

BOOST_AUTO_TEST_CASE(a_position_says_who_is_behind) {
  BOOST_TEST(position_text(Rank{1}, Position{4}, 5) == "rank 1 is in no call (made 4 of 5)");
  BOOST_TEST(position_text(Rank{2}, Position{5, 0, cast.text()}, 5) ==
             "rank 2 is in broadcast(100 float, root 1) (made 5)");
  BOOST_TEST(position_text(Rank{3}, std::nullopt, 5) == "rank 3 does not answer");
}

BOOST_FIXTURE_TEST_CASE(the_first_fault_counts_and_a_question_gives_way_to_it, Boards) {
  BOOST_TEST((first.notice().kind == Notice::Kind::none));
  second.ask();
  first.ask();
  BOOST_TEST((first.notice().kind == Notice::Kind::question));
  BOOST_TEST(second.fail("out of memory").reason == "out of memory");
  BOOST_TEST(first.fail("waited").reason == "out of memory");
  first.ask();
  const Notice notice = first.notice();
  BOOST_TEST((notice.kind == Notice::Kind::failed && notice.rank == Rank{1}));
}

BOOST_FIXTURE_TEST_CASE(heads_and_positions_are_read_as_they_were_written, Boards) {
  BOOST_TEST((second.head() == Position{}));
  const Position head = log_of({sum, cast}).head();
  first.set_head(head);
  BOOST_TEST((second.head() == head));
  BOOST_TEST(!first.positions(2)[1]);
  second.set_position({7, 0, "barrier()"});
  BOOST_TEST((first.positions(2)[1] == Position{7, 0, "barrier()"}));
  BOOST_TEST(!first.positions(2)[0]);
}

BOOST_FIXTURE_TEST_CASE(ranks_hear_of_notices_without_asking, Boards) {
  const auto news = first.watch();
  BOOST_TEST(!news->news());
  first.head();  // by its answer, the request that waits for news has arrived and is counted
  const std::uint64_t before = server.requests();
  for (int i = 0; i < 1000; ++i) BOOST_TEST_REQUIRE(!news->news());
  BOOST_TEST(server.requests() == before);
  const auto next = [&] {
    std::optional<std::string> bytes;
    while (!bytes) bytes = news->news();
    return Notice::from_bytes(*bytes);
  };
  second.ask();
  BOOST_TEST((next().kind == Notice::Kind::question));
  BOOST_TEST(!news->news());
  second.fail("no disk");
  const Notice fault = next();
  BOOST_TEST((fault.kind == Notice::Kind::failed));
  BOOST_TEST(fault.reason == "no disk");
}

BOOST_FIXTURE_TEST_CASE(all_ranks_name_the_same_pair_of_calls, Boards) {
  const CallLog rank0 = log_of({sum, sum});
  const CallLog rank1 = log_of({sum, average, cast});
  first.set_head(rank0.head());
  BOOST_TEST((rank1.differs(second.head()) == std::optional(true)));
  BOOST_TEST((second.differ(rank1).kind == Notice::Kind::differs));
  const Notice notice = first.notice();
  std::string there;
  std::jthread waiting([&] { there = second.disagreement(rank1, notice.rank, 5s).problem(); });
  const Error here = first.disagreement(rank0, notice.rank, 5s);
  waiting.join();
  BOOST_TEST(here.operation() == "call 1");
  BOOST_TEST(here.problem() ==
             "ranks disagree: rank 0 called all_reduce(sum of 100 float) and rank 1 called "
             "all_reduce(average of 100 float)");
  BOOST_TEST(there == here.problem());
}

BOOST_FIXTURE_TEST_CASE(two_communicators_do_not_see_each_others_notices, Boards) {
  const FaultChannel group{shared, "world/0", Rank{0}};
  group.fail("gone");
  BOOST_TEST((first.notice().kind == Notice::Kind::none));
}

namespace {

/// Rank 0's view of ranks that have said these words, if any.
struct Seen {
  std::vector<std::string> said;

  Rank rank() const { return Rank{0}; }
  std::size_t world() const { return said.size(); }
  bool has_left(std::size_t w) const { return !said[w].empty(); }
  bool has_died(std::size_t) const { return false; }
  std::string abort_reason(std::size_t w) const { return said[w]; }
  static constexpr const char* how_died() { return "'s process ended"; }
};

std::string fault_of(const Seen& seen) {
  const auto fault = find_culprit(seen, sum.text(), [](std::size_t) { return true; });
  return fault ? fault->problem() : "";
}

}  // namespace

// The rank that an exception ended has heard of the other's failure in a group of the two.
BOOST_AUTO_TEST_CASE(a_rank_that_gives_a_reason_comes_before_one_that_an_exception_ended) {
  const std::string ended = ended_by_exception;
  BOOST_TEST(fault_of({{"", "", ""}}) == "");
  BOOST_TEST(fault_of({{"", ended, "out of luck"}}) == "rank 2 failed: out of luck");
  BOOST_TEST(fault_of({{"", "out of luck", ended}}) == "rank 1 failed: out of luck");
  BOOST_TEST(fault_of({{"", "", ended}}) == "rank 2 failed: " + ended);
  const std::string also = because_of_another + std::string("rank 2 failed");
  BOOST_TEST(fault_of({{"", also, "out of luck"}}) == "rank 2 failed: out of luck");
}

BOOST_AUTO_TEST_SUITE_END()
