// SPDX-License-Identifier: Apache-2.0
// What DP does with batches, buffers, unused parameters and failures.
#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "launch/watchdog.hpp"
#include "lockstep/detail/observe/scores.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "thread_count.hpp"
#include "train/sheet.hpp"

namespace {

using namespace train;

/// A sheet that goes over the samples of its share: its gradient is the mean of its entries', as
/// its loss is.
struct Book : Sheet<> {
  using Buffers = BufferList<Buffer<"seen", double, 1>>;

  std::vector<double> found;  // in the buffer, by every forward
  std::size_t most = 0;       // samples of one share

  double forward(auto& step, const Entries& share) {
    found.push_back(step.buffer("seen"_p)(0));
    step.buffer("seen"_p)(0) += static_cast<double>(share.size());
    most = std::max(most, share.size());
    double loss = 0;
    for (const Entry& entry : share.all) loss += Sheet<>::forward(step, entry);
    return loss / static_cast<double>(share.size());
  }

  void backward(auto& step, const Entries& share) {
    Entry mean{.gradient = {}, .used = {}, .trouble = Entry::Trouble::none, .loss = 0};
    for (const Entry& entry : share.all) {
      for (std::size_t p = 0; p < 3; ++p) {
        mean.used[p] = mean.used[p] || entry.used[p];
        if (entry.used[p])
          mean.gradient[p] += entry.gradient[p] / static_cast<double>(share.size());
      }
      if (entry.trouble != Entry::Trouble::none) mean.trouble = entry.trouble;
    }
    Sheet<>::backward(step, mean);
  }
};

template <class... Ps>
using Dp = DataParallel<Book, Ps...>;

/// Sample i of n has the gradients i + 1, 2 and 3, and the loss i.
Entries numbered(std::size_t n) {
  Entries batch;
  for (std::size_t i = 0; i < n; ++i) {
    const auto x = static_cast<double>(i);
    batch.all.push_back({.gradient = {x + 1, 2, 3},
                         .used = {true, true, true},
                         .trouble = Entry::Trouble::none,
                         .loss = x});
  }
  return batch;
}

/// Knows the threads on which it was made and ran.
struct Homed : Book {
  std::thread::id made = std::this_thread::get_id();
  std::thread::id ran;
  std::size_t number = 100;

  Homed() = default;
  explicit Homed(std::size_t number) : number(number) {}
  Homed(const Homed& other) : Book(other), number(other.number) {}
  Homed(Homed&&) noexcept = default;
  Homed& operator=(const Homed&) = delete;
  ~Homed() = default;

