// SPDX-License-Identifier: Apache-2.0
// expect: lockstep: with UnevenInputs<Join> ranks learn from the first bucket who still has batches, and of the hooks
#include <string_view>

#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

/// A hook of the program's own, which may leave elements out.
struct Nothing {
  static constexpr std::string_view name = "Nothing";
  template <class T, class Device>
  struct Bucket {
    void begin(auto values, auto& next) { next.begin(values); }
    void finish(auto values, auto& next) { next.finish(values); }
  };
};

#ifdef REJECT
using Job = Trainer<Net, UnevenInputs<Join>, Hooks<CompressTo<BFloat16>, Nothing>>;
#else
using Job = Trainer<Net, UnevenInputs<Join>, Hooks<CompressTo<BFloat16>>>;
#endif
