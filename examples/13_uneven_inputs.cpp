// SPDX-License-Identifier: Apache-2.0
// Uneven inputs: every rank has samples of its own, and not equally many. A rank that is through
// answers the others with gradients of zero until all are; nobody waits for it, and no sample is
// left out or repeated.
//
//   ./uneven_inputs --ranks 3          ranks have 20, 30 and 40 samples
//
// DivideByLive: each average is over the ranks that still have samples.
#include <cstdio>
#include <vector>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

struct Point {
  double x, y;
};

/// y = slope x + offset, squared error; a batch is one point.
struct Line {
  using Parameters = ParameterList<Parameter<"slope", double>, Parameter<"offset", double>>;
  double error = 0;
  double forward(auto& step, const Point& point) {
    error = step.param("slope"_p)() * point.x + step.param("offset"_p)() - point.y;
    return error * error;
  }
  void backward(auto& step, const Point& point) {
    step.set_grad("offset"_p, 2 * error);
    step.set_grad("slope"_p, 2 * error * point.x);
  }
};

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    ProcessGroup group(session);
    DistributedDataParallel<Line, UnevenInputs<Join, DivideByLive>> ddp(*group);
    ddp.optimizer().lr = 0.02;
    const std::size_t rank = group.rank().value();
    std::vector<Point> own(20 + 10 * rank);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const double x = 0.1 * static_cast<double>(i) - static_cast<double>(rank);
      own[i] = {x, 3 * x - 1};
    }

    for (int epoch = 0; epoch < 100; ++epoch) {
      auto joined = ddp.join();
      for (const Point& point : own) ddp.step(point);
      joined.finish();  // all ranks are through, and have the same parameters
    }
    if (group.rank() == Rank{0})
      std::printf("y = %.3f x + %.3f\n", ddp.param("slope"_p)(), ddp.param("offset"_p)());
  });
}
