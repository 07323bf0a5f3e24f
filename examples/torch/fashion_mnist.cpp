// SPDX-License-Identifier: Apache-2.0
// A convolutional network on Fashion-MNIST that is an ordinary LibTorch module: LibTorch's layers
// and autograd, lockstep's data, ranks, loop, optimizer, evaluation and checkpoints.
//
//   ./fashion_mnist --ranks 2                  (--epochs 2 for fewer)
//   ./fashion_mnist --ranks 2 --checkpoint run --resume
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <string>

#include "fashion_mnist.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/torch.hpp"
#include "lockstep/trainer.hpp"

using namespace lockstep;

/// Two convolutions with batch norms, each with half the pixels of the one before, and a linear
/// layer.
struct ConvNet : torch::nn::Cloneable<ConvNet> {
  ConvNet() { reset(); }
  void reset() override {
    using namespace torch::nn;
    conv1 = register_module("conv1", Conv2d(Conv2dOptions(1, 32, 3).padding(1).bias(false)));
    norm1 = register_module("norm1", BatchNorm2d(32));
    conv2 = register_module("conv2", Conv2d(Conv2dOptions(32, 64, 3).padding(1).bias(false)));
    norm2 = register_module("norm2", BatchNorm2d(64));
    linear = register_module("linear", Linear(64 * 7 * 7, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(norm1->forward(conv1->forward(x))), 2);
    x = torch::max_pool2d(torch::relu(norm2->forward(conv2->forward(x))), 2);
    return linear->forward(x.flatten(1));
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear linear{nullptr};
};

/// What lockstep trains: the module, and the loss of a batch.
struct Clothes : TorchModel<Clothes, ConvNet> {
  using Images = ImageDataset::batch_type;

  torch::Tensor loss(const Images& images) {
    const TensorBatch batch = as_tensors(images);
    return torch::cross_entropy_loss(outputs(batch), batch.labels);
  }
  /// More about an evaluation than its loss. The module is in evaluation, and no graph is built.
  void score(const Images& images, auto& tally) {
    const TensorBatch batch = as_tensors(images);
    const torch::Tensor classes = outputs(batch);
    const auto count = static_cast<double>(batch.size());
    const torch::Tensor loss = torch::cross_entropy_loss(classes, batch.labels);
    const torch::Tensor right = classes.argmax(1).eq(batch.labels).sum();
    tally.add("loss", loss.template item<double>() * count, count);
    tally.add("accuracy", right.template item<double>(), count);
  }
  torch::Tensor outputs(const TensorBatch& batch) {
    return module().forward(batch.inputs.view({-1, 1, 28, 28}));
  }
};

using Job =
    Trainer<Clothes, ParallelStrategy<DDP>, Backend<Shm>, Optimizer<AdamW>, Schedule<Cosine>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const auto train = fashion_mnist("train", job.data());
    const auto test = fashion_mnist("test", job.data());
    const std::size_t batch_size = 128 / job.world_size().value();  // of all ranks together: 128
    const auto epochs = job.option("epochs", 6u, "passes over the training images");
    job.optimizer().lr = 2e-3;
    job.checkpoints();  // it can save: --checkpoint, --resume
    Scores scores;
    for (auto epoch : job.epochs(epochs)) {
      for (const auto& batch : epoch.batches(train, batch_size)) job.step(batch);
      scores = job.evaluate(test, 500);
    }
    job.on_rank0([&](auto log) {
      log.print("test accuracy " + fixed_text(100 * scores["accuracy"], 2) + "%");
    });
  });
}
