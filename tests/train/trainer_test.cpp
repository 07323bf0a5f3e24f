// SPDX-License-Identifier: Apache-2.0
// The trainer's loop on real processes: epochs, evaluation, logs, and what it rejects.
#include "lockstep/detail/trainer/trainer.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/trainer/job_saves.hpp"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/options.hpp"
#include "lockstep/detail/trainer/process_group.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "message_of.hpp"
#include "thread_count.hpp"
#include "train/run_job.hpp"

#if defined(__SANITIZE_ADDRESS__)
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();  // g++ 12 has no header of it
#endif

BOOST_AUTO_TEST_SUITE(trainer_loop)

namespace {

using namespace lockstep;
using Points = LabelledBatch<double, double>;

using job_test::failure;
using job_test::require;
using job_test::run;

/// y = slope x + offset, and the samples that it has seen.
struct Line {
  using Parameters = ParameterList<Parameter<"slope", double>, Parameter<"offset", double>>;

  double forward(auto& step, const Points& points) {
    errors.resize(points.size());
    double loss = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      errors[i] =
          step.param("slope"_p)() * points.inputs[i] + step.param("offset"_p)() - points.labels[i];
      loss += errors[i] * errors[i];
    }
    return loss / static_cast<double>(points.size());
  }

  void backward(auto& step, const Points& points) {
    double slope = 0;
    double offset = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      slope += 2 * errors[i] * points.inputs[i] / static_cast<double>(points.size());
      offset += 2 * errors[i] / static_cast<double>(points.size());
      seen.push_back(points.inputs[i]);
    }
    step.grad("offset"_p)() = offset;
    step.ready("offset"_p);
    step.grad("slope"_p)() = slope;
    step.ready("slope"_p);
  }

  std::vector<double> errors;
  std::vector<double> seen;
};

/// n points of y = 3 x + 1.
InMemoryDataset<double, double> points_of_line(std::size_t n) {
  std::vector<double> x(n);
  std::vector<double> y(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<double>(i) / static_cast<double>(n) - 0.5;
    y[i] = 3 * x[i] + 1;
  }
  return {std::move(x), std::move(y)};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Runs `f(session)` on every rank.
template <class F>
void run_sessions(std::size_t ranks, const F& f) {
  spawn(
      AsProcesses{}, ranks,
      [&](const Membership& member, Store&) {
        std::FILE* const quiet = std::freopen("/dev/null", "w", stdout);
        require(quiet != nullptr, "no /dev/null");
        Session session(member, Store(member.host, member.port, member.secret, member.timeout));
        f(session);
      },
      std::chrono::seconds(30));
}

/// The lines of a log, which is then removed.
std::vector<nlohmann::json> taken_lines(const char* path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  std::remove(path);
  return lines;
}

/// The log of two ranks that train for so many epochs, at whose ends they call `f(job, epoch,
/// data)`.
template <class Job, class F>
std::vector<nlohmann::json> log_of_epochs(std::uint64_t epochs, const F& f) {
  char path[] = "/tmp/lockstep-log-XXXXXX";
  BOOST_REQUIRE(mkstemp(path) >= 0);
  run<Job>(2,
           [&](Job& job) {
             const auto data = points_of_line(16);
             for (auto epoch : job.epochs(epochs)) {
               for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
               f(job, epoch, data);
             }
           },
           {.seed = Seed{0}, .log = path});
  return taken_lines(path);
}

/// How many lines a file has: mappings of memory.
std::size_t lines(const char* path) {
  std::ifstream file(path);
  std::size_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

/// Bytes that the program has allocated and not freed. Without the sanitizer they are malloc's,
/// which counts what lies in the caches of threads: some hundred bytes come and go.
std::size_t bytes_in_use() {
#if defined(__SANITIZE_ADDRESS__)
  return __sanitizer_get_current_allocated_bytes();
#else
  return mallinfo2().uordblks;
#endif
}

#if defined(__SANITIZE_ADDRESS__)
constexpr bool is_counted_exactly = true;
#else
constexpr bool is_counted_exactly = false;
#endif

/// How many entries a folder of /proc/self has: open descriptors, or threads.
std::size_t entries(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

}  // namespace

BOOST_AUTO_TEST_CASE(jobs_of_one_session_one_after_the_other_leave_nothing) {
  using Job = Trainer<Line>;
  for (const std::size_t ranks : {1, 2, 4}) {
    const int rounds = ranks == 2 ? 1000 : 100;
    run_sessions(ranks, [&](Session& session) {
      const auto data = points_of_line(16);
      std::size_t descriptors = 0;
      std::size_t threads = 0;
      std::size_t mappings = 0;
      std::size_t allocated = 0;
      const int settled = rounds / 2;  // until then malloc fills its caches
      for (int round = 0; round < rounds; ++round) {
        Job job(session);
        job.optimizer().lr = 0.01 * round;
        for (auto epoch : job.epochs(1)) {
          for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
        }
        if (round != settled) continue;
        descriptors = entries("/proc/self/fd");
        threads = thread_count();
        mappings = lines("/proc/self/maps");
        allocated = bytes_in_use();
      }
      require(entries("/proc/self/fd") <= descriptors, "descriptors are left open");
      require(thread_count() <= threads, "threads are left");
      require(lines("/proc/self/maps") <= mappings + 8, "memory is left mapped");
      // The smallest block of malloc has 32 bytes: less than that in each round is no block.
      const std::size_t cached =
          is_counted_exactly ? 0 : 31 * static_cast<std::size_t>(rounds - settled - 1);
      require(bytes_in_use() <= allocated + cached, "memory is left allocated");
    });
  }
}

BOOST_AUTO_TEST_CASE(ranks_with_different_numbers_of_batches_are_told_of_join) {
  using Job = Trainer<Line>;
  const std::string words = failure<Job>(2, [](Job& job) {
    const auto data = points_of_line(16);
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, 2)) {
        if (job.rank() == Rank{1}) break;
        job.step(batch);
      }
    }
  });
  BOOST_TEST(contains(words, "or add UnevenInputs<Join>, with which ranks may have different"),
             words);
}

