// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How batches reach a GPU.

#include <cuda_runtime_api.h>

namespace lockstep {

/// What a model is given for a batch. By default the batch itself: a type that holds pointers into
/// device memory, or that the model copies on its own. Specialised for batches that the library
/// copies; a program may do so for its own.
template <class Batch>
class BatchUpload {
 public:
  const Batch& operator()(const Batch& batch, cudaStream_t) { return batch; }
};

}  // namespace lockstep
