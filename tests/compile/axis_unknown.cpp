// SPDX-License-Identifier: Apache-2.0
// A well-made policy for an axis that no job has.
// expect: lockstep: one of the template arguments is not a policy
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

namespace my_axes {
struct Flavour {
  static constexpr std::string_view name = "Flavour";
};
}  // namespace my_axes

struct Flavour : detail::ValuePolicy<my_axes::Flavour> {
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("Flavour"); }
};

#ifdef REJECT
using Job = Trainer<Net, Flavour>;
#else
using Job = Trainer<Net, World<4>>;
#endif