// Every rank names the call that each has made, in the words of the program.
BOOST_AUTO_TEST_CASE(ranks_that_make_other_calls_of_a_job_are_told_which) {
  using Job = Trainer<Line>;
  const auto message_of = [](const auto& use) {
    return failure<Job>(2, [&](Job& job) {
      const auto data = points_of_line(16);
      for (auto epoch : job.epochs(2)) {
        for (const auto& batch : epoch.batches(data, 4)) {
          if (job.rank() == Rank{0}) use(job, data);
          job.step(batch);
        }
        if (job.rank() == Rank{0}) job.evaluate(data, 4);
      }
    });
  };
  const std::string at_the_end = message_of([](Job&, const auto&) {});
  BOOST_TEST(contains(at_the_end,
                      "ranks disagree: rank 0 called evaluate (its all_gather(1 uint64)) and rank "
                      "1 called epochs (its all_gather(1 uint64))"),
             at_the_end);
  const std::string in_the_loop =
      message_of([](Job& job, const auto& data) { job.evaluate(data, 4); });
  BOOST_TEST(contains(in_the_loop,
                      "rank 0 called evaluate (its all_gather(1 uint64)) and rank 1 "
                      "called step (its reduce_scatter("),
             in_the_loop);
  const std::string own =
      message_of([](Job& job, const auto&) { static_cast<void>(job.all_reduce(1.0)); });
  BOOST_TEST(contains(own, "rank 0 called all_reduce(sum of 1 double) and rank 1 called step (its"),
             own);
  const std::string last = failure<Job>(2, [](Job& job) {
    if (job.rank() == Rank{0}) job.evaluate(points_of_line(16), 4);
  });
  BOOST_TEST(contains(last,
                      "rank 0, evaluate (its all_gather(1 uint64)): rank 1 closed its "
                      "communicator without this call"),
             last);
}

BOOST_AUTO_TEST_CASE(a_job_has_collectives_and_groups) {
  using Job = Trainer<Line>;
  for (const std::size_t ranks : {1, 2, 3}) {
    run<Job>(ranks, [&](Job& job) {
      const std::size_t me = job.rank().value();
      const double mean = job.all_reduce(static_cast<double>(me), Average{});
      require(mean == static_cast<double>(ranks - 1) / 2, "another mean");
      require(job.all_reduce(me == 0, Max{}) && !job.all_reduce(me == ranks, Max{}), "any rank");
      float values[] = {1, static_cast<float>(me)};
      job.all_reduce(values);
      require(values[0] == static_cast<float>(ranks), "another sum");
      float parts[] = {1, 2};
      job.reduce(parts, Rank{ranks - 1}, Sum{});
      require(parts[1] == (me == ranks - 1 ? 2 * static_cast<float>(ranks) : 2), "another sum");
      require(job.reduce(me + 1) == (me == 0 ? ranks * (ranks + 1) / 2 : me + 1), "on rank 0");
      require(job.reduce(1.0, Rank{0}, Average{}) == 1, "another mean on rank 0");
      std::vector<float> of_rank0(3, static_cast<float>(me + 5));
      job.broadcast(of_rank0);
      require(of_rank0[2] == 5 && job.broadcast(me) == 0, "not rank 0's values");
      std::vector<float> all(2 * ranks);
      job.all_gather(values, all);
      require(job.all_gather(me).back() == ranks - 1, "not every rank's number");
      const Gathered<float> rollouts = job.all_gather_variable(std::vector<float>(me, 1.f));
      require(rollouts.total() == ranks * (ranks - 1) / 2, "not all rollouts");
      require(job.gather_variable(std::vector<int>(me + 1, 7), Rank{0}).values.size() ==
                  (me == 0 ? ranks * (ranks + 1) / 2 : 0),
              "not all on rank 0");
      auto first = new_group(job.communicator(), {Rank{0}});
      require(first.has_value() == (me == 0), "another group");
    });
  }
  const std::string alone = failure<Job>(
      2, [](Job& job) { job.on_rank0([&](auto) { static_cast<void>(job.all_reduce(1.0)); }); });
  BOOST_TEST(contains(alone, "all_reduce: rank 0 alone has come here, inside on_rank0"), alone);
}

BOOST_AUTO_TEST_CASE(jobs_of_one_session_side_by_side) {
  using Job = Trainer<Line>;
  run_sessions(2, [](Session& session) {
    const auto data = points_of_line(16);
    Job slow(session);
    Job fast(session);
    slow.optimizer().lr = 0.001;
    fast.optimizer().lr = 0.3;
    for (auto epoch : slow.epochs(2)) {
      for (const auto& batch : epoch.batches(data, 2)) {
        slow.step(batch);
        fast.step(batch);
      }
    }
    require(fast.param("slope"_p)() > slow.param("slope"_p)(), "the jobs have one parameter");
  });
}

BOOST_AUTO_TEST_CASE(a_cosine_begins_anew_with_every_call_of_epochs) {
  using Job = Trainer<Line, Schedule<Cosine>>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(16);
    job.optimizer().lr = 0.5;
    for (const std::uint64_t epochs : {3, 2}) {
      std::vector<double> rates;
      for (auto epoch : job.epochs(epochs)) {
        for (const auto& batch : epoch.batches(data, 2)) {
          rates.push_back(job.ddp().learning_rate());
          job.step(batch);
        }
      }
      require(rates.size() == 4 * epochs && rates.front() == 0.5, "another first rate");
      require(std::abs(job.ddp().learning_rate()) < 1e-15, "the rate is not at its end");
    }
  });
}

BOOST_AUTO_TEST_CASE(a_decay_of_updates_counts_by_itself) {
  using Job = Trainer<Line, Schedule<StepDecay>>;
  run<Job>(1, [](Job& job) {
    const auto data = points_of_line(8);
    job.optimizer().lr = 1;
    job.schedule() = {.factor = 0.5, .updates = 2};
    Points batch;
    const std::size_t first[] = {0};
    data.load(first, batch);
    std::vector<double> rates;
    for (int i = 0; i < 5; ++i) {
      rates.push_back(job.ddp().learning_rate());
      job.step(batch);
    }
    require(rates == std::vector<double>{1, 1, 0.5, 0.5, 0.25}, "other rates");
  });
}

