// SPDX-License-Identifier: Apache-2.0
// Trainers that are stopped anywhere and go on: the same bits, and every sample as often as without
// a stop.
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/checkpoint/reader.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/trainer/job_saves.hpp"
#include "lockstep/detail/trainer/process_group.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "temporary_folder.hpp"
#include "train/run_job.hpp"

BOOST_FIXTURE_TEST_SUITE(trainer_resume, Watchdog)

namespace {

using namespace lockstep;
using Points = LabelledBatch<double, double>;
using job_test::require;

/// y = slope x + offset, with the mean of its inputs as a buffer, and the samples that it has seen.
struct Line {
  using Parameters = ParameterList<Parameter<"slope", double>, Parameter<"offset", double, 3>>;
  using Buffers = BufferList<Buffer<"mean", double>>;

  double forward(auto& step, const Points& points) {
    double loss = 0;
    for (std::size_t i = 0; i < points.size(); ++i) loss += std::pow(error(step, points, i), 2);
    if (step.is_training())
      step.buffer("mean"_p)() = 0.9 * step.buffer("mean"_p)() + 0.1 * points.inputs[0];
    return loss / static_cast<double>(points.size());
  }

  void backward(auto& step, const Points& points) {
    const auto n = static_cast<double>(points.size());
    double slope = 0;
    double offset = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      slope += 2 * error(step, points, i) * points.inputs[i] / n;
      offset += 2 * error(step, points, i) / n;
      seen.push_back(points.inputs[i]);
    }
    for (std::size_t i = 0; i < 3; ++i) step.grad("offset"_p)(i) = offset;
    step.ready("offset"_p);
    step.grad("slope"_p)() = slope;
    step.ready("slope"_p);
  }

  static double error(auto& step, const Points& points, std::size_t i) {
    double value = step.param("slope"_p)() * points.inputs[i] - points.labels[i];
    for (std::size_t k = 0; k < 3; ++k) value += step.param("offset"_p)(k);
    return value;
  }

  std::vector<double> seen;
};

/// n points; the input of sample i is i / n.
InMemoryDataset<double, double> points(std::size_t n) {
  std::vector<double> x(n);
  std::vector<double> y(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] = static_cast<double>(i) / static_cast<double>(n);
    y[i] = 3 * x[i] * x[i] + 1;
  }
  return {std::move(x), std::move(y)};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Ends a run where it is, as a kill would.
struct Halted {};

/// Runs `f(job)` on every rank, and returns what was printed on stderr.
template <class Job, class F>
std::string run(std::size_t ranks, const F& f, TrainerOptions options = {}) {
  const std::size_t processes = Job::is_one_process ? 1 : ranks;
  if (Job::is_one_process) options.replicas = ranks;
  const TemporaryFolder scratch;
  const std::string words = scratch / "words";
  spawn(
      AsProcesses{}, processes,
      [&](const Membership& member, Store&) {
        require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
        require(std::freopen(words.c_str(), "a", stderr) != nullptr, "no file for words");
        try {
          Session session(member, Store(member.host, member.port, member.secret, member.timeout));
          Job job(session, {}, options);
          f(job);
          job.finish_saves();
        } catch (const Halted&) {
        }
      },
      std::chrono::seconds(20));
  std::ifstream file(words);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The words with which it fails.
template <class Job, class F>
std::string failure(std::size_t ranks, const F& f, const TrainerOptions& options = {}) {
  try {
    run<Job>(ranks, f, options);
    return "nothing failed";
  } catch (const std::exception& error) {
    return error.what();
  }
}

/// Every tensor of a checkpoint, kept values among them.
std::map<std::string, std::string> tensors(const std::string& path) {
  const detail::CheckpointReader reader(path);
  reader.verify();
  std::map<std::string, std::string> all;
  for (const detail::StoredTensor& tensor : reader.tensors()) {
    std::string& bytes = all[tensor.name];
    bytes.resize(tensor.count * detail::element_size(tensor.kind()));
    reader.read(tensor, 0, tensor.count, reinterpret_cast<std::byte*>(bytes.data()));
  }
  return all;
}

/// The records of epochs in a log, by epoch, without times.
std::map<int, nlohmann::json> records(const std::string& path) {
  std::map<int, nlohmann::json> all;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    nlohmann::json record = nlohmann::json::parse(line);
    if (!record.contains("epoch")) continue;
    for (const char* time : {"seconds", "data_seconds", "step_seconds", "evaluate_seconds",
                             "epoch_seconds", "run_seconds", "resident_bytes"})
      record.erase(time);
    all[record["epoch"]] = record;
  }
  return all;
}

