// SPDX-License-Identifier: Apache-2.0
// What goes wrong on one rank ends all of them, with its words. run_processes is the watchdog.
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>

#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(training_faults)

namespace {

using namespace train;
using namespace std::chrono_literals;
using Trouble = Entry::Trouble;
using Net = Sheet<>;

template <class... Ps>
Ends run_with(Trouble trouble, std::size_t world, std::size_t culprit, As as = As::processes) {
  return ranks::run(as, world, [&](Shared& comm) {
    DistributedDataParallel<Net, Ps...> ddp(comm);
    for (std::size_t s = 0; s < 4; ++s) {
      Entry entry{.gradient = {1, 1, 1}};
      if (s == 2 && comm.rank() == Rank{culprit}) entry.trouble = trouble;
      ddp.step(entry);
    }
  });
}

/// The culprit throws what it threw; the others quote it.
void check(const Ends& ends, std::size_t culprit, const std::string& words) {
  all_say(ends, words);
  const std::string quote = "rank " + std::to_string(culprit) + " failed: ";
  for (std::size_t r = 0; r < ends.size(); ++r) {
    BOOST_TEST((ends[r].find(quote) != std::string::npos) == (r != culprit), ends[r]);
  }
}

using Pieces = Buckets<BucketLimits{0, 0}>;

/// Gradients that are too large to travel with the call: every rank has a part in reducing them.
struct Wide {
  using Parameters = ParameterList<Parameter<"a", float, 100000>, Parameter<"b", float, 100000>>;
  double forward(auto&, int) { return 0; }
  void backward(auto& step, int) {
    step.ready("b"_p);
    step.ready("a"_p);
  }
};

/// One bit of one rank's parameter b is flipped after the second step.
template <class... Ps>
Ends run_flipped(std::size_t world, std::size_t culprit) {
  return ranks::run(As::processes, world, [&](Shared& comm) {
    DistributedDataParallel<Net, Ps...> ddp(comm);
    for (std::size_t s = 0; s < 4; ++s) {
      ddp.step(Entry{.gradient = {1, 1, 1}});
      if (s == 1 && comm.rank() == Rank{culprit}) {
        const auto* const value = ddp.param("b"_p).data_handle();
        *const_cast<char*>(reinterpret_cast<const char*>(value)) ^= 1;
      }
      ddp.check_replicas();
    }
  });
}

/// Trains with one bad batch, in the third step of one rank.
template <class... Ps>
Ends run_bad(const Entry& bad, std::size_t world, std::size_t culprit) {
  return ranks::run(As::processes, world, [&](Shared& comm) {
    LoopbackCommunicator alone;
    using Ddp = DistributedDataParallel<Net, Ps...>;
    constexpr bool has_ranks = std::is_constructible_v<Ddp, Shared&>;
    Ddp ddp([&]() -> auto& {
      if constexpr (has_ranks) {
        return comm;
      } else {
        return alone;
      }
    }());
    for (std::size_t s = 0; s < 5; ++s)
      ddp.step(s == 2 && comm.rank() == Rank{culprit} ? bad : Entry{.gradient = {1, 1, 1}});
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(an_exception_in_forward_reaches_all_ranks) {
  const std::string words = "forward ran out of luck";
  check(run_with<>(Trouble::in_forward, 3, 1), 1, words);
  check(run_with<Sharding<Replicated>, Pieces>(Trouble::in_forward, 2, 0), 0, words);
}

BOOST_AUTO_TEST_CASE(an_exception_in_backward_reaches_all_ranks) {
  const std::string words = "backward ran out of luck";
  check(run_with<>(Trouble::in_backward, 3, 2), 2, words);
  // Two buckets are under way when it is thrown.
  check(run_with<Sharding<Replicated>, Pieces>(Trouble::in_backward, 3, 1), 1, words);
  check(run_with<Sharding<Replicated>, Pieces>(Trouble::in_backward, 2, 1, As::threads), 1, words);
}

BOOST_AUTO_TEST_CASE(a_gradient_that_is_ready_twice_is_named) {
  const std::string words = "the gradient of b was marked ready twice";
  check(run_with<>(Trouble::ready_twice, 2, 1), 1, words);
  check(run_with<Sharding<Replicated>, Pieces>(Trouble::ready_twice, 3, 0), 0, words);
}

BOOST_AUTO_TEST_CASE(parameters_that_differ_between_ranks_are_named) {
  for (const std::size_t culprit : {0, 2}) {
    const Ends ends = run_flipped<Sharding<Replicated>>(3, culprit);
    all_say(ends, "ranks have different parameters: rank 0 has \"parameter b with hash ");
    all_say(ends, culprit == 0 ? "\" and rank 1 has \"" : "\" and rank 2 has \"");
  }
  for (const std::string& end : run_flipped<Sharding<Replicated>>(2, 5))
    BOOST_TEST(end.empty(), end);
}

BOOST_AUTO_TEST_CASE(something_thrown_that_is_no_exception_reaches_the_others) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    DistributedDataParallel<Net> ddp(comm);
    Entry entry{.gradient = {1, 1, 1}};
    if (comm.rank() == Rank{1}) entry.trouble = Trouble::no_exception;
    try {
      ddp.step(entry);
    } catch (int thrown) {
      throw std::runtime_error("an exception that is no std::exception: " + std::to_string(thrown));
    }
  });
  check(ends, 1, "an exception that is no std::exception");
}

BOOST_AUTO_TEST_CASE(an_exception_while_initializing_reaches_all_ranks) {
  const Ends ends = ranks::run(As::processes, 3, [](Shared& comm) {
    DistributedDataParallel<Net> ddp(comm);
    ddp.initialize([](auto&) { throw std::runtime_error("no values today"); });
  });
  check(ends, 0, "no values today");
}

BOOST_AUTO_TEST_CASE(an_exception_between_phases_is_the_programs_own_although_a_peer_has_gone) {
  const Ends ends = ranks::run_processes(2, 20s, [](Shared& comm) {
    std::string caught;
    {
      DistributedDataParallel<Wide, Sharding<Replicated>, Pieces> ddp(comm);
      try {
        const int batch = 0;
        [[maybe_unused]] const auto backwarded = ddp.forward(batch).backward();
        if (comm.rank() == Rank{1}) _exit(0);
        std::this_thread::sleep_for(300ms);  // buckets are under way, and nobody answers any more
        throw std::runtime_error("words of the program's own");
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
    }
    throw std::runtime_error("caught " + caught);
  });
  BOOST_TEST(ends[0] == "caught words of the program's own");
  BOOST_TEST(ends[1] == "");
}

BOOST_AUTO_TEST_CASE(a_schedule_without_its_numbers_is_an_error_on_all_ranks) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& comm) {
    DistributedDataParallel<Net, Schedule<Cosine>> ddp(comm);
    ddp.step(Entry{});
  });
  all_say(ends, "the curve has 0 steps");
}

