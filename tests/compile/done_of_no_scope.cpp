// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: step.done was given a name that is no scope with parameters
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Repeat<"blocks", 2, ParameterList<Parameter<"w", float, 3>>>>;
  double forward(auto& step, int) {
#ifdef REJECT
    step.done("blocks"_p / at<2>);
#else
    step.done("blocks"_p / at<1>);
#endif
    return 0;
  }
  void backward(auto& step, int) { step.ready("blocks"_p / at<0> / "w"_p); }
};

void run(Replica<Net, CanonicalPolicies<Backend<Gloo>, Sharding<FullyShard>>, LoopbackCommunicator>&
             replica) {
  replica.run_micro_batch(1);
}
