// SPDX-License-Identifier: Apache-2.0
#include <lockstep/lockstep.hpp>
using namespace lockstep;

struct Line {  // y = slope x, squared error; a batch is one point here
  using Parameters = ParameterList<Parameter<"slope", float>>;
  float error = 0;

  float forward(auto& step, const auto& batch) {  // returns the loss
    error = step.param("slope"_p)() * batch.inputs[0] - batch.labels[0];
    return error * error;
  }
  void backward(auto& step, const auto& batch) {  // writes every gradient and marks it as ready
    step.grad("slope"_p)() = 2 * error * batch.inputs[0];
    step.ready("slope"_p);
  }
};

using Job = Trainer<Line, ParallelStrategy<DDP>, Backend<Shm>, Sampler<Distributed, Padding>,
                    Optimizer<SGD>, World<2>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {  // both ranks run this
    const InMemoryDataset<float, float> points({1, 2, 3, 4}, {3, 6, 9, 12});
    job.optimizer().lr = 0.05;
    for (auto epoch : job.epochs(4))
      for (const auto& batch : epoch.batches(points, 1)) job.step(batch);
    job.on_rank0([&](auto log) { log.print("y = " + value_text(job.param("slope"_p)()) + " x"); });
  });
}
