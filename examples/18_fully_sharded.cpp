// SPDX-License-Identifier: Apache-2.0
// Fully sharded: a model whose parameters alone take one and a half times the memory that a process
// may have. Every rank keeps its part of parameters, gradients and momenta, and a few blocks at a
// time are gathered while they compute.
//
//   ulimit -s 512; ulimit -d 50000      51 MB of data for each process, 0.5 MB for each stack
//   ./fully_sharded --ranks 8           trains 77 MB of parameters, and saves
//   ./fully_sharded --ranks 8 --resume  goes on
//   ./fully_sharded --ranks 1           does not fit: std::bad_alloc
#include <array>
#include <string>
#include <vector>

#include "cross_entropy.hpp"
#include "image_dataset.hpp"
#include "lockstep/gloo.hpp"
#include "matrix.hpp"

using namespace lockstep;

/// x := x + relu(W x), 72 times, between a linear layer and a classifier.
struct Residual {
  static constexpr std::size_t blocks = 72, width = 512, pixels = 784, classes = 10;

  using Block = ParameterList<Parameter<"weight", float, width, width>>;
  using Parameters =
      ParameterList<Parameter<"in.weight", float, width, pixels>, Repeat<"blocks", blocks, Block>,
                    Parameter<"head.weight", float, classes, width>>;

  void initialize(auto& initial) {
    initial.for_each_parameter([&](auto name, auto weight) {
      const float scale = name.starts_with("blocks") ? 0.002f : 0.02f;
      for (std::size_t i = 0; i != weight.size(); ++i)
        weight.data_handle()[i] = scale * static_cast<float>(initial.random().normal());
    });
  }

  float forward(auto& step, const auto& batch) {
    rows_ = batch.size();
    resized(x_[0], rows_, width).noalias() =
        inputs_of(batch) * matrix(step.param("in.weight"_p)).transpose();
    each_block([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      run_block(B, step.param("blocks"_p / at<B> / "weight"_p).data_handle());
      step.done("blocks"_p / at<B>);  // its memory is free for a block that comes
    });
    resized(outputs_, rows_, classes).noalias() =
        matrix(x_[blocks].data(), rows_, width) * matrix(step.param("head.weight"_p)).transpose();
    return mean_cross_entropy(batch, classes, outputs_.data(), outputs_.data());
  }

  /// From the last layer to the first; each asks for its gradient when it writes it.
  void backward(auto& step, const auto& batch) {
    const auto errors = matrix(outputs_.data(), rows_, classes);
    matrix(step.grad("head.weight"_p)).noalias() =
        errors.transpose() * matrix(x_[blocks].data(), rows_, width);
    step.ready("head.weight"_p);
    resized(dx_, rows_, width).noalias() = errors * matrix(step.param("head.weight"_p));
    each_block([&]<std::size_t B>(std::integral_constant<std::size_t, B>) {
      constexpr std::size_t b = blocks - 1 - B;
      constexpr auto weight = "blocks"_p / at<b> / "weight"_p;
      go_back(b, step.param(weight).data_handle(), step.grad(weight).data_handle());
      step.done("blocks"_p / at<b>);  // first, so that the next gather precedes the reduction
      step.ready(weight);
    });
    matrix(step.grad("in.weight"_p)).noalias() =
        matrix(dx_.data(), rows_, width).transpose() * inputs_of(batch);
    step.ready("in.weight"_p);
  }

 private:
  static void each_block(const auto& f) {
    [&]<std::size_t... B>(std::index_sequence<B...>) {
      (f(std::integral_constant<std::size_t, B>{}), ...);
    }(std::make_index_sequence<blocks>{});
  }
  static auto inputs_of(const auto& batch) {
    return matrix(std::data(batch.inputs), batch.size(), pixels);
  }
  void run_block(std::size_t b, const float* weight) {
    const auto x = matrix(x_[b].data(), rows_, width);
    auto relu = resized(relu_[b], rows_, width);
    relu.noalias() = x * matrix(weight, width, width).transpose();
    relu = relu.cwiseMax(0);
    auto next = resized(x_[b + 1], rows_, width);
    next = x + relu;
  }
  void go_back(std::size_t b, const float* weight, float* gradient) {
    auto dx = matrix(dx_.data(), rows_, width);
    auto relu = matrix(relu_[b].data(), rows_, width);
    relu = (relu.array() > 0).select(dx, 0.f);
    auto to = matrix(gradient, width, width);
    to.noalias() = relu.transpose() * matrix(x_[b].data(), rows_, width);
    dx.noalias() += relu * matrix(weight, width, width);
  }

  std::size_t rows_ = 0;
  std::array<std::vector<float>, blocks + 1> x_;
  std::array<std::vector<float>, blocks> relu_;
  std::vector<float> outputs_, dx_;
};

using Job = Trainer<Residual, Backend<Gloo>, Optimizer<SGDMomentum>,
                    Sharding<FullyShard, Units<"in", "blocks.*", "head">>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {
    const Normalization normalization{.mean = 0.5f, .deviation = 0.3f};
    const auto train = generated_dataset("train", {.samples = 64, .normalization = normalization});
    job.optimizer().lr = 0.01;
    job.checkpoints({.folder = "run", .keep = 1, .asynchronous = false});  // which makes no copies
    job.fit(train, {.epochs = 2, .batch_size = 8});

    const Scores scores = job.evaluate(train, 8, "train");
    const std::uint64_t most =
        job.all_reduce(job.parameter_bytes() + job.gradient_bytes() + job.state_bytes(), Max{});
    job.on_rank0([&](auto log) {
      log.print("no rank keeps more than " + std::to_string(most >> 20) +
                " MiB of a model with 73 MiB of parameters; loss " + fixed_text(scores["loss"], 4));
    });
  });
}
