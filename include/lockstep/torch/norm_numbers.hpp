// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a call of `aten::batch_norm` hands over, and what its backward pass hands back, for
/// host and GPU.

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>

namespace lockstep::detail {

/// The tensors of a norm. All but x may be undefined.
struct NormTensors {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
};

struct NormNumbers {
  double eps = 0;
  /// The share of this batch in the running statistics.
  double momentum = 0;
};

/// Which gradients autograd asks for.
struct NormNeeds {
  bool x = false;
  bool weight = false;
  bool bias = false;
};

struct NormGradients {
  at::Tensor x;
  at::Tensor weight;
  at::Tensor bias;
};

/// The order of a tensor's elements in memory: channels first or last, whichever is nearest.
inline at::MemoryFormat format_of(const at::Tensor& x) {
  return x.is_contiguous() ? at::MemoryFormat::Contiguous : x.suggest_memory_format();
}
/// The tensor without gaps, in that order.
inline at::Tensor dense_tensor(const at::Tensor& x) { return x.contiguous(format_of(x)); }

}  // namespace lockstep::detail
