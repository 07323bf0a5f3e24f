// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Causal self-attention on a GPU: cuDNN's fused kernels.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

/// Lengths of a batch's attention, which fix the kernels.
struct AttentionShape {
  std::size_t windows, length, heads, features;  // features of a head
};

/// softmax(q k^T / sqrt(features)) v over the places up to each one's own, and back.
///
/// Queries, keys and values of a place lie behind each other, as one product makes them: elements
/// of bfloat16 in the order windows, length, (q, k, v), heads, features. Outputs and their
/// gradients have the order windows, length, heads, features. `sums` holds the logarithm of each
/// softmax's denominator: windows x heads x length numbers of float.
///
/// Sums are taken in an order that never changes. (cuDNN's default adds up the gradients of queries
/// in whichever order blocks end.)
///
/// A file of its own defines the members, because cuDNN's header takes long to compile.
class CudnnAttention {
 public:
  explicit CudnnAttention(const AttentionShape& shape);
  ~CudnnAttention();
  CudnnAttention(CudnnAttention&&) noexcept;

  std::size_t workspace_bytes() const;
  // **Stream** `workspace` may be shared by all that runs on the same stream.
  void forward(cudaStream_t stream, const void* qkv, void* outputs, float* sums,
               void* workspace) const;
  void backward(cudaStream_t stream, const void* qkv, const void* outputs, const void* d_outputs,
                const float* sums, void* d_qkv, void* workspace) const;

 private:
  class Graphs;
  std::unique_ptr<Graphs> graphs_;
};