constexpr std::size_t samples = 13;
constexpr std::size_t batch_size = 2;
constexpr std::uint64_t epochs = 2;

/// Trains from a checkpoint or anew, calls `at(job)` at every point at which a run may end, and
/// saves the end.
template <class Job, class At>
void train(Job& job, const std::string& from, const std::string& to, const At& at) {
  const auto data = points(samples);
  RandomStream noise = job.random();
  std::uint64_t batches = 0;
  std::string trail;
  job.keep("noise", noise);
  job.keep("batches", batches);
  job.keep("trail", trail);
  job.keep("seen", job.model().seen);
  job.optimizer().lr = 0.05;
  if (!from.empty()) job.resume(from);
  for (auto epoch : job.epochs(epochs)) {
    if (trail.size() == epoch.number()) at(job);  // before the first batch
    for (const auto& batch : epoch.batches(data, batch_size)) {
      if (batches % 3 == 1) at(job);  // a batch that is not stepped yet is not over
      Points noisy = batch;
      for (double& label : noisy.labels) label += 0.01 * noise.normal();
      job.step(noisy);
      if (++batches % 4 == 0) job.evaluate(data, 4, "in_loop");
      at(job);
    }
    at(job);  // behind the data
    job.evaluate(data, 4);
    trail = std::string(epoch.number() + 1, 'e');
    at(job);  // behind the evaluation
  }
  require(job.summary().epoch == epochs && job.summary().loss && !job.summary().scores.empty(),
          "the last epoch has no figures");
  if (!to.empty()) job.save(to);
}

template <class Job>
std::size_t points_of_halt(std::size_t ranks) {
  const TemporaryFolder scratch;
  run<Job>(ranks, [&](Job& job) {
    std::size_t points = 0;
    train(job, "", "", [&](Job&) { ++points; });
    if (job.rank() == Rank{0}) std::ofstream(scratch / "points") << points;
  });
  std::size_t points = 0;
  std::ifstream(scratch / "points") >> points;
  return points;
}

/// Goes on in new processes from every point of a run, with the log as it was there. One run saves
/// at all points; it ends as one that has saved nothing.
template <class Job>
void check_every_point(std::size_t ranks) {
  const TemporaryFolder scratch;
  TrainerOptions options;
  options.seed = Seed{5};
  const auto run_whole = [&](const std::string& name, const auto& at) {
    options.log = scratch / (name + ".log");
    run<Job>(ranks, [&](Job& job) { train(job, "", scratch / name, at); }, options);
    return std::pair(tensors(scratch / name), records(options.log));
  };
  const auto whole = run_whole("whole", [](Job&) {});
  BOOST_TEST_REQUIRE(whole.second.size() == epochs);
  const auto at_point = [&](const char* what, std::size_t point) {
    return scratch / (what + std::to_string(point));
  };
  std::size_t point = 0;
  const auto saving = run_whole("saving", [&](Job& job) {  // in another process
    job.save(at_point("saved", ++point));
    if (job.rank() == Rank{0}) std::filesystem::copy(options.log, at_point("log", point));
  });
  BOOST_TEST((saving == whole), "saves have changed the run");
  while (std::filesystem::exists(at_point("log", ++point))) {
    BOOST_TEST_CONTEXT(ranks << " ranks, gone on from point " << point) {
      options.log = at_point("log", point);
      run<Job>(
          ranks,
          [&](Job& job) { train(job, at_point("saved", point), scratch / "resumed", [](Job&) {}); },
          options);
      BOOST_TEST((tensors(scratch / "resumed") == whole.first));
      const auto log = records(options.log);
      BOOST_TEST((log == whole.second), nlohmann::json(log).dump()
                                            << " and not " << nlohmann::json(whole.second).dump());
    }
  }
  BOOST_TEST(point > 4 * epochs);  // one batch each, before it, behind it and behind the evaluation
}

