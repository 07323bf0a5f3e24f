// SPDX-License-Identifier: Apache-2.0
// A convolution under `Trainer`: its gradients are checked once, then it learns to tell lines
// apart.
// ./convolution --ranks 2
#include "convolution.hpp"

#include <stdexcept>
#include <string>

using namespace lockstep;

using Job = Trainer<ConvNet, ParallelStrategy<DDP>, Backend<Shm>, Optimizer<AdamW>>;

/// Every parameter by name: the job's, or initial values.
void for_each_parameter(auto& from, auto f) {
  f(from.param("conv.weight"_p));
  f(from.param("conv.bias"_p));
  f(from.param("fc.weight"_p));
  f(from.param("fc.bias"_p));
}

/// Every gradient against the slope of the loss. All ranks look at the same data, each at its
/// share.
void check_gradients(Job& job, const InMemoryDataset<double, std::int32_t>& data) {
  std::vector<double> values;
  for_each_parameter(job, [&](const auto& view) {
    values.insert(values.end(), view.data_handle(), view.data_handle() + view.size());
  });
  const auto write = [&] {
    job.ddp().initialize([&](auto& initial) {
      auto value = values.begin();
      for_each_parameter(initial, [&](const auto& view) {
        for (std::size_t i = 0; i < view.size(); ++i) view.data_handle()[i] = *value++;
      });
    });
  };

  // One batch of this rank's share: the average over ranks is then the gradient of all samples.
  DistributedSampler<Exact, InOrder> sampler(data.size(), job.world_size(), job.rank());
  DataLoader loader(data, sampler, {.batch_size = data.size() / job.world_size().value()});
  job.optimizer().lr = 0;  // the phases end with an update, which is to change nothing
  std::vector<double> gradients;
  for (const auto& batch : loader) {
    auto averaged = job.ddp().forward(batch).backward().reduce();
    const auto add = [&](const auto& view) {
      gradients.insert(gradients.end(), view.data_handle(), view.data_handle() + view.size());
    };
    add(averaged.grad("conv.weight"_p));
    add(averaged.grad("conv.bias"_p));
    add(averaged.grad("fc.weight"_p));
    add(averaged.grad("fc.bias"_p));
    std::move(averaged).update();
  }

  const auto loss_at = [&](std::size_t i, double value) {
    const double before = std::exchange(values[i], value);
    write();
    values[i] = before;
    return job.evaluate(data, data.size())["loss"];
  };
  constexpr double h = 1e-6;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double slope = (loss_at(i, values[i] + h) - loss_at(i, values[i] - h)) / (2 * h);
    if (std::abs(gradients.at(i) - slope) > 1e-7)
      throw std::runtime_error("gradient " + std::to_string(i) + " is " +
                               std::to_string(gradients[i]) + ", the slope " +
                               std::to_string(slope));
  }
  job.on_rank0([&](auto log) {
    log.print(std::to_string(values.size()) + " gradients are the slopes of the loss");
  });
}

void train(Job& job) {
  const auto train = make_images(480, 1);
  const auto test = make_images(101, 2);
  job.optimizer().lr = 0.02;
  Scores scores;
  for (auto epoch : job.epochs(12)) {
    for (const auto& batch : epoch.batches(train, 24 / job.world_size().value())) job.step(batch);
    scores = job.evaluate(test, 20);
  }
  job.on_rank0([&](auto log) {
    log.print("loss " + fixed_text(scores["loss"], 6) + ", accuracy " +
              fixed_text(scores["accuracy"], 4));
  });
  if (scores["accuracy"] < 0.95) throw std::runtime_error("the network has not learnt");
}

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    Job checked(session);  // a job of its own: the check moves the optimizer's states
    check_gradients(checked, make_images(24, 7));
    Job job(session);
    train(job);
  });
}
