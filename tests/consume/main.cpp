// SPDX-License-Identifier: Apache-2.0
#include <lockstep/lockstep.hpp>
using namespace lockstep;

using Points = LabelledBatch<float, float>;

struct Line {  // y = slope x + offset, squared error
  using Parameters = ParameterList<Parameter<"slope", float>, Parameter<"offset", float>>;

  float forward(auto& step, const Points& points) {
    float loss = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      loss += error(step, points, i) * error(step, points, i);
    }
    return loss / static_cast<float>(points.size());
  }

  void backward(auto& step, const Points& points) {  // overwrites every gradient, marks it as ready
    float slope = 0, offset = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      slope += 2 * error(step, points, i) * points.inputs[i] / static_cast<float>(points.size());
      offset += 2 * error(step, points, i) / static_cast<float>(points.size());
    }
    step.grad("offset"_p)() = offset;
    step.ready("offset"_p);
    step.grad("slope"_p)() = slope;
    step.ready("slope"_p);
  }

  static float error(auto& step, const Points& points, std::size_t i) {
    return step.param("slope"_p)() * points.inputs[i] + step.param("offset"_p)() - points.labels[i];
  }
};

using Job = Trainer<Line, ParallelStrategy<DDP>, Backend<Shm>, Sampler<Distributed, Padding>,
                    Optimizer<SGD>, World<2>>;

int main(int argc, char** argv) {
  return launch<Job>(argc, argv, [](Job& job) {  // two ranks of itself; or torchrun, mpirun, srun
    const InMemoryDataset<float, float> train({-2, -1, 0, 1, 2, 3}, {-5, -2, 1, 4, 7, 10});
    job.optimizer().lr = 0.08;
    for (auto epoch : job.epochs(20))  // sets the sampler's epoch: it cannot be forgotten
      for (const auto& batch : epoch.batches(train, 1)) job.step(batch);
    job.on_rank0([&](auto log) {  // no communicator in here
      const float slope = job.param("slope"_p)();
      const float offset = job.param("offset"_p)();
      log.print("y = " + value_text(slope) + " x + " + value_text(offset));
    });
  });
}
