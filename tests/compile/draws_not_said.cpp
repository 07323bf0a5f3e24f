// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this model draws random numbers, and its steps have none; say so in the model: static constexpr bool draws = true;
#include "lockstep/norm/dropout.hpp"
#include "lockstep/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 8>>;
#ifndef REJECT
  static constexpr bool draws = true;
#endif
  Dropout<"drop1"> drop;

  float forward(auto& step, const auto&) {
    const HostView<float, 8> y(values);
    drop.forward(step, step.param("w"_p), y);
    return y(0);
  }
  void backward(auto& step, const auto&) {
    drop.backward(step, HostView<float, 8>(values), step.grad("w"_p));
    step.ready("w"_p);
  }

  float values[8] = {};
};

void use(Trainer<Net, World<2>>& job, const LabelledBatch<float, float>& batch) { job.step(batch); }
