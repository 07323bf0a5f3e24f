// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How batches reach a GPU.

#include <cuda_runtime_api.h>

namespace lockstep {

/// Makes the batch that a model gets. By default it is the batch itself, which holds pointers into
/// device memory or is copied by the model. Specialised for batches that the library copies; a
/// program may specialise it for its own.
template <class Batch>
class BatchUpload {
 public:
  const Batch& operator()(const Batch& batch, cudaStream_t) { return batch; }
};

}  // namespace lockstep
