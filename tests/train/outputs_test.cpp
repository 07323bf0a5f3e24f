// SPDX-License-Identifier: Apache-2.0
// What a program asks a job for: outputs, tensors, first values, and the whole loop in one call.
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/run_job.hpp"

BOOST_FIXTURE_TEST_SUITE(outputs, Watchdog)

namespace {

using namespace lockstep;
using Rows = LabelledBatch<double, double>;

using job_test::failure;
using job_test::require;
using job_test::run;

bool near(double a, double b) { return std::abs(a - b) < 1e-12; }

/// y = weight x + offset for rows of three, squared error. It notes what steps say of themselves.
struct Plane {
  using Parameters = ParameterList<Parameter<"weight", double, 3>, Parameter<"offset", double>>;
  using Buffers = BufferList<Buffer<"mean", double, 2>>;
  using Output = OutputOf<double, 2>;

  double forward(auto& step, const Rows& batch) {
    trained.insert({"forward", step.is_training()});
    require(batch.width == 3, "rows of another width");
    own.resize(2 * batch.size());
    write(step, batch, own.data());
    slopes.resize(2 * batch.size());
    return loss_of(batch, own.data(), slopes.data());
  }
  void backward(auto& step, const Rows& batch) { backward_from(step, batch, slopes.data()); }

  void predict(auto& step, const Rows& batch, auto rows) {
    trained.insert({"predict", step.is_training()});
    require(rows.extent(0) == batch.size() && rows.extent(1) == 2, "other rows");
    write(step, batch, rows.data_handle());
  }
  double loss(auto& step, const Rows& batch, auto rows, auto gradients) {
    trained.insert({"loss", step.is_training()});
    return loss_of(batch, rows.data_handle(), gradients.data_handle());
  }
  void backward(auto& step, const Rows& batch, auto gradients) {
    backward_from(step, batch, gradients.data_handle());
  }

  std::set<std::pair<std::string, bool>> trained;  // call, and whether its step was in training
  std::vector<double> own, slopes;

 private:
  /// The second output is the sample's number, by which rows are told apart.
  static void write(auto& step, const Rows& batch, double* out) {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      out[2 * i] = step.param("offset"_p)();
      for (std::size_t j = 0; j < 3; ++j) out[2 * i] += step.param("weight"_p)(j) * batch.row(i)[j];
      out[2 * i + 1] = batch.row(i)[0];
    }
  }
  static double loss_of(const Rows& batch, const double* out, double* slope) {
    double loss = 0;
    const auto size = static_cast<double>(batch.size());
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const double error = out[2 * i] - batch.labels[i];
      loss += error * error / size;
      slope[2 * i] = 2 * error / size;
      slope[2 * i + 1] = 0;
    }
    return loss;
  }
  void backward_from(auto& step, const Rows& batch, const double* slope) {
    trained.insert({"backward", step.is_training()});
    std::vector<double> weight(3);
    double offset = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      offset += slope[2 * i];
      for (std::size_t j = 0; j < 3; ++j) weight[j] += slope[2 * i] * batch.row(i)[j];
    }
    step.set_grad("offset"_p, offset);
    step.set_grad("weight"_p, weight);
  }
};

/// n rows, the first number of each its place.
InMemoryDataset<double, double> rows_of(std::size_t n) {
  std::vector<double> x(3 * n), y(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[3 * i] = static_cast<double>(i);
    x[3 * i + 1] = std::sin(static_cast<double>(i));
    x[3 * i + 2] = 1 / static_cast<double>(i + 1);
    y[i] = 2 * x[3 * i + 1] - x[3 * i + 2];
  }
  return {std::move(x), std::move(y)};
}

void set_numbers(auto& job) {
  job.initialize([](auto& initial) {
    initial.param("weight"_p)(0) = 0.25;
    initial.param("weight"_p)(1) = -1;
    initial.param("weight"_p)(2) = 3;
    initial.param("offset"_p)() = 0.5;
  });
}

