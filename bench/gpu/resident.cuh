// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch that lies on the GPU already.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mlp.cuh"

namespace bench {

/// Random rows and labels below `classes`, on the current GPU.
class Resident {
 public:
  Resident(std::size_t rows, std::size_t inputs, std::size_t classes)
      : rows_(rows), inputs_(inputs), x_(rows * inputs), y_(rows), weights_(rows) {
    RandomStream random(Seed{1});
    std::vector<float> x(rows * inputs);
    std::vector<std::int32_t> y(rows);
    for (float& value : x) value = static_cast<float>(random.normal());
    for (auto& label : y) label = static_cast<std::int32_t>(random.below(classes));
    upload(x, x_);
    upload(y, y_);
    upload(std::vector<float>(rows, 1.f), weights_);
  }

  DeviceBatch<float, std::int32_t> batch() const {
    DeviceBatch<float, std::int32_t> batch;
    batch.inputs = x_;
    batch.labels = y_;
    batch.weights = weights_;
    batch.rows = rows_;
    batch.width = inputs_;
    return batch;
  }

 private:
  template <class T>
  static void upload(const std::vector<T>& from, const DeviceArray<T>& to) {
    check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }

  std::size_t rows_;
  std::size_t inputs_;
  DeviceArray<float> x_;
  DeviceArray<std::int32_t> y_;
  DeviceArray<float> weights_;
};

}  // namespace bench
