// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: hooks need whole buckets, of which Sharding<ZeroRedundancy, Gradients> and Sharding<FullyShard>
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

#ifdef REJECT
using Job = Trainer<Net, Backend<Gloo>, Hooks<CompressTo<BFloat16>>, Sharding<FullyShard>>;
#else
using Job =
    detail::Composed<Net, Backend<Gloo>, Hooks<CompressTo<BFloat16>>, Sharding<ZeroRedundancy>>;
#endif
