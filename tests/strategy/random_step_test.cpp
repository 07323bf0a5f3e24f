// SPDX-License-Identifier: Apache-2.0
// Random numbers of steps: other ones for every rank, update, micro-batch and layer; the same ones
// in forward and backward, in every form of a step, and after a resumption.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/norm/dropout.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "temporary_folder.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(random_steps)

namespace {

using namespace train;
using Numbers = std::vector<std::uint64_t>;

struct Points {
  std::size_t samples = 1;
  double gradient = 1;
  std::size_t size() const { return samples; }
  Points slice(std::size_t, std::size_t count) const { return {count, gradient}; }
};

constexpr std::size_t width = 21;

/// Writes down which elements its dropout leaves and what it draws itself.
struct Noisy {
  static constexpr bool draws = true;
  using Parameters = ParameterList<Parameter<"w", float, width>>;

  Dropout<"drop1"> drop1{0.5};
  Dropout<> drop2{"drop2", 0.5};
  Numbers drawn;       // by training, in the order of micro-batches
  Numbers in_forward;  // of the latest
  Numbers evaluated;   // by the latest evaluation
  std::size_t wrong = 0;

  double forward(auto& step, const Points& points) {
    const Numbers numbers = draw(step, [](auto& layer, auto&&... all) { layer.forward(all...); });
    if (step.is_training()) {
      in_forward = numbers;
      drawn.insert(drawn.end(), numbers.begin(), numbers.end());
    } else {
      evaluated = numbers;
    }
    return points.gradient;
  }
  void backward(auto& step, const Points& points) {
    wrong += draw(step, [](auto& layer, auto&&... all) { layer.backward(all...); }) != in_forward
                 ? 1
                 : 0;
    for (std::size_t i = 0; i < width; ++i)
      step.grad("w"_p)(i) = static_cast<float>(points.gradient);
    step.ready("w"_p);
  }

 private:
  /// The elements that two layers leave, as bits, and a number of the model's own.
  Numbers draw(auto& step, const auto& run) {
    Numbers numbers;
    const auto left = [&](auto& layer) {
      std::vector<float> x(width, 1.5f);
      const HostView<float, dynamic> view(x.data(), width);
      run(layer, step, HostView<const float, dynamic>(view), view);
      std::uint64_t bits = 0;
      for (std::size_t i = 0; i < width; ++i) {
        const float want = step.is_training() ? 3.f : 1.5f;
        if (x[i] != 0 && x[i] != want) ++wrong;
        bits |= std::uint64_t{x[i] != 0} << i;
      }
      numbers.push_back(bits);
    };
    left(drop1);
    left(drop2);
    numbers.push_back(step.random("noise"_p).bits(5));
    if (step.random(std::string("noise")).bits(5) != numbers.back()) ++wrong;
    return numbers;
  }
};

// The same numbers, written out once more.

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
std::uint64_t at(std::uint64_t stream, std::uint64_t i) {
  return mix(stream + (i + 1) * 0x9e3779b97f4a7c15u);
}

/// What a rank draws in a micro-batch.
Numbers expected(std::uint64_t seed, std::size_t rank, std::uint64_t updates,
                 std::size_t micro_batch) {
  const std::uint64_t own =
      mix(rank_seed(Seed{seed}, Rank{rank}).value() ^ detail::hash_of("step.random"));
  const std::uint64_t key = at(at(own, updates), micro_batch);
  Numbers numbers;
  for (const char* layer : {"drop1", "drop2"}) {
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const std::uint64_t pair = at(at(key, detail::hash_of(layer)), i / 2);
      const std::uint64_t half = i % 2 == 0 ? pair & 0xffffffffu : pair >> 32;
      bits |= std::uint64_t{half >= 0x80000000u} << i;
    }
    numbers.push_back(bits);
  }
  numbers.push_back(at(at(key, detail::hash_of("noise")), 5));
  return numbers;
}

