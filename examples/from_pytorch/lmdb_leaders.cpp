// SPDX-License-Identifier: Apache-2.0
// ./lmdb_leaders --ranks 4 --data points.lmdb
#include <torch/torch.h>

#include <cstdio>
#include <cstring>

#include "lockstep/lmdb.hpp"
#include "lockstep/torch.hpp"
#include "lockstep/trainer.hpp"

using namespace lockstep;

using Point = OwnedSample<float, float>;

struct Line : TorchModel<Line, torch::nn::Linear> {
  Line() : TorchModel(10, 1) {}
  torch::Tensor loss(const LabelledBatch<float, float>& batch) {
    const TensorBatch tensors = as_tensors(batch);
    return torch::mse_loss(module()(tensors.inputs), tensors.labels.unsqueeze(1));
  }
};

using Job = Trainer<Line, Optimizer<SGD>, Groups<Grid<dynamic, 2>>, Feed<LeaderOfGroup>>;

void decode(std::span<const std::byte> record, Point& out) {  // ten inputs and a label
  out.inputs.resize(10);
  std::memcpy(out.inputs.data(), record.data(), 40);
  std::memcpy(&out.label, record.data() + 40, 4);
}

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto points = job.open([&] { return lmdb_dataset<Point>(job.data(), decode); });
    job.optimizer().lr = 0.05;
    for (auto epoch : job.epochs(3)) {
      float total = 0;
      int steps = 0;
      for (const auto& batch : epoch.batches(points, 8)) {
        total += static_cast<float>(job.step(batch));
        ++steps;
      }
      const auto sum = job.reduce(total);
      if (job.rank() == Rank{0})
        std::printf("epoch %zu loss %.9g\n", epoch.number(),
                    sum / job.world_size().value() / steps);
    }
  });
}
