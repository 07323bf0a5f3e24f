// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/torch/step_tensors.hpp"

#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/observe/scores.hpp"
#include "lockstep/detail/torch/batch.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "temporary_folder.hpp"

BOOST_AUTO_TEST_SUITE(torch_random)

using namespace lockstep;

namespace {

struct Weights : ::torch::nn::Module {
  Weights() { weight = register_parameter("weight", at::ones({64})); }
  at::Tensor weight;
};

/// Notes which places a dropout has left.
struct Drops : TorchModel<Drops, Weights> {
  static constexpr bool draws = true;
  at::Tensor loss(const at::Tensor& batch) {
    const at::Tensor left = at::dropout(batch, 0.5, module().is_training());
    masks.push_back(mask_of(left));
    return (module().weight * left).sum();
  }
  void score(const at::Tensor&, auto& tally) {
    scored.push_back(at::rand({1}).item<float>());
    tally.add("ones", 1, 1);
  }
  static std::uint64_t mask_of(const at::Tensor& left) {
    std::uint64_t mask = 0;
    for (int i = 0; i != 64; ++i) mask = 2 * mask + (left[i].item<float>() != 0 ? 1 : 0);
    return mask;
  }
  std::vector<std::uint64_t> masks;
  std::vector<float> scored;
};

}  // namespace

BOOST_AUTO_TEST_CASE(dropout_differs_by_rank_and_step_and_is_the_same_after_a_restart) {
  const TemporaryFolder folder;
  ranks::Common<std::uint64_t[2][2][6]> masks;  // by run, rank, micro-batch
  const auto run = [&](std::size_t way, auto& comm) {
    at::set_num_threads(1);
    const at::Tensor batch = at::ones({64});
    DistributedDataParallel<Drops, Accumulate<2>> ddp(comm, {}, Seed{7});
    auto& own = (*masks)[way][comm.rank().value()];
    std::size_t first = 0;
    if (way == 1) {
      resume(ddp, folder / "half");
      first = 4;
    }
    for (std::size_t i = first; i != 6; ++i) {
      if (way == 1)
        at::rand({static_cast<std::int64_t>(5 + comm.rank().value())});  // others draw too
      ddp.step(batch);
      own[i] = ddp.model().masks.back();
      if (way == 0 && i == 3) save(ddp, folder / "half");
    }
    ddp.evaluate(batch);
    ranks::require(ddp.model().masks.back() == ~std::uint64_t{0}, "evaluation drops");
    Tally tally;
    for (int i = 0; i != 2; ++i) {
      at::rand({static_cast<std::int64_t>(1 + i)});
      ddp.evaluate(batch, tally);
    }
    const std::vector<float>& scored = ddp.model().scored;
    ranks::require(scored[0] == scored[1], "a score depends on what was drawn before");
  };
  for (const std::size_t way : {0, 1}) {
    const auto ends = ranks::run(ranks::As::processes, 2, [&](auto& comm) { run(way, comm); });
    for (const std::string& end : ends) BOOST_TEST(end == "");
  }
  std::vector<std::uint64_t> all;
  for (std::size_t rank = 0; rank != 2; ++rank) {
    for (std::size_t i = 0; i != 6; ++i) {
      all.push_back((*masks)[0][rank][i]);
      if (i >= 4) BOOST_TEST((*masks)[0][rank][i] == (*masks)[1][rank][i]);
    }
  }
  std::sort(all.begin(), all.end());
  BOOST_TEST((std::adjacent_find(all.begin(), all.end()) == all.end()));  // all differ
}

namespace {

/// Its initial values are drawn by LibTorch.
struct Layers : ::torch::nn::Cloneable<Layers> {
  Layers() { reset(); }
  void reset() override {
    first = register_module("first", ::torch::nn::Linear(5, 7));
    last = register_module("last", ::torch::nn::Linear(7, 3));
  }
  ::torch::nn::Linear first{nullptr}, last{nullptr};
};
struct Seeded : TorchModel<Seeded, Layers> {
  at::Tensor loss(const at::Tensor& x) {
    return module().last(at::tanh(module().first(x))).pow(2).mean();
  }
};

constexpr std::size_t seeded_values = 5 * 7 + 7 + 7 * 3 + 3;
using Values = float[seeded_values];

/// The initial values of a model, and what LibTorch draws next.
void copy_values(Layers& module, Values& to, float* drawn = nullptr) {
  std::size_t at = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor flat = parameter.detach().contiguous().view(-1);
    for (std::int64_t i = 0; i != flat.numel(); ++i) to[at++] = flat[i].item<float>();
  }
  if (drawn != nullptr) *drawn = at::rand({1}).item<float>();
}
bool same(const Values& a, const Values& b) { return std::equal(a, a + seeded_values, b); }

}  // namespace