BOOST_AUTO_TEST_CASE(a_gradient_that_is_not_finite_stops_all_ranks_and_names_its_own) {
  const auto all_name = [](const Ends& ends, const std::string& what, const std::string& whose) {
    all_say(ends, what);
    all_say(ends, whose + "; lower the learning rate");
  };
  const Entry bad{.gradient = {1, NAN, 1}};
  const std::string b = "step 3: the gradient of b is nan at element ";
  all_name(run_bad<>(bad, 3, 1), b, ", of rank 1");
  all_name(run_bad<UnusedParameters<Zero>>(bad, 2, 1), b, ", of rank 1");
  all_name(run_bad<>({.gradient = {INFINITY, 1, 1}}, 4, 3),
           "step 3: the gradient of a is inf at element ", ", of rank 3");
  const std::string average = ", as the average over ranks";
  all_name(run_bad<Sharding<Replicated>, Pieces>(bad, 3, 1), b, average);
  all_name(run_bad<Clip<1.0>>(bad, 2, 0), b, average);
  all_say(run_bad<World<1>>(bad, 1, 0), b + "0; lower the learning rate");
  all_say(run_bad<Accumulate<3>>(bad, 2, 0), "step 1: the gradient of b is nan at element ");
}

BOOST_AUTO_TEST_CASE(a_loss_that_is_not_finite_stops_all_ranks) {
  const Entry bad{.gradient = {1, 1, 1}, .loss = -INFINITY};
  check(run_bad<>(bad, 3, 1), 1, "rank 1, step 3: the loss is -inf");
  check(run_bad<Sharding<Replicated>>(bad, 2, 0), 0, "rank 0, step 3: the loss is -inf");
  const Ends phases = ranks::run(As::processes, 2, [&](Shared& comm) {
    DistributedDataParallel<Net> ddp(comm);
    const Entry good{.gradient = {1, 1, 1}};
    ddp.forward(good).backward().reduce().update();
    ddp.forward(comm.rank() == Rank{1} ? bad : good).backward().reduce().update();
  });
  check(phases, 1, "rank 1, step 2: the loss is -inf");
}

BOOST_AUTO_TEST_CASE(a_helper_thread_stops_for_a_gradient_that_is_not_finite) {
  const Ends ends = ranks::run(As::processes, 2, [](Shared& shared) {
    auto comm = join_again<HelperThread>(shared);
    DistributedDataParallel<Net, Progress<HelperThread>> ddp(comm);
    for (std::size_t s = 0; s < 5; ++s)
      ddp.step(Entry{.gradient = {1, s == 2 && comm.rank() == Rank{1} ? NAN : 1.0, 1}});
  });
  all_say(ends, "step 3: the gradient of b is nan at element ");
}

BOOST_AUTO_TEST_CASE(anomalies_that_are_ignored_go_on) {
  for (const std::string& end : run_bad<Anomaly<Ignore>>({.gradient = {1, NAN, 1}}, 2, 1))
    BOOST_TEST(end == "");
}

BOOST_AUTO_TEST_SUITE_END()
