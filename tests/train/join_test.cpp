// SPDX-License-Identifier: Apache-2.0
// Ranks with different numbers of batches, on real processes that share memory.
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/repeat.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/job_saves.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "train/checkpoint_files.hpp"
#include "train/join.hpp"
#include "train/run_job.hpp"

BOOST_AUTO_TEST_SUITE(uneven_inputs)

namespace {

using namespace joining;
using Rendezvous = ranks::SharedMemory;
using namespace std::chrono_literals;

/// Everything at once: unused parameters, micro-batches with tails, a bucket for every parameter.
using ByInitial = PolicyPack<UnevenInputs<Join>, Accumulate<3>, UnusedParameters<Zero>,
                             Buckets<BucketLimits{0, 0}>>;
/// Divided by the live ranks before the norm is taken, each rank with its slices; what is not
/// finite is left out.
using ByLive = PolicyPack<UnevenInputs<Join, DivideByLive>, Accumulate<2>, Clip<2.5>, Anomaly<Skip>,
                          Sharding<ZeroRedundancy>>;

template <class... Ps>
void check(const Loops& loops, PolicyPack<Ps...>) {
  check_loops<Rendezvous, Ps...>(loops);
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_that_are_through_train_as_in_pytorch) {
  const std::size_t initial = train_cases<Rendezvous, false>();
  const std::size_t live = train_cases<Rendezvous, true>();
  BOOST_TEST(initial + live == reference("join.json").size());
  BOOST_TEST(initial != 0u);
  BOOST_TEST(live != 0u);
}

BOOST_AUTO_TEST_CASE(ranks_with_random_numbers_of_batches_train_like_one_process) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(12, 200); ++i) {
    Loops loops = random_loops(chance, 3);
    loops.leaves_out = chance(2) == 0;
    check(loops, ByInitial{});
  }
}

BOOST_AUTO_TEST_CASE(divided_by_the_live_ranks_they_train_like_one_process) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(12, 200); ++i) {
    Loops loops = random_loops(chance, 2);
    loops.by_live = true;
    loops.max_norm = 2.5;
    if (chance(3) == 0) loops.poisoned = chance(4);
    check(loops, ByLive{});
  }
}

BOOST_AUTO_TEST_CASE(nobody_needs_to_have_a_batch) {
  Loops loops;
  loops.world = 3;
  loops.micro_batches = 3;
  loops.batches = {{0, 0, 0}, {0, 0, 5}, {0, 0, 0}, {1, 0, 0}};
  check(loops, ByInitial{});
}

namespace {

template <class... Ps>
auto joining_ddp(auto& comm, PolicyPack<Ps...>) {
  return DistributedDataParallel<Seeing<>, Optimizer<AdamW>, Ps...>(comm);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_rank_that_leaves_without_joining_is_named) {
  const Ends ends = ranks::run_processes(2, 2s, [](Shared& comm) {
    auto ddp = joining_ddp(comm, ByInitial{});
    if (comm.rank() == Rank{1}) {
      for (int s = 0; s != 3; ++s) ddp.step(Entry{});
      return;  // as a loop without join would
    }
    auto joined = ddp.join();
    for (int s = 0; s != 9; ++s) ddp.step(Entry{});
  });
  BOOST_TEST(ends[0].find("rank 1") != std::string::npos, ends[0]);
  BOOST_TEST(ends[1] == "");
}

BOOST_AUTO_TEST_CASE(a_rank_that_dies_is_named_to_those_that_are_through) {
  const Ends ends = ranks::run_processes(3, 20s, [](Shared& comm) {
    auto ddp = joining_ddp(comm, ByInitial{});
    auto joined = ddp.join();
    for (int s = 0; comm.rank() == Rank{1}; ++s) {
      if (s == 7) raise(SIGKILL);
      ddp.step(Entry{});
    }
    joined.finish();
  });
  for (const std::size_t r : {0u, 2u})
    BOOST_TEST(ends[r].find("rank 1") != std::string::npos, ends[r]);
}

BOOST_AUTO_TEST_CASE(a_rank_whose_scope_an_exception_ends_answers_nobody) {
  const Ends ends = ranks::run_processes(2, 2s, [](Shared& comm) {
    auto ddp = joining_ddp(comm, ByInitial{});
    auto joined = ddp.join();
    for (int s = 0; s != 3; ++s) ddp.step(Entry{});
    if (comm.rank() == Rank{1}) throw std::runtime_error("the data has ended in tears");
    joined.finish();
  });
  BOOST_TEST(ends[0].find("rank 1") != std::string::npos, ends[0]);
  BOOST_TEST(ends[1] == "the data has ended in tears");
}

BOOST_AUTO_TEST_CASE(a_failure_of_a_live_rank_reaches_those_that_are_through) {
  const Ends ends = ranks::run_processes(3, 20s, [](Shared& comm) {
    auto ddp = joining_ddp(comm, ByInitial{});
    auto joined = ddp.join();
    Entry entry;
    if (comm.rank() == Rank{2}) {
      for (int s = 0; s != 4; ++s) ddp.step(entry);
      entry.trouble = Entry::Trouble::in_backward;
      ddp.step(entry);
    }
    joined.finish();
  });
  all_say(ends, "backward ran out of luck");
}

BOOST_AUTO_TEST_CASE(calls_of_all_ranks_are_rejected_while_some_may_be_through) {
  all_well(2, [](Shared& comm) {
    auto ddp = joining_ddp(comm, ByInitial{});
    auto joined = ddp.join();
    ddp.step(Entry{});
    const auto rejected = [&](const auto& call) {
      try {
        call();
      } catch (const Error& error) {
        return std::string(error.what()).find("after joined.finish()") != std::string::npos;
      }
      return false;
    };
    require(rejected([&] { save(ddp, "/nonexistent/never"); }), "a save is rejected");
    require(rejected([&] { auto again = ddp.join(); }), "a second scope is rejected");
    joined.finish();
    joined.finish();  // changes nothing
    require(!ddp.is_joining(), "the scope has ended");
  });
}

// ---- Trainers

namespace {

using Points = LabelledBatch<double, double>;
using job_test::failure;
using job_test::run;

/// y = slope x, with the batches that it has seen in a buffer.
struct Slope {
  using Parameters = ParameterList<Parameter<"slope", double>>;
  using Buffers = BufferList<Buffer<"batches", double, 1>>;
  double gradient = 0;

