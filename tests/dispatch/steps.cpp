// SPDX-License-Identifier: Apache-2.0
// Steps of several jobs, to be looked at in machine code: tests/dispatch/run.
#include <cstddef>
#include <span>

#include "lockstep/trainer/ddp.hpp"
#include "lockstep/trainer/dp.hpp"

namespace {

using namespace lockstep;

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 100, 30>, Parameter<"b", double, 100>>;
  using Buffers = BufferList<Buffer<"mean", float, 100>>;
  double forward(auto& step, const float& x) { return x * step.param("w"_p)(1, 2); }
  void backward(auto& step, const float& x) {
    step.grad("b"_p)(3) = x;
    step.ready("b"_p);
    step.grad("w"_p)(1, 2) = x;
    step.ready("w"_p);
  }
};

template <class... Ps>
using Ddp = DistributedDataParallel<Net, Optimizer<AdamW>, Ps...>;
using Pieces = Buckets<BucketLimits{0, 0}>;

using SharedJob = Ddp<>;
using SharedClipJob = Ddp<Clip<1.0>, Accumulate<2>>;
using ReplicatedJob = Ddp<Sharding<Replicated>, Pieces>;
using ReplicatedZeroJob = Ddp<Sharding<Replicated>, Pieces, UnusedParameters<Zero>, World<4>>;

/// The same on shares of a batch.
struct SharedNet : Net {
  using Batch = std::span<const float>;
  double forward(auto& step, const Batch& x) { return Net::forward(step, x[0]); }
  void backward(auto& step, const Batch& x) { Net::backward(step, x[0]); }
};
using DpJob = DataParallel<SharedNet, Optimizer<AdamW>>;

}  // namespace

// The roots of the walk.
extern "C" {
double step_shared(SharedJob& ddp, const float& x) { return ddp.step(x); }
double step_shared_by_hand(SharedJob& ddp, const float& x) {
  return ddp.forward(x).backward().reduce().update();
}
double step_shared_clipped(SharedClipJob& ddp, const float& x) { return ddp.step(x); }
double step_replicated(ReplicatedJob& ddp, const float& x) { return ddp.step(x); }
double step_replicated_zero(ReplicatedZeroJob& ddp, const float& x) { return ddp.step(x); }
double step_dp(DpJob& dp, const SharedNet::Batch& x) { return dp.step(x); }
}
