// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this model draws random numbers, and its steps have none; say so in the model: static constexpr bool draws = true;
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/norm/dropout.hpp"
#include "lockstep/detail/strategy/gradients.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 8>>;
#ifndef REJECT
  static constexpr bool draws = true;
#endif
};

using Traits = detail::ReplicaTraits<Net, CanonicalPolicies<>>;
using Step = detail::FeaturesOf<Traits, LoopbackCommunicator>::View<Traits::bare_step>;

void use(const Dropout<"drop1">& drop, Step& step, const HostView<float, 8>& x) {
  drop.forward(step, x, x);
  drop.backward(step, x, x);
}
