// SPDX-License-Identifier: Apache-2.0
// Sub-graphs: one trunk with a head for each of two tasks, and a step trains one of them. The sets
// of parameters are declared, so that the compiler knows which gradients each step waits for; a
// head that nobody uses in a step keeps its value and its states. Ranks may choose differently.
//
//   ./subgraphs --ranks 2
#include <cmath>
#include <cstdio>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

struct Point {
  double x, y;
};

/// y = head trunk x, squared error. A batch is one point.
struct TwoHeads {
  using Parameters = ParameterList<Parameter<"trunk", double>, Parameter<"double.head", double>,
                                   Parameter<"negate.head", double>>;

  void initialize(auto& initial) {
    initial.param("trunk"_p)() = 1;
    initial.param("double.head"_p)() = initial.param("negate.head"_p)() = 0.5;
  }
  double forward(auto& step, const Point& point) {
    with_head(step, [&](auto head) {
      error = step.param(head)() * step.param("trunk"_p)() * point.x - point.y;
    });
    return error * error;
  }
  void backward(auto& step, const Point& point) {
    with_head(step, [&](auto head) {
      step.set_grad(head, 2 * error * step.param("trunk"_p)() * point.x);
      step.set_grad("trunk"_p, 2 * error * step.param(head)() * point.x);
    });
  }

 private:
  /// Calls `f(key)` with the head that the step uses, which the compiler knows.
  static void with_head(auto& step, const auto& f) {
    if constexpr (uses<decltype(step)>("double.head"_p)) {
      f("double.head"_p);
    } else {
      f("negate.head"_p);
    }
  }
  double error = 0;
};

using Tasks =
    Subgraphs<Subgraph<"double", "trunk", "double.*">, Subgraph<"negate", "trunk", "negate.*">>;

int main(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    ProcessGroup group(session);
    DistributedDataParallel<TwoHeads, UnusedParameters<Tasks>> ddp(*group);
    ddp.optimizer().lr = 0.05;
    for (std::size_t i = 0; i < 300; ++i) {
      const double x = std::sin(static_cast<double>(i));
      const bool doubles =
          (i / 2 + group.rank().value()) % 2 == 0;  // another task on every other rank
      doubles ? ddp.step<"double"_s>(Point{x, 2 * x}) : ddp.step<"negate"_s>(Point{x, -x});
    }
    const double trunk = ddp.param("trunk"_p)();
    if (group.rank() == Rank{0})
      std::printf("double: %.3f x, negate: %.3f x\n", trunk * ddp.param("double.head"_p)(),
                  trunk * ddp.param("negate.head"_p)());
  });
}
