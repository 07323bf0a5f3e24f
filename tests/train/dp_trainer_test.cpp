// SPDX-License-Identifier: Apache-2.0
// A trainer whose strategy is DP: the same loop, data and scores as with DDP.
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "launch/watchdog.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

BOOST_FIXTURE_TEST_SUITE(dp_trainer, Watchdog)

namespace {

using namespace lockstep;
using Points = LabelledBatch<double, double>;

/// y = slope x + offset.
struct Line {
  using Parameters = ParameterList<Parameter<"slope", double>, Parameter<"offset", double>>;

  double forward(auto& step, const Points& points) {
    double loss = 0;
    for (std::size_t i = 0; i < points.size(); ++i) loss += std::pow(error(step, points, i), 2);
    return loss / static_cast<double>(points.size());
  }
  void backward(auto& step, const Points& points) {
    double slope = 0, offset = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      slope += 2 * error(step, points, i) * points.inputs[i] / static_cast<double>(points.size());
      offset += 2 * error(step, points, i) / static_cast<double>(points.size());
    }
    step.grad("offset"_p)() = offset;
    step.ready("offset"_p);
    step.grad("slope"_p)() = slope;
    step.ready("slope"_p);
  }
  static double error(auto& step, const Points& points, std::size_t i) {
    return step.param("slope"_p)() * points.inputs[i] + step.param("offset"_p)() - points.labels[i];
  }
};

InMemoryDataset<double, double> points_of_curve(std::size_t n) {
  std::vector<double> x(n), y(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<double>(i) / static_cast<double>(n) - 0.5;
    y[i] = 3 * x[i] * x[i] + x[i] + 1;
  }
  return {std::move(x), std::move(y)};
}

struct Outcome {
  double slope, offset, loss, score;
};

/// The program that both strategies run; only its policies and the batch size of a rank differ.
template <class Job>
Outcome train(Job& job, std::size_t global_batch) {
  const auto data = points_of_curve(36);
  const auto other = points_of_curve(7);
  job.optimizer().lr = 0.2;
  Scores scores;
  double loss = 0;
  for (auto epoch : job.epochs(4)) {
    for (const auto& batch : epoch.batches(data, global_batch / job.world_size().value()))
      job.step(batch);
    scores = job.evaluate(other, 4);
    loss = epoch.summary().loss.value();
  }
  return {job.param("slope"_p)(), job.param("offset"_p)(), loss, scores["loss"]};
}

template <class... Ps>
Outcome with_ddp(std::size_t ranks) {
  using Job = Trainer<Line, ParallelStrategy<DDP>, Ps...>;
  const ranks::Common<Outcome> outcome;
  spawn(
      AsProcesses{}, ranks,
      [&](const Membership& member, Store&) {
        if (std::freopen("/dev/null", "w", stdout) == nullptr) std::abort();
        Session session(member, Store(member.host, member.port, member.secret, member.timeout));
        Job job(session, {}, {.seed = Seed{5}, .log = "", .replicas = {}});
        const Outcome own = train(job, 12);
        if (job.rank() == Rank{0}) *outcome = own;
      },
      std::chrono::seconds(30));
  return *outcome;
}

template <class... Ps>
Outcome with_dp(std::size_t replicas) {
  using Job = Trainer<Line, ParallelStrategy<DP>, Ps...>;
  Session session = detail::join_alone();
  Job job(session, {}, {.seed = Seed{5}, .log = "", .replicas = replicas});
  BOOST_TEST(job.dp().replicas() == replicas);
  BOOST_TEST((job.world_size() == WorldSize{1}));
  return train(job, 12);
}

void require_close(const Outcome& a, const Outcome& b) {
  BOOST_TEST(std::abs(a.slope - b.slope) < 1e-12);
  BOOST_TEST(std::abs(a.offset - b.offset) < 1e-12);
  BOOST_TEST(std::abs(a.loss - b.loss) < 1e-12);
  BOOST_TEST(std::abs(a.score - b.score) < 1e-12);
}