using Shared = Trainer<Line, Optimizer<AdamW>, Schedule<Cosine>, Accumulate<2>, Clip<0.5>>;
using Replicated = Trainer<Line, Optimizer<SGDMomentum>, Sharding<Replicated>, Schedule<Cosine>,
                           Accumulate<3, Tail::drop>, Sampler<Distributed, Masked, KeyedShuffle>,
                           Buffers<Local>, Anomaly<Skip>>;
using Replicas = Trainer<Line, ParallelStrategy<DP>, Optimizer<AdamW>, Accumulate<3>,
                         Sampler<Distributed, DropLast>>;

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_that_share_memory_go_on_from_any_point) {
  for (const std::size_t ranks : {1, 2, 4}) check_every_point<Shared>(ranks);
}

BOOST_AUTO_TEST_CASE(ranks_with_their_own_parameters_go_on_from_any_point) {
  for (const std::size_t ranks : {1, 2, 3}) check_every_point<Replicated>(ranks);
}

BOOST_AUTO_TEST_CASE(replicas_go_on_from_any_point) {
  for (const std::size_t ranks : {1, 3}) check_every_point<Replicas>(ranks);
}

namespace {

using Averaging = Trainer<Line, Buffers<Synced>>;

/// All ranks have the average of what they had, which was not the same.
void require_average(Averaging& job, double before, const std::string& when) {
  const double mean = job.all_reduce(before, Average{});
  for (const double value : job.all_gather(job.ddp().buffer("mean"_p)()))
    require(value == mean, "no average " + when);
  require(job.world_size() == WorldSize{1} || job.all_reduce(before, Max{}) != mean,
          "ranks were not different " + when);
}

/// Averages at every place where a trainer makes them.
void train_averaging(Averaging& job, const std::string& file) {
  const auto data = points(48);
  double before = 0;
  const auto step = [&](const Points& batch) {
    job.step(batch);
    before = job.ddp().buffer("mean"_p)();
  };
  for (auto epoch : job.epochs(2)) {
    if (epoch.number() != 0) require_average(job, before, "at the end of the epoch");
    std::size_t steps = 0;
    for (const auto& batch : epoch.batches(data, 2)) {
      step(batch);
      if (++steps == 2) {
        job.save(file);
        require_average(job, before, "before a save");
        double saved = 0;
        std::memcpy(&saved, tensors(file).at("mean").data(), sizeof saved);
        require(saved == job.ddp().buffer("mean"_p)(), "the file has another mean");
      }
      if (steps != 4) continue;
      job.evaluate(data, 4);
      require_average(job, before, "before an evaluation");
    }
    require_average(job, before, "behind the data");
    Points more;
    more.inputs = {static_cast<double>(job.rank().value())};
    more.labels = {1};
    step(more);  // of no loop
  }
  require_average(job, before, "at the end of the last epoch");
}

}  // namespace

BOOST_AUTO_TEST_CASE(synced_buffers_are_averaged_where_a_model_is_used_elsewhere) {
  for (const std::size_t ranks : {1, 2, 4}) {
    const TemporaryFolder scratch;
    run<Averaging>(ranks, [&](Averaging& job) { train_averaging(job, scratch / "file"); });
  }
}

// The average of seven equal numbers may be another one, and that one's average yet another.
BOOST_AUTO_TEST_CASE(a_loop_that_was_over_when_the_job_was_saved_is_not_averaged_again) {
  const TemporaryFolder scratch;
  const auto data = points(samples);
  const auto mean = [](Averaging& job) { return job.ddp().buffer("mean"_p)(); };
  run<Averaging>(7, [&](Averaging& job) {
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, batch_size)) job.step(batch);
      for (int i = 1; i < 500; ++i) {
        const auto set = [&] {
          job.initialize([&](auto& initial) { initial.buffer("mean"_p)() = i / 97.0; });
        };
        set();
        job.ddp().synchronize_buffers();
        const double once = mean(job);
        job.ddp().synchronize_buffers();
        if (mean(job) == once) continue;
        set();
        job.save(scratch / "saved");
        throw Halted();
      }
    }
  });
  run<Averaging>(7, [&](Averaging& job) {
    job.resume(scratch / "saved");  // an error if no number was found
    const double saved = mean(job);
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, batch_size)) job.step(batch);
      require(mean(job) == saved, "averaged again");
    }
    require(mean(job) != saved, "the end of an epoch has not averaged");
  });
}