  double forward(auto& step, const Entries& share) {
    ran = std::this_thread::get_id();
    return Book::forward(step, share);
  }
};

/// Has every replica a thread of its own, on which its model was made, runs and is visited?
void require_own_threads(DataParallel<Homed>& dp, const auto& number) {
  const std::thread::id caller = std::this_thread::get_id();
  dp.step(numbered(6));
  std::set<std::thread::id> threads;
  std::size_t replica = 0;
  dp.for_each_model([&](Homed& model) {
    const std::thread::id here = std::this_thread::get_id();
    BOOST_TEST((model.made == here));
    BOOST_TEST((model.ran == here));
    BOOST_TEST(model.number == number(replica));
    BOOST_TEST((here == caller) == (replica == 0));
    threads.insert(here);
    ++replica;
  });
  BOOST_TEST(threads.size() == 3u);
}

std::string failure(const auto& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing failed";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<double> numbers_of(const auto& dp) {
  std::vector<double> all;
  for (std::size_t p = 0; p < 3; ++p)
    for (std::size_t i = 0; i < sheet_sizes[p]; ++i) all.push_back(value(dp, p, i));
  return all;
}

std::size_t entries_of(const char* folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(dp, Watchdog)

BOOST_AUTO_TEST_CASE(the_loss_and_the_gradient_are_means_over_samples_whatever_the_shares) {
  for (const std::size_t replicas : {1, 2, 3, 4}) {
    for (std::size_t n = 1; n < 8; ++n) {
      Dp<> dp({.replicas = replicas});
      dp.optimizer().lr = 1;
      const auto samples = static_cast<double>(n);
      BOOST_TEST(std::abs(dp.step(numbered(n)) - (samples - 1) / 2) < 1e-12);
      const std::array<double, 3> gradient{(samples + 1) / 2, 2, 3};
      compare(
          dp, [&](std::size_t p, std::size_t i) { return start(p, i) - slope(gradient[p], i); },
          std::to_string(replicas) + " replicas, " + std::to_string(n) + " samples");
    }
  }
}

BOOST_AUTO_TEST_CASE(the_model_is_the_wrapped_one_and_every_replica_has_a_copy) {
  Book book;
  book.found = {7};
  Dp<> dp({.replicas = 3}, book);
  std::set<const Book*> models;
  dp.for_each_model([&](Book& model) {
    BOOST_TEST((model.found == std::vector<double>{7}));
    models.insert(&model);
  });
  BOOST_TEST(models.size() == 3u);
  BOOST_TEST(models.contains(&dp.model()));
  BOOST_TEST(dp.replicas() == 3u);
}

BOOST_AUTO_TEST_CASE(models_are_made_and_visited_on_the_threads_of_their_replicas) {
  {
    DataParallel<Homed> dp({.replicas = 3});
    require_own_threads(dp, [](std::size_t) { return 100u; });
  }
  {
    DataParallel<Homed> dp({.replicas = 3}, [](std::size_t i) { return Homed(i); });
    require_own_threads(dp, [](std::size_t i) { return i; });
  }
  {
    std::size_t calls = 0;  // functions are called one after the other
    DataParallel<Homed> dp({.replicas = 3}, [&] { return Homed(10 * calls++); });
    require_own_threads(dp, [](std::size_t i) { return 10 * i; });
  }
  DataParallel<Homed> dp({.replicas = 3}, Homed(7));
  require_own_threads(dp, [](std::size_t) { return 7u; });
}

BOOST_AUTO_TEST_CASE(a_model_that_cannot_be_made_is_an_error_with_its_replica) {
  const auto make = [](std::size_t i) {
    if (i == 1) throw std::runtime_error("no memory for it");
    return Homed(i);
  };
  BOOST_TEST(contains(failure([&] { DataParallel<Homed> dp({.replicas = 3}, make); }),
                      "replica 1: no memory for it"));
  DataParallel<Homed> dp({.replicas = 2});
  const auto visit = [](Homed& model) {
    model.number = 1;
    throw std::runtime_error("not this one");
  };
  BOOST_TEST(contains(failure([&] { dp.for_each_model(visit); }), "replica 0: not this one"));
  std::size_t visited = 0;
  dp.for_each_model([&](Homed& model) { visited += model.number == 1; });
  BOOST_TEST(visited == 1u);
}

BOOST_AUTO_TEST_CASE(any_thread_may_step_a_job_that_another_has_made) {
  Dp<> dp({.replicas = 3}), same({.replicas = 3});
  for (int round = 0; round < 3; ++round) {
    std::thread([&] { dp.step(numbered(5)); }).join();
    dp.step(numbered(4));
    same.step(numbered(5));
    same.step(numbered(4));
  }
  BOOST_TEST((numbers_of(dp) == numbers_of(same)));
}

BOOST_AUTO_TEST_CASE(only_the_first_replicas_buffers_survive) {
  Dp<> dp({.replicas = 3});
  dp.step(numbered(5));  // 2, 2 and 1 samples
  BOOST_TEST(dp.buffer("seen"_p)(0) == 2);
  dp.step(numbered(5));
  BOOST_TEST(dp.buffer("seen"_p)(0) == 4);
  dp.step(numbered(2));  // the third has nothing to do, and sees what the first saw all the same
  dp.step(numbered(5));
  std::vector<std::vector<double>> found;
  dp.for_each_model([&](const Book& book) { found.push_back(book.found); });
  BOOST_TEST((found[0] == std::vector<double>{0, 2, 4, 5}));
  BOOST_TEST((found[1] == std::vector<double>{0, 2, 4, 5}));
  BOOST_TEST((found[2] == std::vector<double>{0, 2, 5}));
}

BOOST_AUTO_TEST_CASE(synced_buffers_are_averaged_for_evaluations_and_when_that_is_asked_for) {
  Dp<Buffers<Synced>> dp({.replicas = 2});
  dp.step(numbered(3));  // 2 and 1 samples
  dp.step(numbered(3));
  dp.synchronize_buffers();
  BOOST_TEST(dp.buffer("seen"_p)(0) == 3);
  dp.step(numbered(3));
  dp.evaluate(numbered(2));  // the model counts evaluated samples too
  BOOST_TEST(dp.buffer("seen"_p)(0) == 5.5);
  std::vector<std::vector<double>> found;
  dp.for_each_model([&](const Book& book) { found.push_back(book.found); });
  BOOST_TEST((found[0] == std::vector<double>{0, 2, 3, 4.5}));
  BOOST_TEST((found[1] == std::vector<double>{0, 1, 3, 4.5}));
}

BOOST_AUTO_TEST_CASE(what_one_replica_uses_is_everybodys_and_what_none_uses_is_left_alone) {
  Dp<UnusedParameters<Zero>, Optimizer<SGDMomentum>> dp({.replicas = 2});
  dp.optimizer().lr = 1;
  Entries batch = numbered(2);
  for (Entry& entry : batch.all) entry.used[2] = false;
  batch.all[0].used[1] = false;
  dp.step(batch);
  const std::array<double, 3> gradient{1.5, 1, 0};  // of b, half the samples have none
  compare(
      dp, [&](std::size_t p, std::size_t i) { return start(p, i) - slope(gradient[p], i); },
      "one replica uses b, none c");
  // With one sample the second replica has nothing, and that is not a use either.
  const double before = value(dp, 1, 3);
  Entries one = numbered(1);
  one.all[0].used = {true, false, false};
  dp.step(one);
  BOOST_TEST(value(dp, 1, 3) == before);
}

BOOST_AUTO_TEST_CASE(replicas_use_the_sub_graph_of_the_batch) {
  using Sets = Subgraphs<Subgraph<"front", "a", "b">, Subgraph<"back", "c">>;
  Dp<UnusedParameters<Sets>, Optimizer<SGDMomentum>> dp({.replicas = 2});
  Dp<UnusedParameters<Zero>, Optimizer<SGDMomentum>> other({.replicas = 2});
  for (const std::size_t samples : {4u, 1u, 3u}) {  // of one sample, the second replica has none
    Entries front = numbered(samples), back = numbered(samples);
    for (Entry& entry : front.all) entry.used = {true, true, false};
    for (Entry& entry : back.all) entry.used = {false, false, true};
    dp.step<"front"_s>(front);
    other.step(front);
    front.all[0].trouble = Entry::Trouble::in_forward;
    BOOST_TEST(failure([&] { dp.step("front"_s, front); }) != "");  // has used nothing
    dp.step(dp.subgraph("back"), back);
    other.step(back);
    compare(dp, [&](std::size_t p, std::size_t i) { return value(other, p, i); }, "sub-graphs", 0);
  }
  BOOST_TEST(dp.model().subgraph == "back");
  dp.evaluate<"front"_s>(numbered(2));
  BOOST_TEST(dp.model().subgraph == "front");
}

BOOST_AUTO_TEST_CASE(a_missing_gradient_is_an_error_with_replica_and_name) {
  Dp<> dp({.replicas = 2});
  Entries batch = numbered(4);
  batch.all[3].used = batch.all[2].used = {true, true, false};
  const std::string words = failure([&] { dp.step(batch); });
  BOOST_TEST(contains(words, "replica 1, backward: no gradient came for c"), words);
}

BOOST_AUTO_TEST_CASE(after_a_failure_of_the_model_the_job_goes_on_as_if_the_batch_had_not_been) {
  using Trouble = Entry::Trouble;
  for (const Trouble trouble :
       {Trouble::in_forward, Trouble::in_backward, Trouble::ready_twice, Trouble::no_exception}) {
    Dp<Optimizer<Adam>> dp({.replicas = 4}), other({.replicas = 4});
    for (int round = 0; round < 3; ++round) {
      Entries bad = numbered(8);
      bad.all[2].trouble = bad.all[5].trouble = bad.all[7].trouble = trouble;
      const auto before = numbers_of(dp);
      const std::string words = failure([&] { dp.step(bad); });
      BOOST_TEST(contains(words, "replica 1"), words);  // of 1, 2 and 3, always the first
      BOOST_TEST((numbers_of(dp) == before));
      dp.step(numbered(5));
      other.step(numbered(5));
      BOOST_TEST((numbers_of(dp) == numbers_of(other)));
    }
    BOOST_TEST(dp.updates() == 3u);
  }
}

BOOST_AUTO_TEST_CASE(a_failed_backward_begins_an_accumulated_step_anew) {
  Dp<Accumulate<2>> dp({.replicas = 2}), other({.replicas = 2});
  Entries bad = numbered(2);
  bad.all[1].trouble = Entry::Trouble::in_backward;
  dp.step(numbered(4));
  failure([&] { dp.step(bad); });
  for (const std::size_t n : {3, 6}) {
    dp.step(numbered(n));
    other.step(numbered(n));
  }
  BOOST_TEST((numbers_of(dp) == numbers_of(other)));
  BOOST_TEST(dp.updates() == 1u);
  // One that fails in forward is no part of it.
  bad.all[1].trouble = Entry::Trouble::in_forward;
  dp.step(numbered(3));
  failure([&] { dp.step(bad); });
  dp.step(numbered(6));
  for (const std::size_t n : {3, 6}) other.step(numbered(n));
  BOOST_TEST((numbers_of(dp) == numbers_of(other)));
}

BOOST_AUTO_TEST_CASE(once_replicas_communicate_a_failure_ends_the_job_with_its_reason) {
  Dp<Sharding<Replicated>, Buckets<BucketLimits{0, 0}>> dp({.replicas = 3});
  Entries bad = numbered(6);
  bad.all[5].trouble = Entry::Trouble::in_forward;  // nothing has travelled yet
  BOOST_TEST(contains(failure([&] { dp.step(bad); }), "replica 2: forward ran out of luck"));
  dp.step(numbered(6));
  bad.all[5].trouble = Entry::Trouble::in_backward;
  BOOST_TEST(contains(failure([&] { dp.step(bad); }), "replica 2: backward ran out of luck"));
  BOOST_TEST(contains(failure([&] { dp.step(numbered(6)); }), "backward ran out of luck"));
}

BOOST_AUTO_TEST_CASE(an_empty_batch_is_an_error) {
  Dp<> dp({.replicas = 2});
  BOOST_TEST(contains(failure([&] { dp.step(Entries{}); }), "the batch is empty"));
  dp.step(numbered(1));
}

BOOST_AUTO_TEST_CASE(replicas_follow_the_numbers_of_the_optimizer) {
  Dp<Optimizer<SGD>, Schedule<StepDecay>> dp({.replicas = 4});  // each updates a slice
  for (const double lr : {0.5, 0.25}) {
    dp.optimizer().lr = lr;
    dp.schedule().epochs = 1;
    dp.schedule().factor = 0.5;
    dp.set_epoch(1);
    const auto before = numbers_of(dp);
    dp.step(numbered(1));
    const auto after = numbers_of(dp);
    std::size_t k = 0;
    const std::array<double, 3> gradient{1, 2, 3};
    for (std::size_t p = 0; p < 3; ++p)
      for (std::size_t i = 0; i < sheet_sizes[p]; ++i, ++k)
        BOOST_TEST_REQUIRE(std::abs(before[k] - after[k] - 0.5 * lr * slope(gradient[p], i)) <
                           1e-12);
  }
}

BOOST_AUTO_TEST_CASE(parameters_can_be_written_anew) {
  Dp<> dp({.replicas = 3});
  dp.initialize([](auto& initial) { initial.param("a"_p)(4) = 17; });
  BOOST_TEST(dp.param("a"_p)(4) == 17);
  dp.step(numbered(3));
  BOOST_TEST(dp.param("a"_p)(4) < 17);
}

BOOST_AUTO_TEST_CASE(evaluation_tallies_every_sample_once) {
  Dp<> dp({.replicas = 3});
  Tally tally;
  dp.evaluate(numbered(5), tally);
  dp.evaluate(numbered(1), tally);
  BOOST_TEST(std::abs(tally.mean("loss") - 10.0 / 6) < 1e-12);
  BOOST_TEST(std::abs(dp.evaluate(numbered(5)) - 2) < 1e-12);
  BOOST_TEST(dp.updates() == 0u);
}

BOOST_AUTO_TEST_CASE(nothing_is_left_behind) {
  const std::size_t threads = thread_count();
  const std::size_t files = entries_of("/proc/self/fd");
  const std::size_t shared = entries_of("/dev/shm");
  for (int round = 0; round < 3; ++round) {
    Dp<> dp({.replicas = 4});
    dp.step(numbered(4));
    BOOST_TEST(thread_count() == threads + 3);
    BOOST_TEST(entries_of("/dev/shm") == shared);
  }
  BOOST_TEST(contains(failure([] { Dp<World<2>> dp({.replicas = 3}); }), "2 ranks"));
  BOOST_TEST(thread_count() == threads);
  BOOST_TEST(entries_of("/proc/self/fd") == files);
}

BOOST_AUTO_TEST_CASE(a_world_of_one_is_the_plain_model) {
  Dp<World<1>> alone;
  Dp<> one({.replicas = 1});
  BOOST_TEST(alone.replicas() == 1u);
  for (std::size_t n = 1; n < 5; ++n) BOOST_TEST(alone.step(numbered(n)) == one.step(numbered(n)));
  BOOST_TEST((numbers_of(alone) == numbers_of(one)));
}

BOOST_AUTO_TEST_SUITE_END()

// ---- batches of other kinds

namespace {

struct Settings {
  double offset = 0;
};

/// y = slope x + offset, where the offset comes with the batch and is everybody's.
struct Slope {
  using Parameters = ParameterList<Parameter<"slope", double>>;
  std::vector<const Settings*> settings;

  double forward(auto& step, const auto& batch) {
    const auto& [x, y, common] = batch;
    settings.push_back(&common);
    double loss = 0;
    for (std::size_t i = 0; i < x.size(); ++i) loss += std::pow(error(step, batch, i), 2);
    return loss / static_cast<double>(x.size());
  }
  void backward(auto& step, const auto& batch) {
    const auto& x = std::get<0>(batch);
    double gradient = 0;
    for (std::size_t i = 0; i < x.size(); ++i)
      gradient += 2 * error(step, batch, i) * x[i] / static_cast<double>(x.size());
    step.grad("slope"_p)() = gradient;
    step.ready("slope"_p);
  }
  static double error(auto& step, const auto& batch, std::size_t i) {
    const auto& [x, y, common] = batch;
    return step.param("slope"_p)() * x[i] + common.offset - y[i];
  }
};

}  // namespace

BOOST_FIXTURE_TEST_SUITE(dp_batches, Watchdog)

BOOST_AUTO_TEST_CASE(nested_batches_are_cut_and_the_rest_is_shared) {
  const std::vector<double> x{1, 2, 3, 4, 5}, y{4, 7, 10, 13, 16};
  const std::tuple batch(std::span<const double>(x), y, Settings{1});
  DataParallel<Slope> dp({.replicas = 3});
  dp.optimizer().lr = 0.05;
  for (int s = 0; s < 60; ++s) dp.step(batch);
  BOOST_TEST(std::abs(dp.param("slope"_p)() - 3) < 1e-6);
  dp.for_each_model([&](const Slope& model) {
    for (const Settings* settings : model.settings)
      BOOST_TEST_REQUIRE(settings == &std::get<2>(batch));
  });
}

BOOST_AUTO_TEST_SUITE_END()