BOOST_AUTO_TEST_CASE(a_break_keeps_the_line_of_its_epoch) {
  using Job = Trainer<Line>;
  char path[] = "/tmp/lockstep-log-XXXXXX";
  BOOST_REQUIRE(mkstemp(path) >= 0);
  run<Job>(2,
           [](Job& job) {
             const auto data = points_of_line(16);
             for (auto epoch : job.epochs(5)) {
               for (const auto& batch : epoch.batches(data, 2)) {
                 job.step(batch);
                 if (epoch.number() == 1) break;
               }
               require(epoch.summary().loss.has_value(), "no loss");
               if (epoch.number() == 1) break;
             }
             for (auto epoch : job.epochs(1)) {
               for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
             }
           },
           {.seed = Seed{0}, .log = path});
  const std::vector<nlohmann::json> lines = taken_lines(path);
  BOOST_REQUIRE(lines.size() == 4u);
  BOOST_TEST(lines[0].contains("run"));
  BOOST_TEST(lines[2]["epoch"] == 2);
  BOOST_TEST(lines[2]["steps"] == 1);
  BOOST_TEST(lines[3]["epoch"] == 1);
}

BOOST_AUTO_TEST_CASE(a_record_that_a_break_cannot_write_is_an_error_of_the_next_call) {
  using Job = Trainer<Line>;
  char path[] = "/tmp/lockstep-log-XXXXXX";
  BOOST_REQUIRE(mkstemp(path) >= 0);
  const auto train = [&](Job& job) {
    const rlimit full{1, 1};  // a file has no room behind its first byte
    std::signal(SIGXFSZ, SIG_IGN);
    require(::setrlimit(RLIMIT_FSIZE, &full) == 0, "no limit");
    const auto data = points_of_line(16);
    int printed[2];
    require(::pipe2(printed, O_NONBLOCK) == 0 && ::dup2(printed[1], 2) == 2, "no pipe");
    for (auto epoch : job.epochs(3)) {
      for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
      break;
    }
    std::string words = "nothing";
    try {
      job.barrier();
    } catch (const Error& error) {
      words = error.what();
    }
    require(contains(words, path), words);
    char line[200];
    require(::read(printed[0], line, sizeof line) < 0, "it is printed as well, and so twice");
  };
  run<Job>(1, train, {.seed = Seed{0}, .log = path});
  std::filesystem::remove(path);
}

BOOST_AUTO_TEST_CASE(a_loop_that_throws_says_so_and_not_that_an_epoch_ended) {
  using Job = Trainer<Line>;
  const std::string words = failure<Job>(2, [](Job& job) {
    const auto data = points_of_line(16);
    for (auto epoch : job.epochs(2)) {
      for (const auto& batch : epoch.batches(data, 2)) {
        job.step(batch);
        if (job.rank() == Rank{1}) throw std::runtime_error("the user's own words");
      }
    }
  });
  BOOST_TEST(contains(words, "the user's own words"), words);
}

BOOST_AUTO_TEST_CASE(batches_larger_than_the_data_are_one_batch) {
  using Job = Trainer<Line>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(16);
    for (const std::size_t size : {std::size_t{9}, static_cast<std::size_t>(-1)}) {
      std::size_t steps = 0;
      for (auto epoch : job.epochs(1)) {
        for (const auto& batch : epoch.batches(data, size)) {
          require(batch.size() == 8, "not all samples of the rank");
          job.step(batch);
          ++steps;
        }
      }
      require(steps == 1, "another number of steps");
      require(job.evaluate(data, size).count("loss") == 16, "not all samples were evaluated");
    }
  });
}

BOOST_AUTO_TEST_CASE(ranks_with_other_data_are_told_so) {
  using Job = Trainer<Line>;
  const auto message_of = [](const auto& change) {
    return failure<Job>(2, [&](Job& job) {
      std::size_t samples = 16;
      std::size_t batch = 2;
      if (job.rank() == Rank{1}) change(job, samples, batch);
      const auto data = points_of_line(samples);
      for (auto epoch : job.epochs(1)) {
        for (const auto& points : epoch.batches(data, batch)) job.step(points);
      }
    });
  };
  const std::string fewer = message_of([](Job&, std::size_t& samples, auto&) { samples = 12; });
  BOOST_TEST(contains(fewer, "rank 0 has \"data of 16 samples\" and rank 1 has \"data of 12"),
             fewer);
  const std::string batches = message_of([](Job&, auto&, std::size_t& batch) { batch = 4; });
  BOOST_TEST(contains(batches, "\"batches of 2 samples\" and rank 1 has \"batches of 4"), batches);
  const std::string seeds =
      message_of([](Job& job, auto&, auto&) { job.sampler_options().seed = Seed{9}; });
  BOOST_TEST(contains(seeds, "seed 0\" and rank 1 has \"a sampler with seed 9"), seeds);
  const std::string evaluated = failure<Job>(
      2, [](Job& job) { job.evaluate(points_of_line(job.rank() == Rank{0} ? 8 : 9), 2); });
  BOOST_TEST(contains(evaluated, "data of 9 samples"), evaluated);
}

BOOST_AUTO_TEST_CASE(no_data_and_no_batch_are_errors) {
  using Job = Trainer<Line>;
  const auto message_of = [](std::size_t samples, LoaderOptions options) {
    return failure<Job>(2, [=](Job& job) {
      const auto data = points_of_line(samples);
      for (auto epoch : job.epochs(1)) {
        for (const auto& batch : epoch.batches(data, options)) job.step(batch);
      }
    });
  };
  const std::string none = message_of(0, {.batch_size = 2});
  BOOST_TEST(contains(none, "no samples"), none);
  const std::string zero = message_of(8, {.batch_size = 0});
  BOOST_TEST(contains(zero, "batches of no samples"), zero);
  const std::string dropped = message_of(8, {.batch_size = 16, .drop_last = true});
  BOOST_TEST(contains(dropped, "there is no batch to train on: 8 samples among 2 ranks"), dropped);
}