double output_of(std::size_t i) {
  const auto x = static_cast<double>(i);
  return 0.5 + 0.25 * x - std::sin(x) + 3 / (x + 1);
}

/// Rows of samples [first, first + count).
void require_rows(const auto& rows, std::size_t first, std::size_t count, const std::string& how) {
  require(rows.size() == count, how + ": " + std::to_string(rows.size()) + " rows");
  require(rows.first() == first || count == 0, how + ": another first sample");
  for (std::size_t i = 0; i < count; ++i) {
    require(rows[i][1] == static_cast<double>(first + i), how + ": out of order");
    require(near(rows[i][0], output_of(first + i)), how + ": another output");
    require(rows.view()(i, 1) == rows[i][1], how + ": another view");
  }
}

/// Sizes that divide and that do not, fewer than ranks too; batches of one, some and all.
template <class Job>
void check_predictions(Job& job) {
  set_numbers(job);
  const std::size_t world = job.world_size().value();
  const std::size_t rank = job.rank().value();
  for (const std::size_t n : {1, 2, 3, 5, 8, 13}) {
    const auto data = rows_of(n);
    for (const std::size_t batch : {1, 2, 100}) {
      const std::string how = std::to_string(n) + " samples, " + std::to_string(world) +
                              " ranks, batches of " + std::to_string(batch);
      require_rows(job.predict(data, batch), 0, rank == 0 ? n : 0, how);
      require_rows(job.predict(data, {.batch_size = batch, .gather = Gather::all}), 0, n,
                   how + ", on all");
      const auto own = job.predict(data, {.batch_size = batch, .gather = Gather::none});
      require_rows(own, own.first(), own.size(), how + ", on the ranks");
      double sizes[] = {static_cast<double>(own.size())};
      Tally tally;
      tally.add("rows", sizes[0], 1);
      const Scores all = job.reduce_metrics(tally);
      require(near(all["rows"] * static_cast<double>(world), static_cast<double>(n)),
              how + ": not every sample once");
    }
  }
}

TrainerOptions with_replicas(std::size_t replicas) {
  TrainerOptions options;
  options.replicas = replicas;
  return options;
}

using Dp = Trainer<Plane, ParallelStrategy<DP>, Optimizer<Adam>>;
using Noted = std::set<std::pair<std::string, bool>>;

}  // namespace

BOOST_AUTO_TEST_CASE(every_sample_is_predicted_once_and_in_order_in_any_world) {
  for (const std::size_t ranks : {1, 2, 4}) {
    run<Trainer<Plane>>(ranks, [](auto& job) { check_predictions(job); });
    run<Dp>(1, [](Dp& job) { check_predictions(job); }, with_replicas(ranks));
  }
  run<Trainer<Plane, World<1>>>(1, [](auto& job) { check_predictions(job); });
  run<Trainer<Plane, Sharding<Replicated>>>(3, [](auto& job) { check_predictions(job); });
}

namespace {

/// Its rows are longer than what travels at once, and the compiler does not know how long.
struct Wide {
  using Parameters = ParameterList<Parameter<"w", float, 1>>;
  using Output = OutputOf<float, dynamic>;
  static constexpr std::size_t width = 400'000;
  std::array<std::size_t, 1> output_extents() const { return {width}; }

