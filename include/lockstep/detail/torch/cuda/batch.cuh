// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches of tensors on a GPU.

#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/torch/batch.hpp"
#include "lockstep/detail/torch/cuda/step_tensors.cuh"

namespace lockstep {

namespace detail {

/// Are two tensors equal for a CUDA graph: same address, type, device, shape and strides?
inline bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.const_data_ptr() == b.const_data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes() && a.strides() == b.strides();
}
template <class Field>
bool lie_alike(const Field& a, const Field& b) {
  if constexpr (std::equality_comparable<Field>) {
    return a == b;
  } else {
    return false;
  }
}

/// A batch whose tensors are on a GPU. Equality is that for a CUDA graph.
template <class Batch>
struct DeviceTensors : Batch {
  friend bool operator==(const DeviceTensors& a, const DeviceTensors& b) {
    bool equal = true;
    std::vector<const void*> fields;
    for_each_field(static_cast<const Batch&>(a),
                   [&](const auto& field) { fields.push_back(&field); });
    std::size_t i = 0;
    for_each_field(static_cast<const Batch&>(b), [&]<class Field>(const Field& field) {
      equal = equal && lie_alike(*static_cast<const Field*>(fields[i++]), field);
    });
    return equal;
  }
};

template <class Batch>
inline constexpr bool is_on_device = false;
template <class Batch>
inline constexpr bool is_on_device<DeviceTensors<Batch>> = true;

/// A batch whose fields are known.
template <class Batch>
concept TensorBatching = WithFields<Batch> && std::default_initializable<Batch> &&
                         std::copyable<Batch> && !is_on_device<Batch>;

}  // namespace detail

/// Copies a batch's tensors in one transfer from pinned memory, while the host loads the next. For
/// captured steps, addresses change only with a larger batch. Tensors on a GPU stay there.
template <detail::TensorBatching Batch>
class BatchUpload<Batch> {
 public:
  using OnDevice = detail::DeviceTensors<Batch>;

  const OnDevice& operator()(const Batch& batch, cudaStream_t stream) {
    on_device_ = OnDevice{batch};
    std::size_t bytes = 0;
    for_each_tensor([&](at::Tensor& tensor) {
      tensor = tensor.detach();
      if (!tensor.is_non_overlapping_and_dense()) tensor = tensor.contiguous();
      bytes += detail::align_up(tensor.nbytes());
    });
    if (bytes == 0) return on_device_;
    if (!device_ || device_->bytes() < bytes) grow(bytes, stream);
    detail::StagingMemory& staging = *stagings_[turn_ ^= 1];
    staging.copied.synchronize();
    std::size_t at = 0;
    const at::Device here = detail::current_torch_gpu();
    for_each_tensor([&](at::Tensor& tensor) {
      const std::size_t size = tensor.nbytes();
      if (size != 0) std::memcpy(staging.memory.data() + at, tensor.const_data_ptr(), size);
      tensor = at::from_blob(device_->data() + at, tensor.sizes(), tensor.strides(),
                             at::TensorOptions().dtype(tensor.scalar_type()).device(here));
      at += detail::align_up(size);
    });
    check_cuda(cudaMemcpyAsync(device_->data(), staging.memory.data(), bytes,
                               cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync");
    staging.copied.record(stream);
    return on_device_;
  }

 private:
  /// Visits tensors on the host.
  template <class F>
  void for_each_tensor(const F& f) {
    detail::for_each_field(static_cast<Batch&>(on_device_), [&]<class Field>(Field& field) {
      if constexpr (std::is_same_v<Field, at::Tensor>) {
        if (field.defined() && field.is_cpu()) f(field);
      }
    });
  }

  void grow(std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // it may be in use
    device_.emplace(bytes);
    for (auto& staging : stagings_) staging.emplace(bytes);
  }

  std::array<std::optional<detail::StagingMemory>, 2> stagings_;
  std::optional<DeviceArena> device_;  // freed first, which waits for copies from the stagings
  std::size_t turn_ = 0;
  OnDevice on_device_;
};

inline namespace torch_modules {

/// Rows and labels on a GPU as tensors over the same memory:
///
///     torch::Tensor loss(const auto& rows) {
///       const TensorBatch batch = as_tensors(rows);
///
/// works for the CPU, where rows are a `LabelledBatch`, and for GPUs. Sample weights stay in
/// `rows.weights`. Integer labels become int64. **Stream** the step's.
template <class X, class Y>
TensorBatch as_tensors(const DeviceBatch<X, Y>& batch) {
  const auto on_gpu = [](const auto* data, at::IntArrayRef sizes) {
    using T = std::remove_cvref_t<decltype(*data)>;
    return detail::tensor_at(data, sizes, detail::scalar_type<T>, detail::current_torch_gpu());
  };
  const auto rows = static_cast<std::int64_t>(batch.rows);
  const at::Tensor labels = on_gpu(batch.labels, {rows});
  return {on_gpu(batch.inputs, {rows, static_cast<std::int64_t>(batch.width)}),
          std::is_integral_v<Y> ? labels.to(at::kLong) : labels};
}

}  // namespace torch_modules

}  // namespace lockstep
