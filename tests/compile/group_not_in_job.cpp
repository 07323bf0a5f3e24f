// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: this set is none of the job
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

using Options = detail::GroupOptions<SGD, ParameterGroups<Named<"b">>>;

#ifdef REJECT
void use(Options& options) { options.mine<Named<"w">>().lr = 0.1; }
#else
void use(Options& options) { options.mine<Named<"b">>().lr = 0.1; }
#endif