BOOST_AUTO_TEST_CASE(the_jobs_seed_gives_a_module_its_initial_values) {
  struct Run {
    Values values[4];
    float drawn[4];
  };
  const auto run = [](ranks::As as, std::size_t world, std::uint64_t seed, bool by_function,
                      Run& run) {
    const auto ends = ranks::run(as, world, [&](auto& comm) {
      if (as == ranks::As::processes) at::set_num_threads(1);
      using Ddp = DistributedDataParallel<Seeded>;
      const auto note = [&](Ddp& ddp) {
        const std::size_t rank = comm.rank().value();
        float* drawn = as == ranks::As::processes ? &run.drawn[rank] : nullptr;
        copy_values(ddp.model().module(), run.values[rank], drawn);
      };
      if (by_function) {
        Ddp ddp(comm, [] { return Seeded(); }, Seed{seed});
        note(ddp);
      } else {
        Ddp ddp(comm, {}, Seed{seed});
        note(ddp);
      }
    });
    for (const std::string& end : ends) BOOST_TEST(end == "");
  };
  ranks::Common<Run[5]> runs;
  auto& all = *runs;
  run(ranks::As::processes, 2, 7, false, all[0]);
  run(ranks::As::processes, 2, 7, true, all[1]);
  run(ranks::As::processes, 2, 8, false, all[2]);
  run(ranks::As::processes, 4, 7, false, all[3]);
  // Threads share LibTorch's generator. All of them make their modules from it.
  run(ranks::As::threads, 4, 7, false, all[4]);

  ::torch::manual_seed(7);
  Layers plain;
  Values want;
  copy_values(plain, want);
  for (const int i : {0, 1, 3, 4}) {
    const std::size_t world = i < 3 ? 2 : 4;
    for (std::size_t rank = 0; rank != world; ++rank)
      BOOST_TEST(same(all[i].values[rank], want), "run " << i << ", rank " << rank);
  }
  BOOST_TEST(!same(all[2].values[0], want));
  // What is drawn later differs between ranks, and comes again with the seed.
  BOOST_TEST(all[0].drawn[0] != all[0].drawn[1]);
  BOOST_TEST(all[0].drawn[0] == all[1].drawn[0]);
  BOOST_TEST(all[0].drawn[1] == all[1].drawn[1]);
  BOOST_TEST(all[0].drawn[0] != all[2].drawn[0]);

  // Replicas of one process, and a model that is given, which keeps the values that it has.
  for (const bool by_function : {false, true}) {
    at::rand({3});
    Values values;
    const auto note = [&](auto& dp) { copy_values(dp.model().module(), values); };
    if (by_function) {
      DataParallel<Seeded> dp({.replicas = 2, .seed = Seed{7}}, [] { return Seeded(); });
      note(dp);
    } else {
      DataParallel<Seeded> dp({.replicas = 2, .seed = Seed{7}});
      note(dp);
    }
    BOOST_TEST(same(values, want));
  }
  ::torch::manual_seed(5);
  Seeded given;
  Values had, has;
  copy_values(given.module(), had);
  DataParallel<Seeded> dp({.replicas = 2, .seed = Seed{7}}, std::move(given));
  copy_values(dp.model().module(), has);
  BOOST_TEST(same(had, has));
}

BOOST_AUTO_TEST_CASE(a_seed_costs_little) {
  namespace chrono = std::chrono;
  constexpr int times = 2000;
  const auto begin = chrono::steady_clock::now();
  for (int i = 0; i != times; ++i) lockstep::detail::seed_generator(static_cast<std::uint64_t>(i));
  const chrono::duration<double, std::micro> took = chrono::steady_clock::now() - begin;
  BOOST_TEST_MESSAGE("a seed takes " << took.count() / times << " us");
  BOOST_TEST(took.count() / times < 200);
  lockstep::detail::seed_generator(5);
  const at::Tensor a = at::rand({3});
  lockstep::detail::seed_generator(5);
  BOOST_TEST(at::equal(a, at::rand({3})));
}

BOOST_AUTO_TEST_SUITE_END()
