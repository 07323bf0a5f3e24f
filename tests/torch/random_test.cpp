// SPDX-License-Identifier: Apache-2.0
#include "lockstep/torch/random.hpp"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/observe/tally.hpp"
#include "lockstep/torch/batch.hpp"
#include "lockstep/torch/model.hpp"
#include "lockstep/trainer/loading.hpp"
#include "lockstep/trainer/saving.hpp"
#include "lockstep/trainer/trainer.hpp"
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
      first = 3;
    }
    for (std::size_t i = first; i != 6; ++i) {
      if (way == 1)
        at::rand({static_cast<std::int64_t>(5 + comm.rank().value())});  // others draw too
      ddp.step(batch);
      own[i] = ddp.model().masks.back();
      if (way == 0 && i == 2) save(ddp, folder / "half");
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
      if (i >= 3) BOOST_TEST((*masks)[0][rank][i] == (*masks)[1][rank][i]);
    }
  }
  std::sort(all.begin(), all.end());
  BOOST_TEST((std::adjacent_find(all.begin(), all.end()) == all.end()));  // all differ
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