BOOST_AUTO_TEST_CASE(any_number_of_ranks_trains_alike_at_the_same_global_batch) {
  using Job = Trainer<Line, Optimizer<SGDMomentum>>;
  for (const std::size_t ranks : {1, 2, 4}) {
    run<Job>(ranks, [&](Job& job) {
      const auto data = points_of_line(64);
      job.optimizer().lr = 0.3;
      for (auto epoch : job.epochs(60)) {
        for (const auto& batch : epoch.batches(data, 16 / ranks)) job.step(batch);
      }
      require(std::abs(job.param("slope"_p)() - 3) < 1e-3, "the slope was not learned");
      require(std::abs(job.param("offset"_p)() - 1) < 1e-3, "the offset was not learned");
    });
  }
}

BOOST_AUTO_TEST_CASE(a_trainers_steps_are_those_of_a_hand_written_loop) {
  using Job = Trainer<Line>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(10);
    LoopbackCommunicator alone;
    DistributedDataParallel<Line, World<1>> whole(alone);
    job.optimizer().lr = whole.optimizer().lr = 0.1;
    // Both ranks' samplers, so that one process sees the whole batch.
    DistributedSampler<> samplers[] = {{10, WorldSize{2}, Rank{0}}, {10, WorldSize{2}, Rank{1}}};
    for (auto epoch : job.epochs(3)) {
      for (auto& sampler : samplers) sampler.set_epoch(Epoch{epoch.number()});
      for (const auto& batch : epoch.batches(data, 5)) {
        require(batch.size() == 5, "a batch of another size");
        job.step(batch);
      }
      std::vector<std::size_t> indices;
      for (auto& sampler : samplers) {
        for (const std::size_t index : sampler) indices.push_back(index);
      }
      Points all;
      data.load(indices, all);
      whole.step(all);
    }
    require(std::abs(job.param("slope"_p)() - whole.param("slope"_p)()) < 1e-12, "another slope");
    require(std::abs(job.param("offset"_p)() - whole.param("offset"_p)()) < 1e-12,
            "another offset");
  });
}

BOOST_AUTO_TEST_CASE(every_epoch_has_an_order_of_its_own) {
  using Job = Trainer<Line>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(32);
    std::set<std::vector<double>> orders;
    for (auto epoch : job.epochs(4)) {
      job.model().seen.clear();
      for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
      orders.insert(job.model().seen);
    }
    require(orders.size() == 4, "two epochs had the same order");
  });
}

namespace {

/// A line that may go through the origin.
struct Shifted {
  using Parameters = Line::Parameters;

  double forward(auto& step, const Points& points) {
    error = step.param("slope"_p)() * points.inputs[0] - points.labels[0];
    if (step.uses("offset"_p)) error += step.param("offset"_p)();
    return error * error;
  }
  void backward(auto& step, const Points& points) {
    if constexpr (uses<decltype(step)>("offset"_p)) step.set_grad("offset"_p, 2 * error);
    step.set_grad("slope"_p, 2 * error * points.inputs[0]);
  }

  double error = 0;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_job_trains_and_evaluates_one_of_its_sub_graphs) {
  using Sets = Subgraphs<Subgraph<"through_origin", "slope">>;
  using Job = Trainer<Shifted, Optimizer<SGDMomentum>, UnusedParameters<Sets>>;
  run<Job>(2, [](Job& job) {
    job.optimizer().lr = 0.01;
    job.initialize([](auto& initial) { initial.param("offset"_p)() = 0.5; });
    const auto data = points_of_line(8);
    const auto offset = [&] { return job.param("offset"_p)(); };
    for (auto epoch : job.epochs(3)) {
      const double before = offset();
      for (const auto& batch : epoch.batches(data, 1)) {
        if (epoch.number() == 0) {
          job.step<"through_origin"_s>(batch);
        } else if (epoch.number() == 1) {
          job.step(batch);
        } else {
          job.step(job.subgraph("through_origin"), batch);
        }
      }
      require((offset() == before) == (epoch.number() != 1),
              "offset is trained with its set alone");
    }
    const double shifted = job.evaluate(data, 1)["loss"];
    require(job.evaluate<"through_origin"_s>(data, 1)["loss"] != shifted, "evaluates another set");
    require(job.evaluate(data, 1)["loss"] == shifted, "evaluates the whole model again");
  });
  const std::string words =
      failure<Job>(1, [](Job& job) { static_cast<void>(job.subgraph("origin")); });
  BOOST_TEST(contains(words, "declares no sub-graph origin"), words);
}

BOOST_AUTO_TEST_CASE(evaluation_counts_every_sample_once) {
  using Job = Trainer<Line>;
  for (const std::size_t ranks : {1, 2, 4}) {
    run<Job>(ranks, [](Job& job) {
      for (const std::size_t n : {1, 3, 10, 65}) {
        const auto data = points_of_line(n);
        double sum = 0;
        for (std::size_t i = 0; i < n; ++i) {  // untrained, the line is zero
          const double y = 3 * (static_cast<double>(i) / static_cast<double>(n) - 0.5) + 1;
          sum += y * y;
        }
        const Scores scores = job.evaluate(data, 4);
        require(scores.count("loss") == static_cast<double>(n),
                "samples were counted twice or not");
        require(std::abs(scores["loss"] - sum / static_cast<double>(n)) < 1e-12, "another mean");
      }
    });
  }
}

BOOST_AUTO_TEST_CASE(metrics_are_means_over_all_ranks) {
  using Job = Trainer<Line>;
  run<Job>(4, [](Job& job) {
    Tally tally;
    const auto rank = static_cast<double>(job.rank().value());
    tally.add("reward", 10 * rank, rank + 1);
    require(job.reduce_metrics(tally)["reward"] == 60.0 / 10.0, "another mean");
  });
}

BOOST_AUTO_TEST_CASE(a_collective_on_rank_0_alone_is_an_error_at_once) {
  using Job = Trainer<Line>;
  const std::string words = failure<Job>(2, [](Job& job) {
    const auto data = points_of_line(8);
    job.on_rank0([&](auto) { job.evaluate(data, 4); });
    job.barrier();
  });
  BOOST_TEST(contains(words, "inside on_rank0"), words);
  BOOST_TEST(contains(words, "evaluate"), words);
}

BOOST_AUTO_TEST_CASE(ranks_with_other_learning_rates_are_noticed) {
  using Job = Trainer<Line>;
  const std::string words = failure<Job>(2, [](Job& job) {
    job.optimizer().lr = job.rank() == Rank{1} ? 0.2 : 0.1;
    for ([[maybe_unused]] auto epoch : job.epochs(1)) continue;
  });
  BOOST_TEST(contains(words, "\"optimizer lr 0.2\""), words);
}

BOOST_AUTO_TEST_CASE(ranks_with_other_learning_rates_of_a_group_are_noticed) {
  using Job = Trainer<Line, ParameterGroups<Vectors>>;
  const std::string words = failure<Job>(2, [](Job& job) {
    if (job.rank() == Rank{1}) job.optimizer(Vectors{}).lr = 0.2;
    for ([[maybe_unused]] auto epoch : job.epochs(1)) continue;
  });
  BOOST_TEST(contains(words, "\"optimizer of group 1: lr 0.2\""), words);
}

BOOST_AUTO_TEST_CASE(uneven_numbers_of_batches_are_noticed_before_the_first) {
  using Job = Trainer<Line, Sampler<Distributed, Exact>>;
  const std::string words = failure<Job>(2, [](Job& job) {
    const auto data = points_of_line(9);
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, 1)) job.step(batch);
    }
  });
  BOOST_TEST(contains(words, "rank 0 has 5 batches and rank 1 has 4"), words);
}

