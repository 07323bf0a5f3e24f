// SPDX-License-Identifier: Apache-2.0
// A misspelt name is one error, whatever is done with the view.
// expect: lockstep: the model declares no parameter of this name
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"b", float, 3>, Parameter<"w", float, 3, 2>>;
};

float last(HostView<const float, 3, 2> view) { return view(2, 1); }

float use(const detail::BareStep<Net>& step) {
#ifdef REJECT
  const auto weight = step.param("wieght"_p);
#else
  const auto weight = step.param("w"_p);
#endif
  float sum = last(weight);
  for (std::size_t i = 0; i != weight.extent(0); ++i) sum += 2 * weight(i, 0);
  return sum + *weight.data_handle();
}
