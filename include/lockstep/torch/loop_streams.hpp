// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What stands between a program's own loop and the job that averages its gradients: on the
/// host nothing. `torch.cuh` has the streams of a GPU.

#include <ATen/core/Tensor.h>

#include "lockstep/device/device.hpp"
#include "lockstep/torch/step_tensors.hpp"

namespace lockstep::detail {

/// The order between what a program computes and what its job does. `Chosen` is the job's device.
template <class Chosen, class Replica>
class LoopStreams {
  static_assert(sizeof(Replica) == 0,
                "lockstep: a module on a GPU needs lockstep/torch.cuh, in a file for nvcc");
};

/// On the host every call is done when it returns, and backward passes run on the thread that asks
/// for them.
template <class Replica>
class LoopStreams<Cpu, Replica> {
 public:
  explicit LoopStreams(Replica&) {}

  /// Before a forward pass whose gradients are wanted, and before a backward pass.
  void keep_backward_here() {}
  /// The first gradient of a backward pass has come: `begin()` makes buckets ready for it.
  template <class F>
  void begin_pass(const F& begin) {
    begin();
  }
  /// What the program has computed is there for the job.
  void let_job_follow() {}
  /// What the job has computed is there for the program.
  void let_program_follow() {}
  /// A gradient has come, and is to be written.
  void before_write() {}
  /// Everything is done.
  void settle() {}

  /// Writes a gradient to a tensor of its bucket.
  template <class Step>
  static void write(const Step& step, at::Tensor& to, const at::Tensor& gradient) {
    TorchDevice<Step>::write(step, to.mutable_data_ptr(), to.scalar_type(), gradient);
  }

  /// A step that knows the ranks of batch norms.
  template <class Step>
  Step& norm_step(Step& step) const {
    return step;
  }
};

}  // namespace lockstep::detail