BOOST_AUTO_TEST_CASE(ranks_have_seeds_of_their_own) {
  using Job = Trainer<Line>;
  run<Job>(2,
           [](Job& job) {
             require(job.seed() == rank_seed(Seed{7}, job.rank()), "another seed");
             require(job.seed() != rank_seed(Seed{7}, Rank{1 - job.rank().value()}),
                     "the same seed");
             require(job.random()() == RandomStream(job.seed())(), "another stream");
           },
           {.seed = Seed{7}, .log = ""});
}

BOOST_AUTO_TEST_CASE(a_resumed_job_goes_on_in_mid_epoch) {
  using Job = Trainer<Line>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(24);
    SamplerState position;
    std::size_t steps = 0;
    for (auto epoch : job.epochs(2)) {
      for (const auto& batch : epoch.batches(data, 3)) {
        job.step(batch);
        if (++steps == 6) position = job.position();  // two batches into the second epoch
      }
    }
    const std::vector<double> seen = std::move(job.model().seen);
    job.model().seen.clear();
    job.resume(position);
    for (auto epoch : job.epochs(2)) {
      require(epoch.number() == 1, "another epoch");
      for (const auto& batch : epoch.batches(data, 3)) job.step(batch);
    }
    const std::vector<double>& rest = job.model().seen;
    require(rest == std::vector<double>(seen.begin() + 18, seen.end()), "other samples were left");
  });
}

BOOST_AUTO_TEST_CASE(a_cosine_ends_with_the_last_epoch) {
  using Job = Trainer<Line, Schedule<Cosine>, Accumulate<2>>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(16);
    for (auto epoch : job.epochs(3)) {
      for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
    }
    require(job.ddp().updates() == 6, "another number of updates");
    require(job.schedule().steps == 6, "another number of steps");
    require(std::abs(job.ddp().learning_rate()) < 1e-18, "the rate is not at its end");
  });
}

BOOST_AUTO_TEST_CASE(the_log_has_a_line_of_json_for_every_epoch) {
  const auto lines = log_of_epochs<Trainer<Line>>(3, [](auto& job, auto&, const auto& data) {
    job.evaluate(data, 4);
    job.on_rank0([](auto log) { log.write(JsonLine().add("note", "hand-written")); });
  });
  BOOST_REQUIRE(lines.size() == 7u);
  const nlohmann::json& last = lines[6];
  BOOST_TEST(lines[5]["note"] == "hand-written");
  BOOST_TEST(last["epoch"] == 3);
  BOOST_TEST(last["steps"] == 4);
  BOOST_TEST(last["samples"] == 16);
  BOOST_TEST(last["loss"].get<double>() > last["test_loss"].get<double>());
  BOOST_TEST(last["lr"] == 1e-3);
}

BOOST_AUTO_TEST_CASE(the_log_begins_with_what_the_run_is) {
  using Job = Trainer<Line, Optimizer<AdamW>>;
  char path[] = "/tmp/lockstep-log-XXXXXX";
  BOOST_REQUIRE(mkstemp(path) >= 0);
  for (int i = 0; i < 2; ++i) {
    run<Job>(2, [](Job&) {}, {.seed = Seed{7}, .log = path});
  }
  const std::vector<nlohmann::json> lines = taken_lines(path);
  BOOST_REQUIRE(lines.size() == 2u);
  for (const nlohmann::json& line : lines) {
    BOOST_TEST_REQUIRE(line.size() == 1u);
    const nlohmann::json& header = line.at("run");
    BOOST_TEST(header.at("time").get<std::string>().size() == 20u);
    BOOST_TEST(header.at("lockstep") == std::string(version));
    BOOST_TEST(header.at("world") == 2);
    BOOST_TEST(header.at("seed") == 7);
    char digits[17];
    std::snprintf(digits, sizeof digits, "%016llx",
                  static_cast<unsigned long long>(Job::fingerprint()));
    BOOST_TEST(header.at("fingerprint") == std::string(digits));
    BOOST_TEST(header.at("policies").at("Optimizer") == "Optimizer<AdamW>");
    const std::string world = header.at("policies").at("World");
    BOOST_TEST((world == "World<dynamic>" || world == "World<>"), world);  // g++ and clang spell it
  }
}

