// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The job of README.md, for programs that use one that is accepted or one that is rejected.

#include "lockstep/detail/core/text.hpp"
#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/trainer/launch_job.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

namespace job {

using namespace lockstep;

struct Line {
  using Parameters = ParameterList<Parameter<"slope", float>>;
  float error = 0;

  float forward(auto& step, const auto& batch) {
    error = step.param("slope"_p)() * batch.inputs[0] - batch.labels[0];
    return error * error;
  }
  void backward(auto& step, const auto& batch) {
    step.grad("slope"_p)() = 2 * error * batch.inputs[0];
    step.ready("slope"_p);
  }
};

using Points = InMemoryDataset<float, float>;
using Job = Trainer<Line, ParallelStrategy<DDP>, Backend<Shm>, Sampler<Distributed, Padding>,
                    Optimizer<SGD>, World<2>>;

/// The main of a program that trains and evaluates.
template <class J>
int run(int argc, char** argv) {
  return launch<J>(argc, argv, [](J& job) {
    const Points points({1, 2}, {3, 6});
    for (auto epoch : job.epochs(4)) {
      for (const auto& batch : epoch.batches(points, 1)) job.step(batch);
      job.evaluate(points, 1);
    }
  });
}

}  // namespace job
