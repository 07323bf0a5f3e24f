// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A small model for jobs whose steps are looked at in machine code, on CPUs and GPUs.

#include <span>

#include "lockstep/lockstep.hpp"

namespace dispatch {

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 100, 30>, Parameter<"b", double, 100>>;
  using Buffers = BufferList<Buffer<"mean", float, 100>>;
  double forward(auto& step, const float& x) { return x * step.param("w"_p)(1, 2); }
  void backward(auto& step, const float& x) {
    if constexpr (trains<decltype(step)>("b"_p)) {
      step.grad("b"_p)(3) = x;
      step.ready("b"_p);
    }
    step.grad("w"_p)(1, 2) = x;
    step.ready("w"_p);
  }
};

/// The same on shares of a batch.
struct BatchNet : Net {
  using Batch = std::span<const float>;
  double forward(auto& step, const Batch& x) { return Net::forward(step, x[0]); }
  void backward(auto& step, const Batch& x) { Net::backward(step, x[0]); }
};

/// A bucket for each parameter: several are under way.
using Pieces = Buckets<BucketLimits{0, 0}>;

}  // namespace dispatch
