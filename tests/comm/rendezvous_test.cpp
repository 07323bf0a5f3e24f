// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads of one process exchange, notice who disagrees, hangs, gives up or goes,
// and never touch the memory of one that has gone.
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "exercise.hpp"
#include "lockstep/detail/comm/threads/rendezvous.hpp"
#include "participants.hpp"
#include "repeat.hpp"

using namespace participants;
using ranks::expect_all_fine;
using ranks::expect_words;
using ranks::nobody;
using ranks::repetitions;
using ranks::require;

namespace {

constexpr std::size_t worlds[] = {1, 2, 4, 8};

Call sum_of(std::size_t count) { return calls::AllReduce<int, Sum>{{}, {}, count}.call(); }

/// Every rank's out = the sum of all ints.
void add_up(std::span<const CallArguments> arguments) {
  int sum = 0;
  for (const CallArguments& arguments : arguments) sum += *static_cast<const int*>(arguments.in);
  for (const CallArguments& arguments : arguments) *static_cast<int*>(arguments.out) = sum;
}

void meet_empty(RankHandle& handle) {
  handle.rendezvous(Call{}, CallArguments{}, [](auto) {});
}

}  // namespace

BOOST_AUTO_TEST_SUITE(rendezvous)

BOOST_AUTO_TEST_CASE(every_rank_sees_what_all_have_brought_round_after_round) {
  for (std::size_t world : worlds) {
    const int rounds = repetitions(static_cast<int>(4000 / world), 1'000'000);
    expect_all_fine(run(world, [&](RankHandle& handle) {
      const int me = static_cast<int>(handle.rank().value());
      const int n = static_cast<int>(handle.world());
      for (int round = 0; round < rounds; ++round) {
        const int in = me + round;
        int out = -1;
        handle.rendezvous(sum_of(1), CallArguments{&in, &out, nullptr, true}, add_up);
        require(out == n * (n - 1) / 2 + n * round, "round " + std::to_string(round));
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(calls_are_announced_ahead_and_waited_for_in_any_order) {
  for (std::size_t world : worlds) {
    expect_all_fine(run(world, [&](RankHandle& handle) {
      constexpr std::size_t ahead = 3 * threads::ring;
      std::vector<int> in(ahead);
      std::vector<int> out(ahead, -1);
      std::vector<std::uint64_t> tickets;
      for (std::size_t i = 0; i < ahead; ++i) {
        in[i] = static_cast<int>(i);
        tickets.push_back(handle.announce(
            sum_of(1), [&](std::uint64_t) { return CallArguments{&in[i], &out[i], nullptr, true}; },
            [](std::span<const CallArguments> arguments, std::uint64_t) { add_up(arguments); }));
      }
      for (std::size_t i = ahead; i-- > 0;) {
        handle.wait(tickets[i], sum_of(1));
        require(handle.is_done(tickets[i]), "waited for and not done");
        require(out[i] == static_cast<int>(i * world), "call " + std::to_string(i));
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_an_error_on_all_ranks_before_any_work) {
  for (int i = 0; i < repetitions(20, 500); ++i) {
    std::atomic<int> worked = 0;
    const Ends ends = run(4, [&](RankHandle& handle) {
      meet_empty(handle);
      handle.rendezvous(sum_of(handle.rank() == Rank{2} ? 7 : 8), CallArguments{},
                        [&](auto) { ++worked; });
    });
    expect_words(ends, nobody,
                 {"call 1: ranks disagree: rank 0 called all_reduce(sum of 8 int32)",
                  "and rank 2 called all_reduce(sum of 7 int32)"});
    BOOST_TEST(worked == 0);
  }
  expect_words(run(2,
                   [](RankHandle& handle) {
                     CallArguments arguments;
                     arguments.on_host = handle.rank() == Rank{1};
                     handle.rendezvous(sum_of(8), arguments, [](auto) {});
                   }),
               nobody,
               {"rank 0 called all_reduce(sum of 8 int32) in device memory and rank 1 called "
                "all_reduce(sum of 8 int32) in host memory"});
}

BOOST_AUTO_TEST_CASE(missing_ranks_are_named_within_the_limit) {
  std::atomic<int> waiting = 2;
  const Ends ends = run(
      4,
      [&](RankHandle& handle) {
        meet_empty(handle);
        if (handle.rank().value() % 2 == 0) {
          try {
            meet_empty(handle);
          } catch (...) {
            --waiting;
            throw;
          }
        }
        while (waiting > 0) std::this_thread::sleep_for(1ms);
      },
      300ms);
  // One of the two may learn it from the other.
  const std::string words =
      "barrier(): waited 300 ms for rank 1 (made 1 of 2 calls), rank 3 (made 1 of 2 calls); see "
      "whether it hangs, or raise the time limit";
  for (std::size_t r : {0, 2}) {
    BOOST_TEST(ends[r].find(words) != std::string::npos, "rank " << r << " said: " << ends[r]);
  }
}

BOOST_AUTO_TEST_CASE(a_rank_that_never_comes_is_named) {
  const auto rendezvous = std::make_shared<Rendezvous>(WorldSize{2});
  const Ends ends = run_threads(1, [&](Rank rank) {
    RankHandle handle(rendezvous, rank, 100ms);
    meet_empty(handle);
  });
  expect_words(ends, nobody, {"rank 0, barrier(): waited 100 ms for rank 1 (never joined)"});
}

BOOST_AUTO_TEST_CASE(a_reason_to_give_up_reaches_all) {
  for (std::size_t world : {2, 4, 8}) {
    const Ends ends = run(world, [&](RankHandle& handle) {
      meet_empty(handle);
      if (handle.rank() == Rank{1}) {
        handle.abort("the disk is full");
        meet_empty(handle);
      } else {
        meet_empty(handle);
      }
    });
    expect_words(ends, 1, {"barrier(): rank 1 failed: the disk is full; look at that rank first"});
    BOOST_TEST(ends[1].find("this rank gave it up: the disk is full") != std::string::npos);
  }
}

// Who waits until the time limit says so, in other words.
BOOST_AUTO_TEST_CASE(a_rank_that_goes_is_noticed_at_once_and_named_by_all) {
  for (int i = 0; i < repetitions(10, 200); ++i) {
    const Ends ends = run(4, [](RankHandle& handle) {
      if (handle.rank() != Rank{2}) meet_empty(handle);
    });
    expect_words(ends, 2, {"barrier(): rank 2 closed its communicator without this call"});
    const Ends thrown = run(4, [](RankHandle& handle) {
      if (handle.rank() == Rank{0}) throw std::runtime_error("out of luck");
      meet_empty(handle);
    });
    BOOST_TEST(thrown[0] == "out of luck");
    expect_words(thrown, 0, {"barrier(): rank 0 failed: it ended with an exception"});
  }
}

BOOST_AUTO_TEST_CASE(whoever_has_done_its_calls_may_go) {
  for (int i = 0; i < repetitions(50, 1000); ++i) expect_all_fine(run(4, meet_empty));
}

BOOST_AUTO_TEST_CASE(work_that_fails_fails_on_all_ranks) {
  const Ends ends = run(4, [](RankHandle& handle) {
    handle.rendezvous(Call{}, CallArguments{},
                      [](auto) { throw std::runtime_error("the launch failed"); });
  });
  int own = 0;
  for (const std::string& end : ends) own += end == "the launch failed" ? 1 : 0;
  BOOST_TEST(own == 1);
  for (const std::string& end : ends) {
    BOOST_TEST(end.find("the launch failed") != std::string::npos, end);
  }
}

BOOST_AUTO_TEST_CASE(the_memory_of_a_rank_that_has_given_up_is_not_touched) {
  std::atomic<bool> gave_up = false;
  std::atomic<bool> worked = false;
  const auto rendezvous = std::make_shared<Rendezvous>(WorldSize{2});
  const Ends ends = run_threads(2, [&](Rank rank) {
    RankHandle handle(rendezvous, rank, rank == Rank{0} ? 50ms : 20000ms);
    if (rank == Rank{1}) {
      while (!gave_up) std::this_thread::yield();
    }
    try {
      handle.rendezvous(sum_of(1), CallArguments{}, [&](auto) { worked = true; });
    } catch (...) {
      gave_up = true;
      throw;
    }
  });
  BOOST_TEST(!worked);
  expect_words(ends, 0, {"rank 0 failed", "waited 50 ms for rank 1 (made 0 of 1 calls)"});
}

BOOST_AUTO_TEST_CASE(a_failed_rendezvous_is_as_new_once_it_is_restored) {
  const auto calls = std::make_shared<Rendezvous>(WorldSize{4});
  const auto barrier = std::make_shared<Rendezvous>(WorldSize{4});
  expect_all_fine(run_threads(4, [&](Rank rank) {
    RankHandle at_gate(barrier, rank, 20s);
    RankHandle handle(calls, rank, 20s);
    for (int round = 0; round < 50; ++round) {
      std::string fault;
      try {
        meet_empty(handle);
        if (rank == Rank{3}) handle.abort("no luck in round " + std::to_string(round));
        meet_empty(handle);
      } catch (const Error& error) {
        fault = error.what();
      }
      require(!fault.empty(), "the second call went through");
      at_gate.rendezvous(Call{}, CallArguments{}, [&](auto) { calls->restore(); });
      meet_empty(handle);
    }
  }));
}

BOOST_AUTO_TEST_CASE(ranks_take_turns_and_pass_them_on_while_they_wait) {
  std::mutex turns;
  int counted = 0;  // by whoever has the turn
  expect_all_fine(run(4, [&](RankHandle& handle) {
    const std::lock_guard turn(turns);
    handle.take_turns(&turns);
    for (int round = 0; round < 200; ++round) {
      ++counted;
      meet_empty(handle);
    }
    handle.take_turns(nullptr);
  }));
  BOOST_TEST(counted == 800);
}

BOOST_AUTO_TEST_CASE(a_seat_is_taken_once) {
  const auto rendezvous = std::make_shared<Rendezvous>(WorldSize{2});
  const RankHandle first(rendezvous, Rank{1}, 1s);
  BOOST_CHECK_EXCEPTION(RankHandle(rendezvous, Rank{1}, 1s), Error, [](const Error& error) {
    return std::string(error.what()).find("another thread has joined as rank 1") !=
           std::string::npos;
  });
}

BOOST_AUTO_TEST_SUITE_END()

BOOST_AUTO_TEST_SUITE(mail)

namespace {

Call message_to(Rank to, std::size_t count) {
  return calls::Send<int>{{}, {}, count, JobCall::none, to}.call();
}

void send(RankHandle& handle, int value, Rank to, std::size_t count = 1) {
  handle.send(message_to(to, count), CallArguments{&value, nullptr, nullptr, true}, to);
}

int receive(RankHandle& handle, Rank from, bool on_host = true) {
  int value = -1;
  handle.receive(calls::Receive<int>{{}, {}, 1, JobCall::none, from}.call(), on_host, from,
                 [&](const CallArguments& arguments) {
                   value = *static_cast<const int*>(arguments.in);
                   return nullptr;
                 });
  return value;
}

}  // namespace

BOOST_AUTO_TEST_CASE(messages_arrive_in_the_order_of_sending) {
  for (std::size_t world : {2, 4, 8}) {
    expect_all_fine(run(world, [&](RankHandle& handle) {
      const std::size_t me = handle.rank().value();
      const Rank right{(me + 1) % world};
      const Rank left{(me + world - 1) % world};
      for (int i = 0; i < 200; ++i) {
        if (me % 2 == 0) send(handle, 1000 * static_cast<int>(me) + i, right);
        require(receive(handle, left) == 1000 * static_cast<int>(left.value()) + i, "a value");
        if (me % 2 != 0) send(handle, 1000 * static_cast<int>(me) + i, right);
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(messages_that_do_not_fit_are_an_error_on_both_sides) {
  expect_words(run(2,
                   [&](RankHandle& handle) {
                     if (handle.rank() == Rank{0}) send(handle, 1, Rank{1}, 2);
                     if (handle.rank() == Rank{1}) receive(handle, Rank{0});
                   }),
               nobody, {"receive(1 int32, from rank 0): rank 0 sends send(2 int32, to rank 1)"});
  expect_words(run(2,
                   [&](RankHandle& handle) {
                     if (handle.rank() == Rank{0}) send(handle, 1, Rank{1});
                     if (handle.rank() == Rank{1}) receive(handle, Rank{0}, false);
                   }),
               nobody, {"rank 0 sends send(1 int32, to rank 1) in host memory"});
}

BOOST_AUTO_TEST_CASE(a_sender_or_receiver_that_has_gone_is_named) {
  expect_words(run(3,
                   [&](RankHandle& handle) {
                     if (handle.rank() == Rank{0}) send(handle, 1, Rank{2});
                     if (handle.rank() == Rank{1}) receive(handle, Rank{2});
                   }),
               2, {"rank 2 closed its communicator without this call"});
}

BOOST_AUTO_TEST_SUITE_END()
