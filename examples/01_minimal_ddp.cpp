// SPDX-License-Identifier: Apache-2.0
// PyTorch's minimal DDP script, part by part: a linear model, 100 samples, batches of 4, two
// epochs, a sampler that is told the epoch, and prints on rank 0. docs/from-pytorch.md has it
// beside PyTorch's; 03_fashion_mnist.cpp is the same loop with a Trainer.
//
//   ./minimal_ddp              two ranks of itself
//   ./minimal_ddp --ranks 4
//   torchrun --no-python --nproc-per-node 2 ./minimal_ddp
#include <cstdio>
#include <vector>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

using Rows = LabelledBatch<float, float>;

/// torch.nn.Linear(10, 1) and torch.nn.MSELoss().
struct Linear {
  using Parameters = ParameterList<Parameter<"weight", float, 1, 10>, Parameter<"bias", float, 1>>;

  float forward(auto& step, const Rows& batch) {
    const auto weight = step.param("weight"_p);  // a view, 1 x 10, to read
    const auto bias = step.param("bias"_p);
    errors.resize(batch.size());
    float loss = 0;
    for (std::size_t i = 0; i < batch.size(); ++i) {
      errors[i] = bias(0) - batch.labels[i];
      for (std::size_t j = 0; j < 10; ++j) errors[i] += weight(0, j) * batch.row(i)[j];
      loss += errors[i] * errors[i];
    }
    return loss / static_cast<float>(batch.size());  // the mean over the batch
  }

  void backward(auto& step, const Rows& batch) {
    const auto weight = step.grad("weight"_p);  // the same shape, to write
    const auto bias = step.grad("bias"_p);
    const float scale = 2 / static_cast<float>(batch.size());
    bias(0) = 0;
    for (const float error : errors) bias(0) += scale * error;
    step.ready("bias"_p);  // complete: it may be averaged over ranks now
    for (std::size_t j = 0; j < 10; ++j) {
      weight(0, j) = 0;
      for (std::size_t i = 0; i < errors.size(); ++i)
        weight(0, j) += scale * errors[i] * batch.row(i)[j];
    }
    step.ready("weight"_p);
  }

  std::vector<float> errors;  // kept by forward for backward
};

InMemoryDataset<float, float> make_samples() {
  RandomStream random(Seed{0});
  std::vector<float> x(100 * 10);
  std::vector<float> y(100);
  for (float& value : x) value = static_cast<float>(random.normal());
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < 10; ++j) y[i] += static_cast<float>(j) * x[10 * i + j] / 10;
  }
  return {std::move(x), std::move(y)};
}

void train(Session& session) {                                               // PyTorch:
  auto comm = make_shm_communicator(session.membership(), session.store());  // init_process_group
  const auto dataset = make_samples();
  DistributedSampler<> sampler(dataset.size(), comm.world_size(), comm.rank());
  DataLoader loader(dataset, sampler, {.batch_size = 4});
  DistributedDataParallel<Linear, Optimizer<SGD>> ddp(comm);
  ddp.optimizer().lr = 0.05;

  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    double loss = 0;
    for (const auto& batch : loader) {
      loss = ddp.forward(batch).backward().reduce().update();  // loss.backward(); optimizer.step()
    }
    if (comm.rank() == Rank{0}) std::printf("epoch %d: loss %.4f\n", static_cast<int>(epoch), loss);
  }
  comm.barrier();
}

}  // namespace

int main(int argc, char** argv) { return launch(argc, argv, train, 2); }
