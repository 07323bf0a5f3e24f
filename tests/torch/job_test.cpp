// SPDX-License-Identifier: Apache-2.0
// Whole jobs of a LibTorch module: the loop in one call, and ranks in groups and on several hosts.
#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/torch/batch.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"
#include "torch/model_ranks.hpp"

#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.hpp"
#endif

BOOST_AUTO_TEST_SUITE(torch_job)

namespace {

using namespace torch_tests;
using Rows = LabelledBatch<float, std::int64_t>;

struct NormedImpl : ::torch::nn::Cloneable<NormedImpl> {
  NormedImpl() { NormedImpl::reset(); }
  void reset() override {
    first = register_module("first", ::torch::nn::Linear(6, 8));
    norm = register_module("norm", ::torch::nn::BatchNorm1d(8));
    last = register_module("last", ::torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(norm(first(x)))); }
  ::torch::nn::Linear first{nullptr}, last{nullptr};
  ::torch::nn::BatchNorm1d norm{nullptr};
};

struct Normed : TorchModel<Normed, NormedImpl> {
  Normed() {
    const at::NoGradGuard quiet;
    std::int64_t number = 0;
    for (at::Tensor& parameter : module().parameters())
      parameter.copy_(pattern(parameter.sizes(), ++number, 0.5));
  }
  Normed(const Normed&) = default;
  at::Tensor loss(const Rows& rows) {
    const TensorBatch batch = as_tensors(rows);
    return at::cross_entropy_loss(module().forward(batch.inputs), batch.labels);
  }
  void score(const Rows& rows, auto& tally) {
    const TensorBatch batch = as_tensors(rows);
    const at::Tensor classes = module().forward(batch.inputs);
    tally.add("accuracy", classes.argmax(1).eq(batch.labels).sum().template item<double>(),
              static_cast<double>(batch.size()));
  }
};

/// Three classes that lie apart.
auto samples(std::size_t count) {
  std::vector<float> inputs(count * 6);
  std::vector<std::int64_t> labels(count);
  for (std::size_t i = 0; i != count; ++i) {
    labels[i] = static_cast<std::int64_t>(i % 3);
    for (std::size_t k = 0; k != 6; ++k)
      inputs[6 * i + k] =
          std::sin(static_cast<float>(i * 7 + k * k)) + (i % 3 == k % 3 ? 2.f : 0.f);
  }
  return InMemoryDataset<float, std::int64_t>(std::move(inputs), std::move(labels));
}

/// Trains two epochs on this many ranks and returns the parameters. Every update has the same
/// samples, whatever the number of ranks.
template <class... Ps>
std::vector<float> trained(std::size_t world, std::size_t batch) {
  using Job = Trainer<Normed, Optimizer<SGD>, Norms<Synced>, Ps...>;
  ranks::Common<float[200]> values;
  ranks::Common<std::size_t> count;
  run_sessions(world, [&](Session& session) {
    Job job(session);
    job.optimizer().lr = 0.25;
    const auto data = samples(48);
    for (auto epoch : job.epochs(2))
      for (const auto& rows : epoch.batches(data, batch)) job.step(rows);
    job.for_each_parameter([&](auto&&, auto view) {
      if (session.rank() != Rank{0}) return;
      for (std::size_t i = 0; i != view.size(); ++i) (*values)[(*count)++] = view.data_handle()[i];
    });
  });
  return {*values, *values + *count};
}

void expect_close(const std::vector<float>& have, const std::vector<float>& want) {
  BOOST_REQUIRE(!want.empty());
  BOOST_REQUIRE(have.size() == want.size());
  for (std::size_t i = 0; i != want.size(); ++i) BOOST_TEST(std::abs(have[i] - want[i]) < 2e-6);
}

}  // namespace

BOOST_AUTO_TEST_CASE(fit_trains_and_scores_with_the_models_own_figures) {
  for (const std::size_t world : {1u, 2u}) {
    BOOST_CHECK_NO_THROW(run_sessions(world, [](Session& session) {
      Trainer<Normed, Optimizer<AdamW>> job(session);
      job.optimizer().lr = 0.05;
      const auto data = samples(60);
      const double begin = job.evaluate(data, 10)["accuracy"];
      std::vector<double> seen;
      job.fit(data, data, {.epochs = 6, .batch_size = 5, .test_batch_size = 10},
              [&](auto&, const Scores& scores) {
                seen.push_back(scores["accuracy"]);
                return seen.size() < 4;
              });
      require(seen.size() == 4, "the function did not end the training");
      require(seen.back() > begin && seen.back() > 0.9, "nothing was learned");
      require(job.evaluate(data, 10)["accuracy"] == seen.back(), "another accuracy");
      require(job.model().module().is_training(), "the module stays in evaluation");
    }));
  }
}

BOOST_AUTO_TEST_CASE(ranks_in_groups_train_as_one) {
  const std::vector<float> alone = trained<>(1, 16);
  expect_close(trained<Groups<Grid<dynamic, 2>>, Sharding<ZeroRedundancy>>(4, 4), alone);
}

#if LOCKSTEP_HAS_GLOO
BOOST_AUTO_TEST_CASE(ranks_of_a_hierarchy_with_groups_train_as_one) {
  expect_close(
      trained<Backend<Hierarchical<Shm, Gloo>>, Groups<Grid<dynamic, 2>>, Sharding<ZeroRedundancy>>(
          4, 4),
      trained<>(1, 16));
}
#endif

BOOST_AUTO_TEST_SUITE_END()