BOOST_AUTO_TEST_CASE(a_job_that_goes_on_has_the_averages_of_the_one_that_saved) {
  for (const std::size_t ranks : {1, 2, 3}) {  // an average of three equal numbers may be another
    const std::size_t last = points_of_halt<Averaging>(ranks);
    for (std::size_t save = ranks; save <= last; save += 3) {
      BOOST_TEST_CONTEXT(ranks << " ranks, saved at point " << save << " of " << last) {
        const TemporaryFolder scratch;
        run<Averaging>(ranks, [&](Averaging& job) {
          std::size_t point = 0;
          train(job, "", scratch / "whole", [&](Averaging&) {
            if (++point == save) job.save(scratch / "saved");
          });
        });
        run<Averaging>(ranks, [&](Averaging& job) {
          train(job, scratch / "saved", scratch / "resumed", [](Averaging&) {});
        });
        BOOST_TEST((tensors(scratch / "resumed") == tensors(scratch / "whole")));
      }
    }
  }
}

namespace {

using Counting = Trainer<Line, Sampler<Distributed, Exact>, Schedule<Cosine>>;

/// Appends what all ranks have seen to a file.
void note_seen(Counting& job, const std::string& path) {
  const Gathered<double> all = job.all_gather_variable(job.model().seen);
  job.model().seen.clear();
  if (job.rank() != Rank{0}) return;
  std::ofstream file(path, std::ios::app);
  file.precision(17);
  for (const double input : all.values) file << input << '\n';
}

}  // namespace

BOOST_AUTO_TEST_CASE(another_number_of_ranks_takes_the_samples_that_are_left) {
  constexpr std::size_t n = 48;
  struct Change {
    std::size_t before, after, batches;
  };
  for (const auto& [before, after, batches] :
       {Change{2, 4, 1}, Change{2, 4, 2}, Change{4, 2, 3}, Change{2, 1, 5}, Change{1, 3, 4}}) {
    BOOST_TEST_CONTEXT(before << " ranks, then " << after) {
      const TemporaryFolder scratch;
      run<Counting>(before, [&](Counting& job) {
        const auto data = points(n);
        std::size_t steps = 0;
        for (auto epoch : job.epochs(2)) {
          for (const auto& batch : epoch.batches(data, 3)) {
            job.step(batch);
            if (++steps != batches) continue;
            job.save(scratch / "halted");
            note_seen(job, scratch / "seen");
            throw Halted();
          }
        }
      });
      run<Counting>(after, [&](Counting& job) {
        const auto data = points(n);
        job.optimizer().lr = 1e-3;
        job.resume(scratch / "halted");
        bool is_first = true;
        for (auto epoch : job.epochs(2)) {
          for (const auto& batch : epoch.batches(data, 3)) {
            if (std::exchange(is_first, false)) {
              // The curve goes on at the same fraction of its length, to the nearest update.
              const double done = static_cast<double>(3 * before * batches) / (2 * n);
              const double rate = 1e-3 * (1 + std::cos(std::numbers::pi * done)) / 2;
              const double update = 1e-3 * 1.6 / static_cast<double>(job.schedule().steps);
              require(std::abs(job.ddp().learning_rate() - rate) < 0.8 * update,
                      "the curve has jumped");
            }
            job.step(batch);
          }
          if (epoch.number() == 0) note_seen(job, scratch / "seen");
        }
        require(job.ddp().learning_rate() < 1e-4, "the curve is not at its end");
      });
      std::map<double, int> seen;
      std::ifstream file(scratch / "seen");
      for (double input = 0; file >> input;) ++seen[input];
      BOOST_TEST(seen.size() == n);
      for (const auto& [input, times] : seen) BOOST_TEST(times == 1, "sample " << input * n);
    }
  }
}