  double forward(auto& step, const Points& points) {
    step.buffer("batches"_p)(0) += 1;
    double loss = 0;
    gradient = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      const double error = step.param("slope"_p)() * points.inputs[i] - points.labels[i];
      loss += error * error;
      gradient += 2 * error * points.inputs[i] / static_cast<double>(points.size());
    }
    return loss / static_cast<double>(points.size());
  }
  void backward(auto& step, const Points&) { step.set_grad("slope"_p, gradient); }
};

using Job = Trainer<Slope, UnevenInputs<Join>, Sampler<Distributed, Exact, InOrder>,
                    Schedule<Cosine>, Accumulate<2>>;

InMemoryDataset<double, double> line(std::size_t points) {
  std::vector<double> x(points), y(points);
  for (std::size_t i = 0; i != points; ++i) {
    x[i] = 0.1 + 0.05 * static_cast<double>(i);
    y[i] = 3 * x[i];
  }
  return {x, y};
}

/// The numbers that all ranks must have the same.
void require_same(Job& job, const std::string& when) {
  for (const double mine :
       {job.param("slope"_p)(), job.ddp().learning_rate(), job.ddp().buffer("batches"_p)(0)}) {
    for (const double other : job.all_gather(mine))
      require(other == mine, when + ": ranks have different numbers");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_of_a_trainer_have_data_of_their_own) {
  run<Job>(3, [](Job& job) {
    // A rank draws every third sample of its own data: 9, 4 and none.
    const std::size_t me = job.rank().value();
    const auto train = line(me == 0 ? 27 : me == 1 ? 12 : 0);
    const std::size_t own[] = {9, 4, 0};
    std::size_t steps = 0;
    for (auto epoch : job.epochs(2)) {
      double sum = 0;
      std::size_t seen = 0;
      for (const auto& batch : epoch.batches(train, 2)) {
        sum += job.step(batch) * static_cast<double>(batch.size());
        seen += batch.size();
      }
      require(seen == own[me], "each rank sees its share of its own data");
      require_same(job, "after an epoch");
      // The most batches of a rank are five: two steps of two, and a tail.
      require(job.ddp().updates() == (steps += 3), "updates of the rank that has most batches");
      const auto summary = epoch.summary();
      require(summary.samples == 13 && summary.steps == 5, "samples and steps of all ranks");
      const double mean = job.all_reduce(sum) / 13;
      require(std::abs(summary.loss.value() - mean) < 1e-12, "the mean loss over all samples");
      const auto scores = job.evaluate(line(7), 3);
      require(std::abs(job.all_reduce(scores["loss"], Max{}) - scores["loss"]) == 0,
              "evaluations are the same everywhere");
    }
  });
}

BOOST_AUTO_TEST_CASE(a_rank_that_breaks_answers_the_others) {
  run<Job>(3, [](Job& job) {
    const auto train = line(30);  // 10 samples, 5 batches, 3 updates
    for (auto epoch : job.epochs(2)) {
      std::size_t steps = 0;
      for (const auto& batch : epoch.batches(train, 2)) {
        job.step(batch);
        if (++steps == 1 + 2 * job.rank().value()) break;
      }
      require_same(job, "after a break");
      require(job.ddp().updates() == 3 * (epoch.number() + 1), "updates of the last rank");
    }
  });
}

BOOST_AUTO_TEST_CASE(a_loop_that_an_exception_has_left_rejects_no_later_call) {
  run<Job>(2, [](Job& job) {
    const auto train = line(12);
    try {
      for (auto epoch : job.epochs(1)) {
        for (const auto& batch : epoch.batches(train, 2)) {
          job.step(batch);
          throw std::runtime_error("no more of this");  // on all ranks
        }
      }
    } catch (const std::runtime_error&) {
    }
    require(job.evaluate(train, 3)["loss"] > 0, "an evaluation after the loop");
  });
}

// Rank 0 draws 3 samples and rank 1 draws 15: 2 and 8 batches, 4 updates in an epoch.
BOOST_AUTO_TEST_CASE(a_trainer_saves_while_some_are_exhausted_and_goes_on_from_there) {
  using Figures = std::array<double, 6>;
  constexpr std::uint64_t never = 1000;
  const ranks::Common<Figures> whole;
  const auto train = [](Job& job, std::uint64_t fails_at, bool breaks) {
    const auto own = line(job.rank() == Rank{0} ? 6 : 30);
    EpochSummary last;
    for (auto epoch : job.epochs(3)) {
      for (const auto& batch : epoch.batches(own, 2)) {
        job.step(batch);
        if (job.rank() == Rank{1} && job.ddp().updates() == fails_at)
          throw std::runtime_error("the power is gone");
        if (breaks && job.rank() == Rank{0}) break;
      }
      last = epoch.summary();
    }
    return Figures{job.param("slope"_p)(),
                   job.ddp().buffer("batches"_p)(0),
                   static_cast<double>(job.ddp().updates()),
                   last.loss.value(),
                   static_cast<double>(last.steps),
                   static_cast<double>(last.samples)};
  };
  for (const bool breaks : {false, true}) {
    run<Job>(2, [&](Job& job) {
      const Figures all = train(job, never, breaks);
      if (job.rank() == Rank{0}) *whole = all;
    });
    // In the last epoch, in one before it, and at the very end of one.
    for (const std::uint64_t fails_at : {11u, 6u, 8u}) {
      const checkpoints::Folder folder;
      CheckpointOptions options;
      options.folder = folder.path;
      options.every_steps = 1;
      options.asynchronous = false;
      const std::string words = failure<Job>(2, [&](Job& job) {
        job.checkpoints(options);
        train(job, fails_at, breaks);
      });
      BOOST_TEST(words.find("the power is gone") != std::string::npos, words);
      options.resume = true;
      run<Job>(2, [&](Job& job) {
        job.checkpoints(options);
        const auto resumed = job.resume();
        require(resumed && resumed->step == fails_at - 1,
                "the step before is the newest that is saved");
        const Figures have = train(job, never, breaks);
        for (std::size_t i = 0; i != have.size(); ++i)
          require(have[i] == (*whole)[i], "figure " + std::to_string(i) + " is " +
                                              std::to_string(have[i]) + " instead of " +
                                              std::to_string((*whole)[i]));
      });
    }
  }
}

BOOST_AUTO_TEST_CASE(a_trainer_rejects_other_calls_inside_of_the_loop) {
  const auto rejected = [](const auto& call) {
    const std::string words = failure<Job>(2, [&](Job& job) {
      const auto train = line(6);
      for (auto epoch : job.epochs(1)) {
        for (const auto& batch : epoch.batches(train, 1)) {
          job.step(batch);
          call(job, epoch, train);
        }
      }
    });
    BOOST_TEST(words.find("inside of a loop whose batches may have ended on other ranks") !=
                   std::string::npos,
               words);
  };
  rejected([](Job& job, auto&, const auto& train) { job.evaluate(train, 1); });
  rejected([](Job& job, auto&, const auto&) { job.save("/nonexistent/never"); });
  rejected([](Job&, auto& epoch, const auto& train) {
    for (const auto& batch : epoch.batches(train, 1)) static_cast<void>(batch);
  });
}

BOOST_AUTO_TEST_SUITE_END()