BOOST_AUTO_TEST_CASE(a_record_has_the_programs_own_fields) {
  const auto lines = log_of_epochs<Trainer<Line>>(2, [](auto& job, auto& epoch, const auto&) {
    job.log_field("rank", job.rank().value());
    job.log_field("reward", 1.5);
    if (epoch.number() == 0) job.log_field("reward", 2.5);
    if (epoch.number() == 0) job.log_field("note", "first");
    if (job.rank() != Rank{0}) return;
    std::string words = "nothing";
    try {
      job.log_field("loss", 1);
    } catch (const Error& error) {
      words = error.what();
    }
    require(contains(words, "'loss' is a field that lockstep writes"), words);
  });
  BOOST_REQUIRE(lines.size() == 3u);
  BOOST_TEST(lines[1]["rank"] == 0);
  BOOST_TEST(lines[1]["reward"] == 2.5);
  BOOST_TEST(lines[1]["note"] == "first");
  BOOST_TEST(lines[2]["reward"] == 1.5);
  BOOST_TEST(!lines[2].contains("note"));
}

/// Data that take a while to load, and a model that takes a while to evaluate.
struct SlowPoints : InMemoryDataset<double, double> {
  explicit SlowPoints(InMemoryDataset<double, double> points)
      : InMemoryDataset<double, double>(std::move(points)) {}
  void load(std::span<const std::size_t> indices, Points& batch) const {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    InMemoryDataset<double, double>::load(indices, batch);
  }
};

BOOST_AUTO_TEST_CASE(a_record_says_where_the_time_went) {
  using Job = Trainer<Line>;
  for (const std::size_t workers : {0, 1}) {
    char path[] = "/tmp/lockstep-log-XXXXXX";
    BOOST_REQUIRE(mkstemp(path) >= 0);
    run<Job>(1,
             [&](Job& job) {
               job.loader_options().workers = workers;
               const SlowPoints data(points_of_line(16));
               for (auto epoch : job.epochs(1)) {
                 for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
                 job.evaluate(data, 8);
               }
             },
             {.seed = Seed{0}, .log = path});
    const std::vector<nlohmann::json> lines = taken_lines(path);
    BOOST_REQUIRE(lines.size() == 2u);
    const auto seconds = [&](const char* name) { return lines[1].at(name).get<double>(); };
    BOOST_TEST(seconds("data_seconds") > (workers == 0 ? 0.0119 : 0.0));
    BOOST_TEST(seconds("data_seconds") <= seconds("seconds"));
    BOOST_TEST(seconds("step_seconds") <= seconds("seconds") - seconds("data_seconds") + 1e-9);
    // A worker loads the second batch while the loop loads the first itself.
    BOOST_TEST(seconds("evaluate_seconds") >= (workers == 0 ? 0.006 : 0.003));
    BOOST_TEST(seconds("epoch_seconds") >= seconds("seconds") + seconds("evaluate_seconds"));
  }
}

/// A model that says its arithmetic, and a batch that says its tokens.
struct CountedLine : Line {
  static double flops(const auto& batch) { return 6e3 * static_cast<double>(batch.size()); }
};
struct CountedPoints : Points {
  std::size_t token_count() const { return 10 * size(); }
};

BOOST_AUTO_TEST_CASE(a_record_has_the_throughput_that_model_and_batch_say) {
  char path[] = "/tmp/lockstep-log-XXXXXX";
  BOOST_REQUIRE(mkstemp(path) >= 0);
  TrainerOptions options;
  options.log = path;
  options.peak_flops = 1e6;
  run<Trainer<CountedLine>>(
      2,
      [&](auto& job) {
        const InMemoryDataset<double, double> data = points_of_line(16);
        for (auto epoch : job.epochs(1)) {
          for (const auto& batch : epoch.batches(data, 4)) {
            CountedPoints counted;
            static_cast<Points&>(counted) = batch;
            job.step(counted);
          }
        }
        require(job.summary().tokens == 10 && job.summary().flops == 6e3, "a sample's work");
      },
      options);
  const std::vector<nlohmann::json> lines = taken_lines(path);
  BOOST_REQUIRE(lines.size() == 2u);
  const auto field = [&](const char* name) { return lines[1].at(name).get<double>(); };
  const double samples_per_second = 16 / field("seconds");
  const auto close = boost::test_tools::tolerance(1e-6);
  BOOST_TEST(field("tokens_per_second") == 10 * samples_per_second, close);
  BOOST_TEST(field("flops_per_second") == 6e3 * samples_per_second, close);
  BOOST_TEST(field("mfu") == 6e3 * samples_per_second / 2e6, close);
  BOOST_TEST(field("run_seconds") >= field("epoch_seconds"));
  BOOST_TEST(field("resident_bytes") > 1e6);
}

BOOST_AUTO_TEST_CASE(options_are_taken_out_of_the_arguments) {
  const TrainerOptions options = parse_trainer_options(
      {"program", "--seed", "5", "data", "--log=run.jsonl", "--", "--seed", "6"});
  BOOST_TEST(options.seed.value() == 5u);
  BOOST_TEST(options.log == "run.jsonl");
  const std::vector<std::string> rest = {"program", "data", "--seed", "6"};
  BOOST_TEST(options.arguments == rest, boost::test_tools::per_element());
  BOOST_CHECK_THROW(parse_trainer_options({"program", "--log"}), Error);
  const TrainerOptions saving =
      parse_trainer_options({"program", "--checkpoint", "run", "--checkpoint-every=5m", "--resume",
                             "own", "--keep", "2"});
  BOOST_TEST((saving.checkpoint.folder == "run" && saving.checkpoint.resume));
  BOOST_TEST((saving.checkpoint.every->second == std::chrono::minutes(5)));
  BOOST_TEST((saving.arguments == std::vector<std::string>{"program", "own"}));
  BOOST_TEST(parse_trainer_options({"program", "--record", "run.jsonl"}).log == "run.jsonl");
  BOOST_CHECK_THROW(parse_trainer_options({"program", "--record=a", "--log=b"}), Error);
  BOOST_CHECK_THROW(parse_trainer_options({"program", "--logs=b"}), Error);
}