  double forward(auto&, const Rows&) { return 0; }
  void backward(auto& step, const Rows&) { step.set_grad("w"_p, {0}); }
  void predict(auto&, const Rows& batch, auto rows) {
    for (std::size_t i = 0; i < batch.size(); ++i)
      for (std::size_t k = 0; k < width; ++k) rows(i, k) = value(batch.row(i)[0], k);
  }
  static float value(double row, std::size_t k) {
    return static_cast<float>(row) * 1000 + static_cast<float>(k % 997);
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(long_outputs_travel_in_pieces) {
  run<Trainer<Wide>>(3, [](auto& job) {
    for (const Gather gather : {Gather::rank0, Gather::all}) {
      const auto rows = job.predict(rows_of(10), {.batch_size = 3, .gather = gather});
      const bool has = gather == Gather::all || job.rank() == Rank{0};
      require(rows.size() == (has ? 10 : 0) && rows.width() == Wide::width, "other rows");
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto row = rows[i];
        for (std::size_t k = 0; k < Wide::width; ++k)
          wrong += row[k] != Wide::value(static_cast<double>(i), k) ? 1 : 0;
      }
      require(wrong == 0, std::to_string(wrong) + " other numbers");
    }
  });
}

BOOST_AUTO_TEST_CASE(ranks_that_predict_other_data_are_told_so) {
  const std::string words = failure<Trainer<Plane>>(
      2, [](auto& job) { job.predict(rows_of(job.rank() == Rank{0} ? 8 : 9), 2); });
  BOOST_TEST(words.find("data of 9 samples") != std::string::npos, words);
}

BOOST_AUTO_TEST_CASE(a_step_says_whether_it_trains) {
  const auto check = [](auto& job, const Noted& want) {
    const auto data = rows_of(8);
    for (auto epoch : job.epochs(1))
      for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
    Noted trained = std::exchange(job.model().trained, {});
    trained.erase({"loss", true});
    require(!trained.empty(), "nothing was trained");
    for (const auto& [call, is_training] : trained) require(is_training, call + " in training");
    job.evaluate(data, 4);
    job.predict(data, 4);
    require(job.model().trained == want, "an evaluation trains");
  };
  const Noted by_forward{{"forward", false}, {"predict", false}};
  const Noted by_parts{{"predict", false}, {"loss", false}};
  run<Trainer<Plane>>(2, [&](auto& job) { check(job, by_forward); });
  run<Trainer<Plane, World<1>>>(1, [&](auto& job) { check(job, by_forward); });
  run<Trainer<Plane, Accumulate<2>>>(1, [&](auto& job) { check(job, by_forward); });
  run<Dp>(1, [&](auto& job) { check(job, by_parts); }, with_replicas(2));
  run<Trainer<Plane, ParallelStrategy<DP>, LossOnReplica>>(
      1, [&](auto& job) { check(job, by_forward); }, with_replicas(2));
  static_assert(!DistributedDataParallel<Plane>::evaluation_step::is_training());
  static_assert(DistributedDataParallel<Plane>::step_type::is_training());
}

BOOST_AUTO_TEST_CASE(a_hand_written_forward_keeps_its_outputs_and_trains_as_a_step_does) {
  const auto check = [](auto& session, auto& ddp, auto& other) {
    static_cast<void>(session);
    set_numbers(ddp);
    set_numbers(other);
    const auto data = rows_of(12);
    Rows batch;
    for (std::size_t s = 0; s < 6; ++s) {
      const std::size_t indices[] = {2 * s, 2 * s + 1, (5 * s) % 12};
      data.load(std::span(indices).first(2 + s % 2), batch);
      auto forwarded = ddp.forward(batch);
      const auto rows = forwarded.outputs();
      require(rows.extent(0) == batch.size(), "other rows");
      double loss = 0;
      for (std::size_t i = 0; i < batch.size(); ++i)
        loss += std::pow(rows(i, 0) - batch.labels[i], 2) / static_cast<double>(batch.size());
      require(near(forwarded.loss(), loss), "the loss is of other outputs");
      const double first = rows(0, 0);
      std::move(forwarded).backward().reduce().update();
      require(near(other.step(batch), loss), "another loss");
      require(ddp.predict(batch)(0, 0) != first, "nothing was learnt");
      for (std::size_t j = 0; j < 3; ++j)
        require(near(ddp.param("weight"_p)(j), other.param("weight"_p)(j)), "other parameters");
    }
  };
  for (const std::size_t ranks : {1, 2}) {
    spawn(AsProcesses{}, ranks, [&](const Membership& member, Store& store) {
      auto comm = make_shm_communicator(member, store);
      DistributedDataParallel<Plane, Optimizer<SGDMomentum>> ddp(comm), other(comm);
      check(member, ddp, other);
    });
  }
}

BOOST_AUTO_TEST_CASE(replicas_by_hand_predict_on_the_device_that_is_named) {
  const auto data = rows_of(7);
  Rows batch;
  std::vector<std::size_t> indices(7);
  std::iota(indices.begin(), indices.end(), 0);
  data.load(indices, batch);
  for (const std::size_t device : {0, 2, 5}) {
    DpOptions options;
    options.devices = {0, 2, 5};
    options.output_device = device;
    DataParallel<Plane> dp(options);
    DataParallel<Plane, LossOnReplica> alike(options);
    BOOST_TEST(dp.replicas() == 3u);
    set_numbers(dp);
    set_numbers(alike);
    const auto rows = dp.predict(batch);
    BOOST_REQUIRE(rows.extent(0) == 7u);
    for (std::size_t i = 0; i < 7; ++i) BOOST_TEST(near(rows(i, 0), output_of(i)));
    const auto same = alike.predict(batch);
    for (std::size_t i = 0; i < 7; ++i) BOOST_TEST(same(i, 0) == rows(i, 0));
    const double loss = dp.step(batch);
    BOOST_TEST(near(loss, alike.step(batch)));
    std::size_t i = 0;
    dp.for_each_model([&](Plane& model) {  // the loss is taken where the outputs are
      BOOST_TEST(model.trained.contains({"loss", true}) == (options.devices[i++] == device));
    });
  }
  const auto words = [](DpOptions options) -> std::string {
    try {
      DataParallel<Plane> dp(std::move(options));
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing failed";
  };
  DpOptions options;
  options.devices = {0, 1};
  options.output_device = 2;
  BOOST_TEST(words(options).find("output_device 2 has no replica") != std::string::npos);
  options.output_device = 1;
  options.replicas = 3;
  BOOST_TEST(words(options).find("3 replicas are wanted and 2 devices") != std::string::npos);
}

namespace {

using Values = std::map<std::string, std::vector<double>>;

/// All tensors of a job by name, as `for_each` hands them out.
Values parameters_of(const auto& job) {
  Values all;
  job.for_each_parameter([&](std::string_view name, auto view) {
    all[std::string(name)].assign(view.data_handle(), view.data_handle() + view.size());
  });
  return all;
}

/// The states of this process, in place; not a number where another has them.
Values states_of(const auto& job) {
  Values all;
  const auto sizes = parameters_of(job);
  job.for_each_state(
      [&](std::string_view parameter, std::string_view state, auto view, std::size_t first) {
        auto& values = all[std::string(parameter) + " " + std::string(state)];
        values.resize(sizes.at(std::string(parameter)).size(), std::nan(""));
        for (std::size_t i = 0; i < view.size(); ++i) values.at(first + i) = view(i);
      });
  return all;
}

template <class Job>
void train_some(Job& job) {
  set_numbers(job);
  const auto data = rows_of(8);
  job.fit(data, {.epochs = 2, .batch_size = 8 / job.world_size().value()});
}

/// The states of the same job in one process.
Values states_alone() {
  Values alone;
  Session session = detail::join_alone();
  Trainer<Plane, World<1>, Optimizer<Adam>> job(session);
  train_some(job);
  return states_of(job);
}

void require_values(const Values& some, const Values& want, bool whole) {
  for (const auto& [name, values] : want) {
    require(!whole || some.contains(name), "no " + name);
    if (!some.contains(name)) continue;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double value = some.at(name).at(i);
      require(whole ? near(value, values[i]) : std::isnan(value) || near(value, values[i]),
              name + " has other values");
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(tensors_are_handed_out_by_name) {
  const auto check = [](auto& job) {
    set_numbers(job);
    std::vector<std::string> names;
    job.for_each_parameter([&]<class View>(std::string_view name, View view) {
      names.emplace_back(name);
      if constexpr (View::rank() == 0) {
        require(view() == 0.5, "another offset");
      } else {
        require(view.extent(0) == 3 && view(2) == 3, "another weight");
        static_assert(std::is_const_v<typename View::element_type>);
      }
    });
    require(names == std::vector<std::string>{"weight", "offset"}, "other names");
    names.clear();
    job.for_each_buffer([&](std::string_view name, auto view) {
      names.emplace_back(name);
      require(view.size() == 2, "another buffer");
    });
    require(names == std::vector<std::string>{"mean"}, "other buffers");
    const auto data = rows_of(4);
    for (auto epoch : job.epochs(1))
      for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
    double sum = 0;
    job.for_each_gradient([&](std::string_view, auto view) {
      for (std::size_t i = 0; i < view.size(); ++i) sum += std::abs(view.data_handle()[i]);
    });
    require(sum > 0, "no gradient");
  };
  run<Trainer<Plane>>(2, [&](auto& job) { check(job); });
  run<Trainer<Plane, World<1>>>(1, [&](auto& job) { check(job); });
  run<Dp>(1, [&](auto& job) { check(job); }, with_replicas(2));
}

BOOST_AUTO_TEST_CASE(states_are_those_of_one_process_wherever_they_lie) {
  const Values want = states_alone();
  BOOST_TEST(want.size() == 4u);
  BOOST_TEST(want.contains("weight exp_avg_sq"));
  run<Trainer<Plane, Optimizer<Adam>, Sharding<Replicated>>>(2, [&](auto& job) {
    train_some(job);
    require_values(states_of(job), want, true);
  });
  run<Trainer<Plane, Optimizer<Adam>>>(2, [&](auto& job) {  // a slice on each rank
    train_some(job);
    const Values own = states_of(job);
    require_values(own, want, false);
    double kept = 0;
    for (const auto& [name, values] : own)
      for (const double value : values) kept += std::isnan(value) ? 0 : 1;
    Tally tally;
    tally.add("kept", kept, 1);
    require(near(job.reduce_metrics(tally)["kept"] * 2, 8), "not every state once");
  });
  run<Dp>(
      1,
      [&](Dp& job) {
        train_some(job);
        require_values(states_of(job), want, true);
      },
      with_replicas(3));
}

namespace {

/// The gradient of element i is i + 1: a state says whose it is.
struct Long {
  using Parameters = ParameterList<Parameter<"w", double, 1000>, Parameter<"b", double, 7>>;
  double forward(auto&, const Rows&) { return 0; }
  void backward(auto& step, const Rows&) {
    std::vector<double> gradient(1000);
    std::iota(gradient.begin(), gradient.end(), 1);
    step.set_grad("b"_p, {1, 2, 3, 4, 5, 6, 7});
    step.set_grad("w"_p, gradient);
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_parameter_that_ranks_share_has_its_states_in_slices) {
  for (const std::size_t ranks : {2, 3}) {
    run<Trainer<Long, Optimizer<SGDMomentum>>>(ranks, [](auto& job) {
      job.fit(rows_of(6), {.epochs = 1, .batch_size = 6});
      double kept = 0;
      bool begins_inside = false;
      job.for_each_state(
          [&](std::string_view, std::string_view state, auto view, std::size_t first) {
            require(state == "momentum_buffer", "another state");
            kept += static_cast<double>(view.size());
            begins_inside = begins_inside || first != 0;
            for (std::size_t i = 0; i < view.size(); ++i)
              require(near(view(i), static_cast<double>(first + i + 1)), "another element's state");
          });
      require(job.rank() == Rank{0} || begins_inside, "no slice begins inside of a parameter");
      Tally tally;
      tally.add("kept", kept, 1);
      require(
          near(job.reduce_metrics(tally)["kept"] * static_cast<double>(job.world_size().value()),
               1007),
          "not every state once");
    });
  }
}

BOOST_AUTO_TEST_CASE(first_values_come_from_the_seed_of_the_job_under_both_strategies) {
  const auto drawn = [](auto& job) {
    job.initialize([](auto& initial) {
      initial.for_each_parameter([&](std::string_view, auto view) {
        for (std::size_t i = 0; i < view.size(); ++i)
          view.data_handle()[i] = initial.random().uniform(0., 1.);
      });
    });
    return parameters_of(job);
  };
  TrainerOptions options;
  options.seed = Seed{7};
  RandomStream random(options.seed);
  Values want;
  for (int i = 0; i < 3; ++i) want["weight"].push_back(random.uniform(0., 1.));
  want["offset"].push_back(random.uniform(0., 1.));
  run<Trainer<Plane>>(2, [&](auto& job) { require(drawn(job) == want, "other values"); }, options);
  options.replicas = 2;
  run<Dp>(1, [&](auto& job) { require(drawn(job) == want, "other values of DP"); }, options);
}

BOOST_AUTO_TEST_CASE(fit_is_the_loop_that_it_stands_for) {
  const auto check = [](auto& job, auto& by_hand) {
    set_numbers(job);
    set_numbers(by_hand);
    const auto data = rows_of(12);
    const auto test = rows_of(5);
    job.optimizer().lr = by_hand.optimizer().lr = 0.01;
    std::size_t steps = 0, epochs = 0;
    double losses = 0;
    Scores last;
    const EpochSummary summary = job.fit(
        data, test, {.epochs = 3, .batch_size = 2, .test_batch_size = 4},
        [&](auto& epoch, const Scores& scores) {
          require(epoch.number() == epochs++, "another epoch");
          require(epoch.summary().loss.has_value(), "no loss");
          last = scores;
        },
        [&](const Rows& batch, double loss) {
          steps += batch.size();
          losses += loss;
        });
    Scores want;
    for (auto epoch : by_hand.epochs(3)) {
      for (const auto& batch : epoch.batches(data, 2)) losses -= by_hand.step(batch);
      want = by_hand.evaluate(test, 4);
    }
    require(epochs == 3 && steps * job.world_size().value() == 36, "other steps");
    require(near(losses, 0) && last == want && parameters_of(job) == parameters_of(by_hand),
            "another training");
    require(summary.epoch == 3 && summary.loss == by_hand.summary().loss, "another summary");
  };
  for (const std::size_t ranks : {1, 2}) {
    spawn(AsProcesses{}, ranks, [&](const Membership& member, Store&) {
      require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
      Session session(member, Store(member.host, member.port, member.secret, member.timeout));
      Trainer<Plane> job(session), by_hand(session);
      check(job, by_hand);
    });
  }
}

BOOST_AUTO_TEST_CASE(a_fit_that_one_rank_ends_ends_on_all) {
  run<Trainer<Plane>>(2, [](auto& job) {
    const auto data = rows_of(8);
    std::size_t epochs = 0;
    const EpochSummary summary = job.fit(data, {.epochs = 9, .batch_size = 4}, [&](auto& epoch) {
      ++epochs;
      return job.rank() == Rank{0} || epoch.number() < 2;
    });
    require(epochs == 3 && summary.epoch == 3, "it went on for " + std::to_string(epochs));
    job.barrier();
  });
}

// ---- ranks that are fed

/// The rows of a data set, one of which cannot be read.
struct Torn {
  using batch_type = Rows;

  InMemoryDataset<double, double> rows;
  std::size_t bad = static_cast<std::size_t>(-1);

  std::size_t size() const { return rows.size(); }
  void load(std::span<const std::size_t> indices, Rows& out) const {
    for (const std::size_t index : indices)
      if (index == bad) throw std::runtime_error("row " + std::to_string(bad) + " is torn");
    rows.load(indices, out);
  }
};

using Fed = Trainer<Plane, Groups<Grid<dynamic, 2>>, Feed<ScatterThenBroadcast>>;

/// Runs `f(job)` on four ranks, each of which must end with these words.
template <class F>
void all_end_with(const std::string& words, const F& f) {
  BOOST_TEST(failure<Fed>(4, [&](Fed& job) {
               std::string said;
               try {
                 f(job);
               } catch (const std::exception& error) {
                 said = error.what();
               }
               require(said.find(words) != std::string::npos, "it said: " + said);
             }) == "nothing failed");
}

BOOST_AUTO_TEST_CASE(fed_ranks_train_as_ranks_that_read_and_need_no_data) {
  for (const std::size_t ranks : {2, 4}) {
    spawn(AsProcesses{}, ranks, [&](const Membership& member, Store&) {
      require(std::freopen("/dev/null", "w", stdout) != nullptr, "no /dev/null");
      Session session(member, Store(member.host, member.port, member.secret, member.timeout));
      Trainer<Plane> own(session);
      Fed fed(session);
      set_numbers(own);
      set_numbers(fed);
      own.optimizer().lr = fed.optimizer().lr = 0.01;
      const auto rows = rows_of(21);
      const auto opened = fed.open([&] {
        require(fed.rank() == Rank{0}, "a rank that is fed opens the data");
        return Torn{rows_of(21)};
      });
      require(opened.size() == 21 && (opened.here() != nullptr) == (fed.rank() == Rank{0}), "size");
      // An evaluation in the middle, and a loop that is left.
      const auto train = [](auto& job, const auto& data) {
        std::vector<double> figures;
        for (auto epoch : job.epochs(2)) {
          std::size_t steps = 0;
          for (const auto& batch : epoch.batches(data, 2)) {
            figures.push_back(job.step(batch));
            if (++steps == 2) figures.push_back(job.evaluate(data, 3)["loss"]);
            if (epoch.number() == 1 && steps == 3) break;
          }
        }
        return figures;
      };
      require(train(fed, opened) == train(own, rows), "other losses");
      // Another job goes on there.
      Fed later(session);
      set_numbers(later);
      later.resume(fed.position());
      std::vector<double> rest;
      for (auto epoch : later.epochs(2))
        for (const auto& batch : epoch.batches(opened, 2))
          for (std::size_t i = 0; i != batch.size(); ++i) rest.push_back(batch.row(i)[0]);
      DistributedSampler<> sampler(21, fed.world_size(), fed.rank());
      sampler.resume(fed.position());
      std::vector<double> want;
      for (const std::size_t index : sampler) want.push_back(static_cast<double>(index));
      require(rest == want, "other samples are left");
      require(fed.predict(opened, {.batch_size = 4, .gather = Gather::all}).values() ==
                  own.predict(rows, {.batch_size = 4, .gather = Gather::all}).values(),
              "other outputs");
      const FitOptions fit{.epochs = 1, .batch_size = 3};
      require(fed.fit(opened, opened, fit).loss == own.fit(rows, rows, fit).loss, "another fit");
      require(parameters_of(fed) == parameters_of(own), "other parameters");
    });
  }
}

BOOST_AUTO_TEST_CASE(what_a_reader_throws_reaches_all_ranks_of_a_job) {
  all_end_with("row 5 is torn", [](Fed& job) {
    const auto data = job.open([] { return Torn{rows_of(40), 5}; });
    job.fit(data, {.epochs = 1, .batch_size = 1});
  });
  all_end_with("row 39 is torn", [](Fed& job) {
    const auto data = job.open([] { return Torn{rows_of(40), 39}; });
    job.predict(data, 1);
  });
  all_end_with("there is no such file", [](Fed& job) {
    job.open([]() -> Torn { throw std::runtime_error("there is no such file"); });
  });
}

// While the others wait for batches or gradients.
BOOST_AUTO_TEST_CASE(what_a_fed_rank_throws_reaches_all_ranks_of_a_job) {
  all_end_with("rows of another width", [](Fed& job) {
    const auto data = job.open([] { return Torn{rows_of(400)}; });
    std::size_t steps = 0;
    for (auto epoch : job.epochs(1)) {
      for (const auto& batch : epoch.batches(data, 1)) {
        Rows bad = batch;
        if (++steps == 5 && job.rank() == Rank{3}) bad.width = 2;
        job.step(bad);
      }
    }
  });
}

BOOST_AUTO_TEST_SUITE_END()