/// What `main` of such a job returns, and what it has said.
template <class Job>
std::pair<int, std::string> run_main(std::vector<std::string> arguments, const auto& f) {
  arguments.insert(arguments.begin(), "trainer");
  std::vector<char*> words;
  words.reserve(arguments.size());
  for (std::string& argument : arguments) words.push_back(argument.data());
  std::fflush(nullptr);
  std::FILE* const said = std::tmpfile();
  const int before = ::dup(2);
  ::dup2(::fileno(said), 2);
  const int status = launch<Job>(static_cast<int>(words.size()), words.data(), f);
  std::fflush(nullptr);
  ::dup2(before, 2);
  ::close(before);
  std::string text(4096, '\0');
  std::rewind(said);
  text.resize(std::fread(text.data(), 1, text.size(), said));
  std::fclose(said);
  return {status, text};
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_job_trains_alike_with_either_strategy_at_the_same_global_batch) {
  for (const std::size_t n : {1, 2, 3}) {
    require_close(with_dp<Optimizer<Adam>>(n), with_ddp<Optimizer<Adam>>(n));
    require_close(with_dp<Optimizer<SGDMomentum>, Schedule<Cosine>, LossOnReplica>(n),
                  with_ddp<Optimizer<SGDMomentum>, Schedule<Cosine>>(n));
  }
}

BOOST_AUTO_TEST_CASE(a_backend_has_no_say_in_one_process) {
  require_close(with_dp<Backend<Gloo>>(2), with_dp<>(2));
  require_close(with_dp<Backend<Hierarchical<Shm, Gloo>>, Sampler<Distributed, Exact>>(2),
                with_dp<>(2));
}

BOOST_AUTO_TEST_CASE(the_command_line_says_how_many_replicas) {
  using Job = Trainer<Line, ParallelStrategy<DP>>;
  std::size_t replicas = 0;
  std::vector<std::string> left;
  const auto look = [&](Job& job) {
    replicas = job.dp().replicas();
    left = job.arguments();
  };
  BOOST_TEST(run_main<Job>({"--replicas", "3", "10"}, look).first == 0);
  BOOST_TEST(replicas == 3u);
  BOOST_TEST((left == std::vector<std::string>{"trainer", "10"}));
  BOOST_TEST(run_main<Job>({"--ranks=2"}, look).first == 0);
  BOOST_TEST(replicas == 2u);
  BOOST_TEST(run_main<Job>({}, look).first == 0);
  BOOST_TEST(replicas == std::max(1u, std::thread::hardware_concurrency()));
  BOOST_TEST(run_main<Job>({}, [](Job&) { return 3; }).first == 3);
}

BOOST_AUTO_TEST_CASE(several_processes_are_rejected_with_what_to_do) {
  using Job = Trainer<Line, ParallelStrategy<DP>, World<2>>;
  const auto run = [](Job&) {};
  const auto expect = [&](const std::pair<int, std::string>& end, const std::string& words) {
    BOOST_TEST(end.first == 1);
    BOOST_TEST(end.second.find(words) != std::string::npos, end.second);
  };
  expect(run_main<Job>({"--ranks", "2", "--nodes", "2"}, run), "with torchrun, srun or mpirun");
  expect(run_main<Job>({"--replicas", "3"}, run), "the program is for 2 ranks");
  ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  ::setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
  ::setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1);
  const auto among_others = run_main<Job>({}, run);
  for (const char* name : {"SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"})
    ::unsetenv((std::string("OMPI_COMM_WORLD_") + name).c_str());
  expect(among_others, "start it once, with --ranks 4");
}

BOOST_AUTO_TEST_CASE(what_a_replica_throws_ends_the_program_with_its_words) {
  using Job = Trainer<Line, ParallelStrategy<DP>, World<2>>;
  const auto end = run_main<Job>({}, [](Job& job) { job.step(Points{}); });
  BOOST_TEST(end.first == 1);
  BOOST_TEST(end.second.find("lockstep: DP: the batch is empty") != std::string::npos, end.second);
}

BOOST_AUTO_TEST_SUITE_END()
