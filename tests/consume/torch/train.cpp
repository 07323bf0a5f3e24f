// SPDX-License-Identifier: Apache-2.0
// A LibTorch module, trained through shared memory and then through Gloo.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mse_loss.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <lockstep/gloo.hpp>
#include <lockstep/torch.hpp>
#include <lockstep/trainer.hpp>

using namespace lockstep;

struct Line : TorchModel<Line, torch::nn::Linear> {  // y = slope x
  Line() : TorchModel(torch::nn::LinearOptions(1, 1).bias(false)) {}

  at::Tensor loss(const LabelledBatch<float, float>& batch) {
    const auto column = [&](const std::vector<float>& values) {
      return at::from_blob(const_cast<float*>(values.data()),
                           {static_cast<std::int64_t>(values.size()), 1}, at::kFloat);
    };
    return at::mse_loss(module()->forward(column(batch.inputs)), column(batch.labels));
  }
};

int main(int argc, char** argv) {
  const auto train = [](auto& job) {
    job.optimizer().lr = 0.05;
    job.fit(InMemoryDataset<float, float>({1, 2, 3, 4}, {3, 6, 9, 12}), {.epochs = 6});
    const float slope = job.model().module()->weight.template item<float>();
    job.on_rank0([&](auto log) { log.print("y = " + value_text(slope) + " x"); });
  };
  const int status = launch<Trainer<Line, Backend<Shm>>>(argc, argv, train);
  return status != 0 ? status : launch<Trainer<Line, Backend<Gloo>>>(argc, argv, train);
}