namespace {

void check_every_interval(std::size_t ranks) {
  using Every = detail::CheckpointFlags::Every;
  const TemporaryFolder scratch;
  run<Shared>(ranks, [&](Shared& job) { train(job, "", scratch / "whole", [](Shared&) {}); });
  const auto whole = tensors(scratch / "whole");
  const std::optional<Every> intervals[] = {Every{2, {}}, Every{0, std::chrono::milliseconds(1)},
                                            std::nullopt};
  std::size_t folders = 0;
  for (const std::optional<Every>& every : intervals) {
    for (const std::size_t halt : {2, 7, 12}) {
      TrainerOptions options;
      options.checkpoint.folder = scratch / std::to_string(++folders);
      options.checkpoint.every = every;
      options.log = scratch / "log";
      run<Shared>(
          ranks,
          [&](Shared& job) {
            std::size_t point = 0;
            train(job, "", "", [&](Shared&) {
              if (++point == halt) throw Halted();
            });
          },
          options);
      options.checkpoint.resume = true;
      const auto go_on = [&] {
        return run<Shared>(
            ranks, [&](Shared& job) { train(job, "", scratch / "resumed", [](Shared&) {}); },
            options);
      };
      go_on();
      BOOST_TEST((tensors(scratch / "resumed") == whole));
      // A job that was over is over.
      const std::string words = go_on();
      BOOST_TEST(
          contains(words, "lockstep: resumed from '" + *options.checkpoint.folder + "/step-"),
          words);
      BOOST_TEST(contains(words, ", after epoch 2, step 4"), words);
      BOOST_TEST((tensors(scratch / "resumed") == whole));
    }
  }
  std::ifstream log(scratch / "log");
  BOOST_TEST(contains({std::istreambuf_iterator<char>(log), {}}, R"({"resumed":{"from":)"));
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_run_that_ends_anywhere_goes_on_from_its_folder) { check_every_interval(2); }

// The update in which a checkpoint is due is then one of too few micro-batches, at an epoch's end.
BOOST_AUTO_TEST_CASE(a_checkpoint_that_is_due_with_the_tail_of_an_epoch_is_saved) {
  check_every_interval(3);
}

BOOST_AUTO_TEST_CASE(a_request_to_stop_saves_and_ends_all_ranks) {
  const TemporaryFolder scratch;
  run<Shared>(2, [&](Shared& job) { train(job, "", scratch / "whole", [](Shared&) {}); });
  TrainerOptions options;
  options.checkpoint.folder = scratch / "run";
  for (int times = 0; times < 3; ++times) {
    options.checkpoint.resume = times != 0;
    run<Shared>(
        2,
        [&](Shared& job) {
          try {
            std::size_t point = 0;
            train(job, "", "", [&](Shared&) {
              if (++point == 3 && job.rank() == Rank{1}) std::raise(SIGTERM);
            });
            require(times != 0, "nobody has stopped");
          } catch (const Stopped& stopped) {
            require(stopped.signal() == SIGTERM, "another signal");
            require(::access(stopped.saved().c_str(), F_OK) == 0, "nothing is saved");
            throw Halted();
          }
        },
        options);
  }
  options.checkpoint.resume = true;
  run<Shared>(
      2, [&](Shared& job) { train(job, "", scratch / "resumed", [](Shared&) {}); }, options);
  BOOST_TEST((tensors(scratch / "resumed") == tensors(scratch / "whole")));
}

BOOST_AUTO_TEST_CASE(the_best_epoch_of_a_trainer_is_kept) {
  const TemporaryFolder scratch;
  TrainerOptions options;
  options.checkpoint.folder = scratch / "run";
  options.checkpoint.best_by = "test_loss";
  options.checkpoint.keep = 1;
  run<Shared>(
      1,
      [&](Shared& job) {
        const auto data = points(8);
        double least = std::numeric_limits<double>::infinity();
        job.optimizer().lr = 3;  // so much that some epochs are worse than the one before
        for (auto epoch : job.epochs(6)) {
          for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
          least = std::min(least, job.evaluate(data, 4)["loss"]);
        }
        job.finish_saves();
        require(job.checkpoints()->best() == least, "not the best score");
        require(job.checkpoints()->latest() == scratch / "run/step-000000000006.safetensors",
                "not the latest");
        job.load(job.checkpoints()->best_path().value());
        require(job.evaluate(data, 4)["loss"] == least, "not the best model");
      },
      options);
  options.checkpoint.best_by = "test_accuracy";
  options.checkpoint.folder = scratch / "other";
  const std::string words = failure<Shared>(
      2,
      [](Shared& job) {
        const auto data = points(8);
        for (auto epoch : job.epochs(1)) {
          for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
          job.evaluate(data, 4);
        }
      },
      options);
  BOOST_TEST(contains(words, "no score 'test_accuracy' to choose the best by; it has test_loss"),
             words);
}

namespace {

using Wrapped = DistributedDataParallel<Line, Optimizer<AdamW>>;

/// A loop of one's own, of four epochs whose scores are given. Halts at a point.
void by_hand(Session& session, const CheckpointOptions& options, const std::string& to,
             std::size_t halt) {
  ProcessGroup group(session);
  const auto data = points(samples);
  DistributedSampler<> sampler(data.size(), group.world_size(), group.rank());
  DataLoader loader(data, sampler, {.batch_size = 3});
  Wrapped ddp(*group);
  ddp.optimizer().lr = 0.1;
  std::uint64_t batches = 0;
  const StateValues values{{"batches", batches}, {"seen", ddp.model().seen}};
  Checkpoints checkpoints(ddp, options);
  LoadOptions mine;
  mine.values = values;
  const std::optional<Resumed> from = checkpoints.resume(ddp, mine);
  if (from && from->position) loader.resume(*from->position);
  const double scores[] = {std::numeric_limits<double>::quiet_NaN(), 0.5, 0.7, 0.6};
  std::size_t points = 0;
  for (std::uint64_t epoch = from ? from->epoch : 0; epoch < 4; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    for (const auto& batch : loader) {
      ddp.forward(batch).backward().reduce().update();
      ++batches;
      checkpoints.step(ddp, [&] {
        return SaveOptions{.epoch = epoch, .position = loader.state(), .values = values};
      });
      if (++points == halt) throw Halted();
    }
    const Scores of_epoch({{"accuracy", scores[epoch], 1}});
    checkpoints.end_epoch(
        ddp, SaveOptions{.epoch = epoch + 1, .scores = of_epoch, .values = values}, epoch == 3);
    if (++points == halt) throw Halted();
  }
  checkpoints.finish(ddp);
  require(checkpoints.best() == 0.7, "another best score");
  save(ddp, to, {.values = values});
}

/// Runs it on two ranks.
std::string run_by_hand(const CheckpointOptions& options, const std::string& to,
                        std::size_t halt = 0) {
  std::string failed;
  try {
    spawn(
        AsProcesses{}, 2,
        [&](const Membership& member, Store&) {
          require(std::freopen("/dev/null", "w", stderr) != nullptr, "no /dev/null");
          try {
            Session session(member, Store(member.host, member.port, member.secret, member.timeout));
            by_hand(session, options, to, halt);
          } catch (const Halted&) {
          }
        },
        std::chrono::seconds(20));
  } catch (const std::exception& error) {
    failed = error.what();
  }
  return failed;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_loop_of_ones_own_goes_on_from_its_folder) {
  const TemporaryFolder scratch;
  CheckpointOptions options;
  options.best_by = "accuracy";
  options.folder = scratch / "whole";
  BOOST_TEST(run_by_hand(options, scratch / "whole.end") == "");
  const auto whole = tensors(scratch / "whole.end");
  // The best is that of the third epoch: after 3 * 3 updates.
  BOOST_TEST((tensors(options.folder + "/best.safetensors") ==
              tensors(options.folder + "/step-000000000009.safetensors")));
  options.every_steps = 3;
  options.resume = true;
  for (const std::size_t halt : {1, 4, 5, 9, 11, 15}) {
    BOOST_TEST_CONTEXT("halted at point " << halt) {
      options.folder = scratch / std::to_string(halt);
      BOOST_TEST(run_by_hand(options, "", halt) == "");
      BOOST_TEST(run_by_hand(options, scratch / "end") == "");
      BOOST_TEST((tensors(scratch / "end") == whole));
    }
  }
  options.resume = false;
  const std::string words = run_by_hand(options, scratch / "end");
  BOOST_TEST(contains(words, "add --resume to go on from there, or name another folder"), words);
}

BOOST_AUTO_TEST_CASE(a_break_is_the_end_of_the_data) {
  const TemporaryFolder scratch;
  const auto program = [&](Shared& job, const std::string& from, const std::string& to) {
    const auto data = points(samples);
    job.optimizer().lr = 0.05;
    if (!from.empty()) job.resume(from);
    for (auto epoch : job.epochs(2)) {
      std::size_t batches = 0;
      for (const auto& batch : epoch.batches(data, 2)) {
        job.step(batch);
        if (epoch.number() == 0 && ++batches == 3) break;
      }
      if (epoch.number() == 0 && from.empty()) job.save(scratch / "broken");
      job.evaluate(data, 4);
    }
    job.save(to);
  };
  run<Shared>(2, [&](Shared& job) { program(job, "", scratch / "whole"); });
  run<Shared>(2, [&](Shared& job) { program(job, scratch / "broken", scratch / "resumed"); });
  BOOST_TEST((tensors(scratch / "resumed") == tensors(scratch / "whole")));
}

BOOST_AUTO_TEST_CASE(a_program_with_several_loops_goes_on_in_the_one_that_was_under_way) {
  const TemporaryFolder scratch;
  const auto program = [&](Shared& job, const std::string& to, const auto& at) {
    const auto data = points(samples);
    const auto more = points(8);
    std::size_t batches = 0;
    job.optimizer().lr = 0.05;
    for (const std::uint64_t count : {1, 2}) {
      for (auto epoch : job.epochs(count)) {
        for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
        for (const auto& batch : epoch.batches(more, 1)) {
          job.step(batch);
          at(++batches);
        }
      }
    }
    job.save(to);
  };
  run<Shared>(2, [&](Shared& job) { program(job, scratch / "whole", [](std::size_t) {}); });
  run<Shared>(2, [&](Shared& job) {
    program(job, "", [&](std::size_t batches) {
      if (batches != 6) return;
      job.save(scratch / "halted");
      throw Halted();
    });
  });
  run<Shared>(2, [&](Shared& job) {
    for (const char* to : {"once", "twice"}) {  // in one process, too
      job.resume(scratch / "halted");
      program(job, scratch / to, [](std::size_t) {});
    }
  });
  BOOST_TEST((tensors(scratch / "once") == tensors(scratch / "whole")));
  BOOST_TEST((tensors(scratch / "twice") == tensors(scratch / "whole")));
}

BOOST_AUTO_TEST_CASE(what_is_loaded_is_the_model_and_the_optimizer) {
  const TemporaryFolder scratch;
  run<Shared>(2, [&](Shared& job) {
    train(job, "", scratch / "file", [](Shared&) {});
    const double slope = job.param("slope"_p)();
    job.initialize([](auto& initial) { initial.param("slope"_p)() = 7; });
    job.load_parameters(scratch / "file");
    require(job.param("slope"_p)() == slope, "another slope");
    job.optimizer().lr = 9;
    require(job.load(scratch / "file").missing.empty(), "something is missing");
    require(job.optimizer().lr == 0.05, "not the rate of the file");
    // The trainer has given the curve its length, and the next epochs have one of their own.
    const auto data = points(samples);
    for (auto epoch : job.epochs(1)) {
      require(epoch.number() == 0, "load does not go on");
      for (const auto& batch : epoch.batches(data, 4)) {
        job.step(batch);
        require(job.ddp().learning_rate() > 0.01, "the curve has not begun anew");
        break;
      }
    }
  });
}

BOOST_AUTO_TEST_CASE(a_folder_of_which_every_checkpoint_is_damaged_is_rejected_and_stays_as_it_is) {
  const TemporaryFolder scratch;
  const std::string folder = scratch / "run";
  TrainerOptions options;
  options.checkpoint.folder = folder;
  options.checkpoint.best_by = "test_loss";
  const auto whole = [](Shared& job) { train(job, "", "", [](Shared&) {}); };
  run<Shared>(2, whole, options);
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::ifstream file(entry.path(), std::ios::binary);
      if (entry.path().extension() == ".safetensors")
        files[entry.path().filename()] = {std::istreambuf_iterator<char>(file), {}};
    }
    return files;
  };
  for (const auto& [name, bytes] : contents()) {
    if (name.starts_with("best")) continue;  // a second name of one of the others
    std::fstream file(folder + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put(static_cast<char>(bytes[bytes.size() - 3] ^ 1));
  }
  const auto damaged = contents();
  BOOST_TEST(damaged.contains("best.safetensors"));
  BOOST_TEST(damaged.size() > 2u);
  options.checkpoint.resume = true;
  for (const std::size_t ranks : {1, 2, 4}) {
    const std::string words = failure<Shared>(ranks, whole, options);
    BOOST_TEST(contains(words, "launch: no checkpoint in '" + folder + "' is valid: 'step-"),
               words);
    for (const auto& [name, bytes] : damaged)
      BOOST_TEST(((name.find(".rank-") != std::string::npos) || contains(words, "'" + name + "'")),
                 name << " in: " << words);
    BOOST_TEST(contains(words, "nothing was deleted"), words);
    BOOST_TEST((contents() == damaged));
  }
  const std::string words = failure<Shared>(2, [&](Shared& job) { job.resume(folder); });
  BOOST_TEST(contains(words, "resume: no checkpoint in '" + folder + "' is valid: 'step-"), words);
  BOOST_TEST((contents() == damaged));
}

BOOST_AUTO_TEST_CASE(what_cannot_be_saved_or_resumed_is_said_on_all_ranks) {
  const TemporaryFolder scratch;
  std::filesystem::create_directory(scratch / "empty");
  const auto steps = [](Shared& job) {
    const auto data = points(samples);
    for (auto epoch : job.epochs(40))
      for (const auto& batch : epoch.batches(data, 2)) job.step(batch);
  };
  std::string words = failure<Shared>(2, [&](Shared& job) { job.resume(scratch / "missing"); });
  BOOST_TEST(
      contains(words, "missing' cannot be read: No such file or directory; name a checkpoint"),
      words);
  words = failure<Shared>(2, [&](Shared& job) { job.resume(scratch / "empty"); });
  BOOST_TEST(contains(words, "there is no checkpoint in '" + scratch.path + "/empty'"), words);

  TrainerOptions options;
  options.checkpoint.folder = scratch / "empty";
  options.checkpoint.resume = true;
  words = run<Shared>(2, [&](Shared& job) { train(job, "", "", [](Shared&) {}); }, options);
  BOOST_TEST(contains(words, "no checkpoint in '" + scratch.path + "/empty': training starts anew"),
             words);
  words = failure<Shared>(
      2,
      [](Shared& job) {
        Points batch;
        const std::size_t first[] = {0};
        points(4).load(first, batch);
        job.step(batch);
      },
      options);
  BOOST_TEST(contains(words, "call job.resume() or job.epochs() before the first step"), words);
  options.checkpoint.resume = false;
  words = failure<Shared>(2, steps, options);
  BOOST_TEST(contains(words, "holds a checkpoint of step 4, and this job begins at step 0"), words);

  words = failure<Shared>(2, [&](Shared& job) {
    job.save(scratch / "no/folder", {.asynchronous = true});
    steps(job);
  });
  BOOST_TEST(contains(words, "no/folder"), words);
  words = failure<Shared>(2, [&](Shared& job) {  // nothing comes after it but the end
    job.save(scratch / "no/folder", {.asynchronous = true});
  });
  BOOST_TEST(contains(words, "no/folder"), words);
  words = failure<Shared>(2, [&](Shared& job) {
    job.checkpoints({.folder = scratch / "run", .every_steps = 1, .asynchronous = false});
    const auto data = points(samples);
    for (auto epoch : job.epochs(2)) {
      for (const auto& batch : epoch.batches(data, 2)) {
        job.step(batch);
        if (job.rank() == Rank{0}) std::filesystem::remove_all(scratch / "run");
      }
    }
  });
  BOOST_TEST(contains(words, scratch.path + "/run"), words);
  words = failure<Shared>(1, [&](Shared& job) {
    job.checkpoints({.folder = scratch / "two"});
    const Checkpoints other(job.ddp(), {.folder = scratch / "two"});
  });
  BOOST_TEST(contains(words, scratch.path + "/two"), words);
  words = failure<Shared>(1, [](Shared& job) {
    double value = 0;
    job.keep("lockstep/value", value);
  });
  BOOST_TEST(contains(words, "names that begin with lockstep/ are lockstep's own"), words);
}

BOOST_AUTO_TEST_SUITE_END()