namespace {

/// A model that is made from a number and cannot be copied.
struct Scaled : Line {
  explicit Scaled(double scale) : scale(std::make_unique<double>(scale)) {}
  std::unique_ptr<double> scale;
};

/// Calls `main` of every rank, where the environment says which rank it is, with `more` arguments.
template <class Main>
void run_mains(std::size_t ranks, const Main& f, const std::vector<std::string>& more = {}) {
  int port = 0;
  {
    const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    require(::bind(probe, reinterpret_cast<sockaddr*>(&address), size) == 0, "no port");
    ::getsockname(probe, reinterpret_cast<sockaddr*>(&address), &size);
    port = ntohs(address.sin_port);
    ::close(probe);
  }
  spawn(
      AsProcesses{}, ranks,
      [&](const Membership& member, Store&) {
        ::setenv("RANK", std::to_string(member.rank.value()).c_str(), 1);
        ::setenv("WORLD_SIZE", std::to_string(ranks).c_str(), 1);
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
        require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
        std::vector<std::string> words = {"program", "--progress=none"};
        words.insert(words.end(), more.begin(), more.end());
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        f(static_cast<int>(argv.size()), argv.data());
      },
      std::chrono::seconds(30));
}

}  // namespace

BOOST_AUTO_TEST_CASE(launch_takes_a_model_that_was_constructed) {
  using Job = Trainer<Scaled>;
  run_mains(2, [](int argc, char** argv) {
    int calls = 0;
    const int status = launch<Job>(argc, argv, Scaled(2.5), [&](Job& job) {
      ++calls;
      require(job.world_size() == WorldSize{2}, "another world");
      require(*job.model().scale == 2.5, "another model");
      const auto data = points_of_line(16);
      for (auto epoch : job.epochs(2)) {
        for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
      }
      require(job.model().seen.size() == 16, "another model has trained");
    });
    require(status == 0 && calls == 1, "launch has failed");
  });
}

BOOST_AUTO_TEST_CASE(a_job_of_a_session_takes_the_options_of_the_command_line) {
  using Job = Trainer<Line>;
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("session-job-" + std::to_string(::getpid()));
  for (std::size_t ranks : {1, 2, 4}) {
    fs::remove_all(folder);
    fs::create_directories(folder);
    std::vector<std::string> words = {"--seed=7",     "--log",        folder / "log",
                                      "--checkpoint", folder / "run", "--epochs=3"};
    const auto main_of = [](std::size_t steps) {
      return [steps](int argc, char** argv) {
        const int status = launch(argc, argv, [&](Session& session) {
          Job job(session);
          const auto epochs = job.option("epochs", 8);
          job.checkpoints();
          require(job.seed() == rank_seed(Seed{7}, job.rank()), "another seed");
          const auto data = points_of_line(8);
          std::size_t made = 0;
          for (auto epoch : job.epochs(epochs)) {
            for (const auto& batch : epoch.batches(data, 2)) {
              job.step(batch);
              ++made;
            }
          }
          require(made == steps, "it does not go on where it was");
        });
        require(status == 0, "launch has failed");
      };
    };
    const std::size_t all = 3 * (4 / ranks);
    run_mains(ranks, main_of(all), words);
    std::ifstream log(folder / "log");
    std::string line;
    BOOST_TEST_REQUIRE(!!std::getline(log, line));
    BOOST_TEST(nlohmann::json::parse(line)["run"]["seed"] == 7);
    words.emplace_back("--resume");
    run_mains(ranks, main_of(0), words);
  }
  fs::remove_all(folder);
}

BOOST_AUTO_TEST_CASE(a_negative_number_of_epochs_is_an_error) {
  using Job = Trainer<Line>;
  const auto train = [](Session& session) {
    Job job(session);
    const int epochs = job.option("epochs", 8);
    const std::string words = message_of([&] { job.epochs(static_cast<std::uint64_t>(epochs)); });
    require(words.find("epochs: their number is negative") != std::string::npos, words);
  };
  run_mains(1, [&](int argc, char** argv) { require(launch(argc, argv, train) == 0, "failed"); },
            {"--epochs", "-1"});
}

BOOST_AUTO_TEST_CASE(an_option_that_nobody_reads_is_an_error) {
  using Job = Trainer<Line>;
  const auto ends_with = [](int wanted, const auto& f) {
    return [&f, wanted](int argc, char** argv) {
      require(std::freopen("/dev/null", "w", stderr) != nullptr, "no /dev/null");
      require(launch(argc, argv, f) == wanted, "another status");
    };
  };
  const auto alone = [](Session& session) { ProcessGroup group(session); };
  const auto with_own = [](Session& session) {
    Job job(session, Line(), TrainerOptions{});
    job.barrier();
  };
  const auto two_jobs = [](Session& session) {
    const Job first(session);
    const Job second(session);
  };
  const auto late = [](Session& session) {
    ProcessGroup group(session);
    Job job(session);
    require(job.option("epochs", 8) == 3, "it was not asked for in time");
  };
  for (const std::size_t ranks : {1, 2}) {
    run_mains(ranks, ends_with(0, alone));
    run_mains(ranks, ends_with(1, alone), {"--seed=7"});
    run_mains(ranks, ends_with(0, with_own));
    run_mains(ranks, ends_with(1, with_own), {"--seed", "7"});
    run_mains(ranks, ends_with(0, two_jobs), {"--seed", "7"});
    run_mains(ranks, ends_with(1, two_jobs), {"--checkpoint", "nowhere"});
    run_mains(ranks, ends_with(1, late), {"--epochs", "3"});
  }
}

BOOST_AUTO_TEST_CASE(launch_takes_a_function_that_makes_the_model_of_each_rank) {
  using Job = Trainer<Scaled>;
  run_mains(2, [](int argc, char** argv) {
    const auto make = [](Session& session) {
      return Scaled(static_cast<double>(session.rank().value()));
    };
    const int status = launch<Job>(argc, argv, make, [](Job& job) {
      require(*job.model().scale == static_cast<double>(job.rank().value()), "another model");
      return 3;
    });
    require(status == 3, "another status");
  });
}

