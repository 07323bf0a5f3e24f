// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: a job that saves or resumes needs #include <lockstep/checkpoint.hpp>
#include "lockstep/trainer.hpp"
#ifndef REJECT
#include "lockstep/checkpoint.hpp"
#endif

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float>>;
  float forward(auto& step, const float& batch) { return step.param("w"_p)() * batch; }
  void backward(auto& step, const float& batch) {
    step.grad("w"_p)() = batch;
    step.ready("w"_p);
  }
};

inline void save_now(Trainer<Net, World<2>>& job) { job.save("x.safetensors"); }