/// So many micro-batches, `in_update` of which make an update, from a point on.
Numbers expected_run(std::uint64_t seed, std::size_t rank, std::size_t first, std::size_t count,
                     std::size_t in_update) {
  Numbers all;
  for (std::size_t n = first; n < first + count; ++n) {
    const Numbers some = expected(seed, rank, n / in_update, n % in_update);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

using Job = DistributedDataParallel<Noisy, Accumulate<2>, Anomaly<Skip>, Optimizer<SGD>>;

void require_drawn(const Noisy& model, const Numbers& want, const std::string& when) {
  require(model.drawn == want, when + ": other numbers were drawn");
  require(model.wrong == 0, when + ": " + std::to_string(model.wrong) + " things were wrong");
}

}  // namespace

// Bits are those of every rank, update, micro-batch and layer; rank 0's seed counts. A step that is
// skipped counts as an update, an evaluation as nothing.
BOOST_AUTO_TEST_CASE(ranks_updates_micro_batches_and_layers_draw_their_own_numbers) {
  for (const std::size_t world : {1u, 2u, 4u}) {
    all_well(world, [](Shared& comm) {
      const std::size_t me = comm.rank().value();
      Job job(comm, Noisy{}, Seed{3 + me});
      const double nan = std::numeric_limits<double>::quiet_NaN();
      Numbers evaluated;
      for (std::size_t n = 0; n < 8; ++n) {
        job.step(Points{1, n == 3 && me == 0 ? nan : 0.25});
        job.evaluate(Points{});
        if (n == 0) evaluated = job.model().evaluated;
        require(job.model().evaluated == evaluated, "evaluations draw different numbers");
      }
      require(job.skipped_steps() == 1, "no step was skipped");
      require_drawn(job.model(), expected_run(3, me, 0, 8, 2), "steps");
      const std::uint64_t all_left = (std::uint64_t{1} << width) - 1;
      require(evaluated[0] == all_left && evaluated[1] == all_left, "an evaluation drops");
      const std::set<std::uint64_t> different(job.model().drawn.begin(), job.model().drawn.end());
      require(different.size() == 3 * 8 && !different.contains(evaluated[2]), "numbers come twice");
    });
  }
}

BOOST_AUTO_TEST_CASE(phases_of_a_hand_written_step_draw_what_a_step_draws) {
  all_well(2, [](Shared& comm) {
    Job job(comm, Noisy{}, Seed{3});
    for (std::size_t n = 0; n < 3; ++n) {
      const Points points;
      job.no_sync().forward(points).backward();
      auto forwarded = job.forward(points);
      job.evaluate(points);  // backward still has the numbers of its forward
      std::move(forwarded).backward().reduce().update();
    }
    require_drawn(job.model(), expected_run(3, comm.rank().value(), 0, 6, 2), "phases");
  });
}

BOOST_AUTO_TEST_CASE(the_bare_step_of_a_world_of_one_draws_too) {
  LoopbackCommunicator nobody;
  DistributedDataParallel<Noisy, World<1>> job(nobody, Noisy{}, Seed{3});
  for (std::size_t n = 0; n < 3; ++n) job.step(Points{});
  require_drawn(job.model(), expected_run(3, 0, 0, 3, 1), "steps");
  job.initialize([](auto& initial) { initial.fill_by_default(); }, Seed{8});
  job.step(Points{});
  require_drawn(job.model(), expected_run(3, 0, 0, 4, 1), "after other values");
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_draw_as_ranks_do) {
  DataParallel<Noisy, Accumulate<2>> dp({.replicas = 2, .seed = Seed{3}}, Noisy{});
  for (std::size_t n = 0; n < 4; ++n) {
    dp.step(Points{4});
    dp.evaluate(Points{4});
  }
  std::size_t replica = 0;
  dp.for_each_model([&](const Noisy& model) {
    require_drawn(model, expected_run(3, replica, 0, 4, 2), "replica " + std::to_string(replica));
    ++replica;
  });
  BOOST_TEST(replica == 2u);
}

// A resumed job goes on with the checkpoint's seed and says so. One that only loads the training's
// state is a run of its own.
BOOST_AUTO_TEST_CASE(a_resumed_job_draws_what_it_would_have_drawn) {
  const TemporaryFolder folder;
  const std::string path = folder / "saved.safetensors";
  for (const std::size_t world : {1u, 2u}) {
    all_well(world, [&](Shared& comm) {
      const std::size_t me = comm.rank().value();
      {
        Job job(comm, Noisy{}, Seed{3});
        for (std::size_t n = 0; n < 6; ++n) job.step(Points{});
        save(job, path);
      }
      Job job(comm, Noisy{}, Seed{99});
      job.evaluate(Points{});
      const Numbers others = job.model().evaluated;
      const Resumed resumed = resume(job, path);
      require(resumed.notes == std::vector<std::string>{"random numbers of steps go on from seed 3 "
                                                        "of the checkpoint, not from seed 99"},
              "the other seed is not told");
      job.evaluate(Points{});
      require(job.model().evaluated != others, "evaluations still draw from the other seed");
      for (std::size_t n = 0; n < 4; ++n) job.step(Points{});
      require_drawn(job.model(), expected_run(3, me, 6, 4, 2), "resumed");
      require(resume(job, path).notes.empty(), "something is told of the same seed");

      Job another(comm, Noisy{}, Seed{99});
      load(another, path);
      for (std::size_t n = 0; n < 2; ++n) another.step(Points{});
      require_drawn(another.model(), expected_run(99, me, 6, 2, 2), "loaded");
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()
