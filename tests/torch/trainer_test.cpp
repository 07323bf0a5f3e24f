// SPDX-License-Identifier: Apache-2.0
// Jobs of modules and of their holders, copies of models, replicas of DP.
#include "lockstep/detail/trainer/trainer.hpp"

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/torch/batch.hpp"
#include "lockstep/detail/torch/model.hpp"
#include "lockstep/detail/trainer/job_saves.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"
#include "torch/cases.hpp"
#include "torch/model_ranks.hpp"

BOOST_AUTO_TEST_SUITE(torch_trainer)

namespace {

using namespace torch_tests;

using Rows = LabelledBatch<float, std::int64_t>;

/// A holder as the module: tanh between two linear layers.
struct Stacked : TorchModel<Stacked, ::torch::nn::Sequential> {
  Stacked()
      : TorchModel(::torch::nn::Linear(12, 16), ::torch::nn::Tanh(), ::torch::nn::Linear(16, 5)) {}
  at::Tensor loss(const Batch& batch) {
    return at::cross_entropy_loss(module()->forward(batch.inputs), batch.labels);
  }
};

/// Another one, with dropout, whose losses are of lockstep's batches.
struct Dropping : TorchModel<Dropping, ::torch::nn::Sequential> {
  static constexpr bool draws = true;
  Dropping()
      : TorchModel(::torch::nn::Linear(12, 16), ::torch::nn::Tanh(), ::torch::nn::Dropout(0.25),
                   ::torch::nn::Linear(16, 5)) {}
  at::Tensor loss(const Rows& rows) {
    number = at::rand({1}).item<double>();
    const TensorBatch batch = as_tensors(rows);
    return at::cross_entropy_loss(module()->forward(batch.inputs), batch.labels);
  }
  double number = 0;  // drawn by the latest step
};

std::vector<float> stacked_values(const auto& model) {
  std::vector<float> values;
  for (const at::Tensor& tensor : model.module()->parameters()) {
    const at::Tensor row = tensor.detach().contiguous();
    values.insert(values.end(), row.const_data_ptr<float>(),
                  row.const_data_ptr<float>() + row.numel());
  }
  return values;
}

using Job = Trainer<Dropping, Optimizer<AdamW>>;

auto rows(std::size_t count) {
  std::vector<float> inputs(count * 12);
  std::vector<std::int64_t> labels(count);
  for (std::size_t i = 0; i != inputs.size(); ++i)
    inputs[i] = std::sin(0.1f * static_cast<float>(i * i % 101));
  for (std::size_t i = 0; i != count; ++i) labels[i] = static_cast<std::int64_t>(i % 5);
  return InMemoryDataset<float, std::int64_t>(std::move(inputs), std::move(labels));
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_copy_of_a_model_has_a_module_of_its_own) {
  all_well(1, [](Shared&) {
    const Stacked one;
    one.module()->parameters()[1].requires_grad_(false);
    Stacked other(one);
    require(other.module()->parameters()[0].requires_grad() &&
                !other.module()->parameters()[1].requires_grad(),
            "the copy trains something else");
    require(stacked_values(one) == stacked_values(other), "the copy has other values");
    const at::NoGradGuard quiet;
    other.module()->parameters()[0].add_(1);
    require(stacked_values(one) != stacked_values(other), "the copy has no values of its own");
    const Model first(make_net("plain"));
    const std::string cannot = message_of([&] { Model copy(first); });
    require(contains(cannot, "cannot be copied") && contains(cannot, "torch::nn::Cloneable"),
            cannot);
  });
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_train_as_one_module_does) {
  all_well(1, [](Shared&) {
    ::torch::manual_seed(3);
    DataParallel<Stacked> dp({.replicas = 2});
    Stacked plain;
    {
      const at::NoGradGuard quiet;
      std::size_t number = 0;
      dp.for_each_parameter([&](auto, auto view) {
        at::Tensor to = plain.module()->parameters()[number++];
        to.copy_(at::from_blob(const_cast<float*>(view.data_handle()), to.sizes()));
      });
    }
    dp.optimizer().lr = 0.1;
    ::torch::optim::SGD optimizer(plain.module()->parameters(), 0.1);
    for (std::size_t s = 0; s != 5; ++s) {
      const Batch batch = batch_of("plain", s, 0);
      dp.step(batch);
      optimizer.zero_grad();
      plain.loss(batch).backward();
      optimizer.step();
    }
    std::size_t at = 0;
    const std::vector<float> want = stacked_values(plain);
    dp.for_each_parameter([&](auto name, auto view) {
      for (std::size_t i = 0; i != view.size(); ++i, ++at)
        require(std::abs(view.data_handle()[i] - want[at]) < 1e-6,
                std::string(name) + " is " + std::to_string(view.data_handle()[i]) + ", not " +
                    std::to_string(want[at]));
    });
  });
}

BOOST_AUTO_TEST_CASE(
    a_trainer_of_a_holder_with_dropout_resumes_to_the_same_bits_twice_in_one_process) {
  for (const std::size_t world : {1u, 2u}) {
    const TemporaryFolder folder;
    BOOST_CHECK_NO_THROW(run_sessions(world, [&](Session& session) {
      const auto data = rows(40);
      const auto train = [&](Job& job, const std::string& saved) {
        for (auto epoch : job.epochs(3)) {
          for (const auto& batch : epoch.batches(data, 4)) job.step(batch);
          if (epoch.number() == 0 && !saved.empty()) job.save(saved);
        }
        return job.evaluate(data, 8)["loss"];
      };
      Job job(session);
      job.optimizer().lr = 0.01;
      const double begin = job.evaluate(data, 8)["loss"];
      const double end = train(job, folder / "first");
      require(end < begin, "nothing was learned");
      const double drawn = job.model().number;
      const auto ranks = static_cast<double>(world);
      require(world == 1 || job.all_reduce(drawn) != drawn * ranks, "all ranks draw the same");
      Job second(session);  // in the same process, from the first one's first epoch
      second.resume(folder / "first");
      require(train(second, "") == end, "the loss is another one after resuming");
      require(stacked_values(second.model()) == stacked_values(job.model()),
              "other bits after resuming");
      require(second.model().number == drawn, "other numbers are drawn after resuming");
    }));
  }
}

BOOST_AUTO_TEST_SUITE_END()
