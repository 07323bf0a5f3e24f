// SPDX-License-Identifier: Apache-2.0
#include <lockstep/trainer.hpp>
using namespace lockstep;

struct Line {  // y = slope x, squared error; a batch is one point here
  using Parameters = ParameterList<Parameter<"slope", float>>;
  float error = 0;
  float forward(auto& step, auto& batch) {  // returns the loss; backward sets every gradient
    error = step.param("slope"_p)() * batch.inputs[0] - batch.labels[0];
    return error * error;
  }
  void backward(auto& step, auto& batch) { step.set_grad("slope"_p, 2 * error * batch.inputs[0]); }
};

int main(int argc, char** argv) {
  return launch<Trainer<Line, World<2>>>(argc, argv, [](auto& job) {  // both ranks run this
    job.optimizer().lr = 0.05;
    job.fit(InMemoryDataset<float, float>({1, 2, 3, 4}, {3, 6, 9, 12}), {.epochs = 4});
    job.on_rank0([&](auto log) { log.print("y = " + value_text(job.param("slope"_p)()) + " x"); });
  });
}
