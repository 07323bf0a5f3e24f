// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A batch of labelled rows in GPU memory, and its upload.

#include "lockstep/detail/data/batch.hpp"
#include "lockstep/detail/device/cuda/batch.cuh"

namespace lockstep {

/// A `LabelledBatch` on a GPU: pointers into device memory.
template <class X, class Y>
struct DeviceBatch {
  const X* inputs = nullptr;  ///< row-major, `width` columns
  const Y* labels = nullptr;
  const float* weights = nullptr;  ///< per sample
  std::size_t rows = 0;
  std::size_t width = 0;

  std::size_t size() const { return rows; }
  /// Samples [first, first + count), without a copy.
  DeviceBatch slice(std::size_t first, std::size_t count) const {
    const float* const own_weights = weights == nullptr ? nullptr : weights + first;
    return {inputs + first * width, labels + first, own_weights, count, width};
  }
  friend bool operator==(const DeviceBatch&, const DeviceBatch&) = default;
};

namespace detail {

/// The uploads of a replica, one `Upload` per data set, which is identified by `batch.source()`.
/// Uploads of expired data sets are erased when a new data set comes.
template <class Upload, class Source>
class Uploads {
 public:
  const auto& operator()(const auto& batch, cudaStream_t stream) {
    return of(batch.source()).to_device(batch, stream);
  }
  const auto& operator()(const auto& batch, std::size_t first, std::size_t count, std::size_t room,
                         cudaStream_t stream) {
    return of(batch.source()).to_device_rows(batch, first, count, room, stream);
  }

 private:
  Upload& of(const std::shared_ptr<Source>& source) {
    for (const auto& [known, upload] : uploads_)
      if (!known.owner_before(source) && !source.owner_before(known)) return *upload;
    std::erase_if(uploads_, [](const auto& entry) { return entry.first.expired(); });
    uploads_.emplace_back(source, std::make_unique<Upload>(source));
    return *uploads_.back().second;
  }

  std::vector<std::pair<std::weak_ptr<Source>, std::unique_ptr<Upload>>> uploads_;
};

/// Pinned memory that must not be overwritten before it has been copied.
struct StagingMemory {
  explicit StagingMemory(std::size_t bytes) : memory(bytes) {}
  PinnedArena memory;
  CudaEvent copied;
};

/// A batch in one piece of memory: inputs, labels, weights.
template <class X, class Y>
struct RowsLayout {
  std::size_t rows = 0;
  std::size_t width = 0;

  std::size_t labels() const { return align_up(rows * width * sizeof(X)); }
  std::size_t weights() const { return labels() + align_up(rows * sizeof(Y)); }
  std::size_t bytes() const { return weights() + align_up(rows * sizeof(float)); }

  DeviceBatch<X, Y> at(const std::byte* memory) const {
    return {reinterpret_cast<const X*>(memory), reinterpret_cast<const Y*>(memory + labels()),
            reinterpret_cast<const float*>(memory + weights()), rows, width};
  }
};

template <class X, class Y>
class NearBatch<DeviceBatch<X, Y>> {
 public:
  static constexpr bool copies = true;
  const DeviceBatch<X, Y>& operator()(const DeviceBatch<X, Y>& batch, cudaStream_t stream) {
    near_ = batch;
    near_.inputs = inputs_(batch.inputs, batch.rows * batch.width, stream);
    near_.labels = labels_(batch.labels, batch.rows, stream);
    near_.weights = weights_(batch.weights, batch.rows, stream);
    return near_;
  }

 private:
  NearMemory inputs_;
  NearMemory labels_;
  NearMemory weights_;
  DeviceBatch<X, Y> near_;
};
}  // namespace detail

/// Copies a batch in one piece through pinned memory, while the host loads the next batch. The
/// device address changes only for a larger batch, as captured steps need.
template <class X, class Y>
class BatchUpload<LabelledBatch<X, Y>> {
 public:
  const DeviceBatch<X, Y>& operator()(const LabelledBatch<X, Y>& batch, cudaStream_t stream) {
    return (*this)(batch, 0, batch.size(), batch.size(), stream);
  }

  /// Copies samples [first, first + count), with room for at least `room` samples.
  const DeviceBatch<X, Y>& operator()(const LabelledBatch<X, Y>& batch, std::size_t first,
                                      std::size_t count, std::size_t room, cudaStream_t stream) {
    const detail::RowsLayout<X, Y> layout{count, batch.width};
    if (!device_ || device_->bytes() < layout.bytes()) {
      const detail::RowsLayout<X, Y> largest{room, batch.width};
      grow(std::max(layout.bytes(), largest.bytes()), stream);
    }

    detail::StagingMemory& staging = *stagings_[turn_ ^= 1];
    staging.copied.synchronize();
    std::byte* const host = staging.memory.data();
    copy(host, batch.inputs, first * batch.width, count * batch.width);
    copy(host + layout.labels(), batch.labels, first, count);
    copy(host + layout.weights(), batch.weights, first, count);
    check_cuda(
        cudaMemcpyAsync(device_->data(), host, layout.bytes(), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
    staging.copied.record(stream);
    on_device_ = layout.at(device_->data());
    return on_device_;
  }

 private:
  void grow(std::size_t bytes, cudaStream_t stream) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // it may be in use
    device_.emplace(bytes);
    for (auto& staging : stagings_) staging.emplace(bytes);
  }

  template <class Values>
  static void copy(std::byte* to, const Values& values, std::size_t first, std::size_t count) {
    if (count != 0) std::memcpy(to, values.data() + first, count * sizeof(values[0]));
  }

  std::array<std::optional<detail::StagingMemory>, 2> stagings_;
  std::optional<DeviceArena> device_;  // freed first, which waits for copies from `stagings_`
  std::size_t turn_ = 0;
  DeviceBatch<X, Y> on_device_;
};

}  // namespace lockstep
