// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A small model for jobs whose steps are looked at in machine code, on CPUs and GPUs.

#include <span>
#include <vector>

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

/// One whose replicas may gather their outputs for one loss.
struct OutputNet : BatchNet {
  using Output = OutputOf<float, 1>;
  using BatchNet::backward;
  void predict(auto& step, const Batch& x, auto rows) { rows(0, 0) = x[0] * step.param("b"_p)(0); }
  double loss(auto&, const Batch&, auto rows, auto gradients) {
    gradients(0, 0) = 1;
    return rows(0, 0);
  }
  void backward(auto& step, const Batch& x, auto) { BatchNet::backward(step, x); }
};

/// One with a batch norm of one channel.
struct NormNet {
  using Norm = BatchNorm<"bn", 1>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;
  using Batch = std::span<const float>;
  double forward(auto& step, const Batch& x) {
    y.assign(x.begin(), x.end());
    norm.forward_relu(step, rows(), rows());
    return y[0];
  }
  void backward(auto& step, const Batch&) { norm.backward_relu(step, rows(), rows(), rows()); }
  HostView<float, dynamic, 1> rows() { return HostView<float, dynamic, 1>(y.data(), y.size()); }

  Norm norm;
  std::vector<float> y;
};

/// A bucket for each parameter: several are under way.
using Pieces = Buckets<BucketLimits{0, 0}>;

}  // namespace dispatch
