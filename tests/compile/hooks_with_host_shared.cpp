// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: Sharding<HostShared> reduces slices where they are used
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Hooks<CompressTo<Half>>, Sharding<HostShared>>;
#else
using Job = detail::Composed<Net, Hooks<CompressTo<Half>>>;
#endif
