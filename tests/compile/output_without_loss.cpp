// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: the model declares an Output and takes no loss of it
#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/model/model.hpp"

using namespace lockstep;

struct Batch {};

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
  using Output = OutputOf<float, 10>;
  void predict(auto&, const Batch&, auto) {}
#ifndef REJECT
  float loss(auto&, const Batch&, auto, auto) { return 0; }
#endif
  void backward(auto&, const Batch&, auto) {}
};

using Written = HostView<float, dynamic, 10>;
using Read = HostView<const float, dynamic, 10>;
bool ok() {
  return detail::require_parts<Net, detail::BareStep<Net>, Batch, Batch, Written, Read>();
}
