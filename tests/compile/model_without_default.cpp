// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this model has no default constructor; give the job a function that makes one
#include "lockstep/lockstep.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>>;
  explicit Net(int size) : size(size) {}
  double forward(auto&, int) { return 0; }
  void backward(auto& step, int) { step.ready("w"_p); }
  int size;
};

double train(Session& session) {
#ifdef REJECT
  Trainer<Net, World<2>> job(session);
#else
  Trainer<Net, World<2>> job(session, [] { return Net(3); });
#endif
  return job.step(3);
}
