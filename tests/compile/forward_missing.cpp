// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model has no forward(step, batch) for this batch
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

struct Batch {};

#ifdef REJECT
struct Learner {
  using Parameters = Net::Parameters;
  void backward(auto&, const Batch&) {}
};
bool ok() { return detail::require_model<Learner, detail::BareStep<Learner>, Batch>(); }
#else
struct Learner {
  using Parameters = Net::Parameters;
  float forward(auto&, const Batch&) { return 0; }
  void backward(auto&, const Batch&) {}
};
bool ok() { return detail::require_model<Learner, detail::BareStep<Learner>, Batch>(); }
#endif