BOOST_AUTO_TEST_CASE(a_job_takes_a_model_or_a_function_and_makes_the_model_when_ranks_have_met) {
  using Job = Trainer<Scaled>;
  run_sessions(2, [](Session& session) {
    const auto scale = [&](Job& job) { return *job.model().scale; };
    const auto mine = static_cast<double>(session.rank().value());
    Job by_session(session, [](Session& s) { return Scaled(10.0 + double(s.rank().value())); });
    require(scale(by_session) == 10 + mine, "a function of the session");
    TrainerOptions options;
    options.seed = Seed{3};
    Job by_nothing(session, [] { return Scaled(4); }, options);
    require(scale(by_nothing) == 4, "a function of nothing");
    Job ready(session, Scaled(5), options);
    require(scale(ready) == 5, "a ready model");
    DistributedDataParallel<Scaled> ddp(by_session.communicator(), [] { return Scaled(6); });
    require(*ddp.model().scale == 6, "a wrapper");
  });
}

BOOST_AUTO_TEST_CASE(a_model_that_cannot_be_made_on_one_rank_is_told_to_all) {
  run_sessions(2, [](Session& session) {
    const auto make = [](Session& s) {
      if (s.rank() == Rank{1}) throw std::runtime_error("no memory for it");
      return Scaled(1);
    };
    std::string said;
    try {
      const Trainer<Scaled> job(session, make);
    } catch (const std::exception& error) {
      said = error.what();
    }
    require(said.find("no memory for it") != std::string::npos, "it said: " + said);
  });
}

/// Ten batches of two points on every rank, four to a step.
template <class Job>
void tail_case(std::size_t ranks, std::uint64_t updates) {
  run<Job>(ranks, [&](Job& job) {
    const auto data = points_of_line(20 * ranks);
    job.optimizer().lr = 0.1;
    job.sampler_options().shuffle = false;
    for (auto epoch : job.epochs(2)) {
      std::size_t batches = 0;
      for (const auto& batch : epoch.batches(data, 2)) {
        job.step(batch);
        ++batches;
      }
      require(batches == 10, "ten batches");
      require(job.ddp().updates() == (epoch.number() + 1) * updates, "updates of an epoch");
    }
    require(job.schedule().steps == 2 * updates, "the curve is as long as the updates");
    require(job.ddp().learning_rate() < 1e-12, "and has come to its end");
  });
}

BOOST_AUTO_TEST_CASE(the_tail_of_an_epoch_is_stepped_or_dropped) {
  for (const std::size_t ranks : {1, 2, 4}) {
    tail_case<Trainer<Line, Accumulate<4>, Schedule<Cosine>>>(ranks, 3);
    tail_case<Trainer<Line, Accumulate<4, Tail::drop>, Schedule<Cosine>>>(ranks, 2);
  }
}

BOOST_AUTO_TEST_CASE(a_tail_counts_its_own_batches_under_both_strategies) {
  // Three batches of two points: a step of two batches, and a tail of one.
  const auto train = [](auto& job) {
    const auto data = points_of_line(6);
    job.optimizer().lr = 0.25;
    job.sampler_options().shuffle = false;
    for (auto epoch : job.epochs(1))
      for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
    // By hand.
    double slope = 0;
    double offset = 0;
    for (const auto& [first, last] : {std::pair{0, 4}, std::pair{4, 6}}) {
      double slopes = 0;
      double offsets = 0;
      for (int i = first; i < last; ++i) {
        const double x = static_cast<double>(i) / 6 - 0.5;
        const double error = slope * x + offset - (3 * x + 1);
        slopes += 2 * error * x / (last - first);
        offsets += 2 * error / (last - first);
      }
      slope -= 0.25 * slopes;
      offset -= 0.25 * offsets;
    }
    require(std::abs(job.param("slope"_p)() - slope) < 1e-12, "the slope");
    require(std::abs(job.param("offset"_p)() - offset) < 1e-12, "the offset");
  };
  run<Trainer<Line, Accumulate<2>>>(1, train);
  run<Trainer<Line, Accumulate<2>, World<1>>>(1, train);
  TrainerOptions two;
  two.replicas = 2;
  run<Trainer<Line, Accumulate<2>, ParallelStrategy<DP>>>(1, train, two);
}

BOOST_AUTO_TEST_CASE(a_break_leaves_no_gradients_to_the_next_epoch) {
  using Job = Trainer<Line, Accumulate<4, Tail::drop>>;
  run<Job>(2, [](Job& job) {
    const auto data = points_of_line(40);
    for (auto epoch : job.epochs(2)) {
      std::size_t batches = 0;
      for (const auto& batch : epoch.batches(data, 2)) {
        job.step(batch);
        if (++batches == 6) break;
      }
    }
    require(job.ddp().updates() == 2, "one whole step of each epoch");
  });
}

BOOST_AUTO_TEST_CASE(an_epoch_that_is_all_tail_is_an_error_where_tails_are_dropped) {
  using Job = Trainer<Line, Accumulate<8, Tail::drop>>;
  const std::string error = failure<Job>(2, [](Job& job) {
    const auto data = points_of_line(12);
    for (auto epoch : job.epochs(1))
      for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
  });
  BOOST_TEST(contains(error, "it has 3 batches, and Accumulate<8, Tail::drop> drops"), error);
}

BOOST_AUTO_TEST_CASE(skipped_steps_are_shown_and_their_losses_left_out) {
  using Job = Trainer<Line, Anomaly<Skip>>;
  run<Job>(2, [](Job& job) {
    InMemoryDataset<double, double> data({1, 2, NAN, 4}, {1, 2, 3, 4});
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, 1)) job.step(batch);
      require(std::isfinite(epoch.summary().loss.value()), "a mean of what is finite");
      require(contains(epoch.summary().text(), "skipped 1"), epoch.summary().text());
    }
    require(std::isfinite(job.param("slope"_p)()), "nothing was spoiled");
  });
}

BOOST_AUTO_TEST_SUITE_END()
