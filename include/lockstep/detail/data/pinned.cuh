// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `Pinned train(data)`: a host data set whose batches are written into pinned memory.

#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/data/pipeline.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"

namespace lockstep {

namespace detail {

/// Pinned memory of one batch, and the pending copies from it.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::size_t bytes) : memory_(bytes) {}
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  ~PinnedBuffer() {
    for (const auto& [where, done] : copies_) static_cast<void>(cudaEventSynchronize(done.get()));
  }

  std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return memory_.bytes(); }

  /// Records the pending copies on `stream` of the current GPU. Thread-safe.
  const CudaEvent& note_copy(cudaStream_t stream) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard lock(mutex_);
    CudaEvent& done = copies_[{device, stream}];
    done.record(stream);
    return done;
  }

  /// **Host** blocks until all copies from the memory are done.
  void await() {
    const std::lock_guard lock(mutex_);
    for (const auto& [where, done] : copies_) done.synchronize();
  }

 private:
  PinnedArena memory_;
  std::mutex mutex_;
  std::map<std::pair<int, cudaStream_t>, CudaEvent> copies_;  ///< by GPU and stream
};

/// The buffer pool of a data set, reused by all loops: pinning takes longer than many steps.
class PinnedPool {
 public:
  PinnedPool() { check_cuda(cudaGetDevice(&device_), "cudaGetDevice"); }

  /// The device that a loading thread must select, instead of its default, device 0.
  int device() const { return device_; }

  /// A buffer that the pool lends again when all others have released it.
  std::shared_ptr<PinnedBuffer> lend(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (const auto& buffer : buffers_) {
      if (buffer.use_count() != 1 || buffer->bytes() < bytes) continue;
      std::atomic_thread_fence(std::memory_order_acquire);  // with the release of its last owner
      return buffer;
    }
    return buffers_.emplace_back(std::make_shared<PinnedBuffer>(bytes));
  }

 private:
  int device_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<PinnedBuffer>> buffers_;
};

}  // namespace detail

/// A `LabelledBatch` in one piece of pinned memory.
template <class X, class Y>
class PinnedBatch {
 public:
  std::span<X> inputs;  ///< row-major, `width` columns
  std::span<Y> labels;
  std::span<float> weights;
  std::size_t width = 0;

  std::size_t size() const { return labels.size(); }
  std::span<X> row(std::size_t i) { return inputs.subspan(i * width, width); }
  std::span<const X> row(std::size_t i) const { return inputs.subspan(i * width, width); }

  LabelledBatch<X, Y> slice(std::size_t first, std::size_t count) const {
    const auto copy = [](auto values) {
      return std::vector<std::remove_const_t<typename decltype(values)::element_type>>(
          values.begin(), values.end());
    };
    return {copy(inputs.subspan(first * width, count * width)), copy(labels.subspan(first, count)),
            copy(weights.subspan(first, count)), width};
  }

  /// Makes room for `rows` samples of weight 1. **Host** blocks until earlier copies are done.
  void resize(std::size_t rows, std::size_t columns) {
    const detail::RowsLayout<X, Y> layout{rows, columns};
    if (pool_ == nullptr)
      detail::fail("PinnedBatch", {"it has no memory"}, "let a Pinned data set load it");
    if (buffer_ == nullptr || buffer_->bytes() < layout.bytes())
      buffer_ = pool_->lend(layout.bytes());
    buffer_->await();
    const DeviceBatch<X, Y> at = layout.at(buffer_->data());
    width = columns;
    inputs = {const_cast<X*>(at.inputs), rows * columns};
    labels = {const_cast<Y*>(at.labels), rows};
    weights = {const_cast<float*>(at.weights), rows};
    std::fill(weights.begin(), weights.end(), 1.f);
  }

  // For the data set, the loader and the upload.

  void set_pool(const std::shared_ptr<detail::PinnedPool>& pool) { pool_ = pool; }
  const std::shared_ptr<detail::PinnedPool>& source() const { return pool_; }
  detail::PinnedBuffer& buffer() const { return *buffer_; }
  /// The number of the batch in its epoch.
  void take_turn(std::size_t turn) { turn_ = turn; }
  std::size_t turn() const { return turn_; }

 private:
  std::shared_ptr<detail::PinnedPool> pool_;
  std::shared_ptr<detail::PinnedBuffer> buffer_;
  std::size_t turn_ = 0;
};

static_assert(LabelledRows<PinnedBatch<float, int>>);

namespace detail {

template <class X, class Y>
std::type_identity<PinnedBatch<X, Y>> pinned_twin(std::type_identity<LabelledBatch<X, Y>>);
template <class Source>
using PinnedTwin =
    typename decltype(pinned_twin(std::type_identity<typename Source::batch_type>()))::type;

template <class Source>
concept Pinnable = requires { typename PinnedTwin<Source>; } &&
                   (Loading<Source, PinnedTwin<Source>> || PassLoading<Source, PinnedTwin<Source>>);

template <class Source>
consteval auto pinned_batch() {
  static_assert(
      Pinnable<Source>,
      "lockstep: Pinned takes data sets of LabelledBatches whose `load` is a template over "
      "the batch, `template <LabelledRows Batch> void load(indices, Batch& out) const`, as "
      "those of the library are");
  if constexpr (Pinnable<Source>) {
    return std::type_identity<PinnedTwin<Source>>();
  } else {
    return std::type_identity<PinnedBatch<float, std::int32_t>>();
  }
}

}  // namespace detail

/// A data set whose batches the loader's workers write into pinned memory; a separate stream copies
/// them to the GPU while earlier steps run. Construct it in the job's function, where the rank's
/// GPU is current. A temporary is moved in; an lvalue is referenced and must outlive this object.
template <class Held>
class Pinned {
  using Source = std::remove_cvref_t<Held>;

 public:
  using batch_type = typename decltype(detail::pinned_batch<Source>())::type;

  template <class Given>
    requires std::is_same_v<std::remove_cvref_t<Given>, Source>
  explicit Pinned(Given&& source)
      : source_(std::forward<Given>(source)), pool_(std::make_shared<detail::PinnedPool>()) {}

  std::size_t size() const { return source_.size(); }

  void load(std::span<const std::size_t> indices, batch_type& out) const
    requires(!detail::PassLoading<Source, batch_type>)
  {
    const detail::OnGpu on(static_cast<std::size_t>(pool_->device()));
    out.set_pool(pool_);
    if constexpr (detail::Pinnable<Source>) source_.load(indices, out);
  }
  void load(std::span<const std::size_t> indices, Pass pass, batch_type& out) const
    requires detail::PassLoading<Source, batch_type>
  {
    const detail::OnGpu on(static_cast<std::size_t>(pool_->device()));
    out.set_pool(pool_);
    source_.load(indices, pass, out);
  }

 private:
  Held source_;
  std::shared_ptr<detail::PinnedPool> pool_;
};

template <class Given>
Pinned(Given&&) -> Pinned<detail::HeldAs<Given>>;

namespace detail {

/// The staged batches of one pinned data set for one replica. They rotate through several device
/// buffers at fixed addresses, as captured steps need: a graph per buffer costs less than a device
/// copy per step. Copies have their own stream: a copy waits for the step that last used its
/// buffer, a step waits for its copy, and the host waits for neither.
template <class X, class Y>
class PinnedUpload {
 public:
  explicit PinnedUpload(const std::shared_ptr<PinnedPool>&) {}

  /// **Stream** later work of `stream` is ordered after the copy. **Host** does not block.
  const DeviceBatch<X, Y>& to_device(const PinnedBatch<X, Y>& batch, cudaStream_t stream) {
    const RowsLayout<X, Y> layout{batch.size(), batch.width};
    if (latest_) used_[*latest_].record(stream);  // by all work since then
    if (!memory_ || memory_->bytes() < used_.size() * layout.bytes()) grow(layout, stream);
    latest_ = batch.turn() % used_.size();
    std::byte* const to = memory_->data() + *latest_ * (memory_->bytes() / used_.size());
    used_[*latest_].block(copies_);
    check_cuda(
        cudaMemcpyAsync(to, batch.buffer().data(), layout.bytes(), cudaMemcpyHostToDevice, copies_),
        "cudaMemcpyAsync");
    batch.buffer().note_copy(copies_).block(stream);
    on_device_ = layout.at(to);
    return on_device_;
  }

  /// Copies a share of a batch. **Stream** in the order of `stream`.
  const DeviceBatch<X, Y>& to_device_rows(const PinnedBatch<X, Y>& batch, std::size_t first,
                                          std::size_t count, std::size_t room,
                                          cudaStream_t stream) {
    const RowsLayout<X, Y> layout{count, batch.width};
    if (!memory_ || memory_->bytes() < layout.bytes())
      grow(RowsLayout<X, Y>{std::max(count, room), batch.width}, stream);
    std::byte* const to = memory_->data();
    send(to, batch.inputs.subspan(first * batch.width, count * batch.width), stream);
    send(to + layout.labels(), batch.labels.subspan(first, count), stream);
    send(to + layout.weights(), batch.weights.subspan(first, count), stream);
    batch.buffer().note_copy(stream);
    on_device_ = layout.at(to);
    return on_device_;
  }

 private:
  void grow(const RowsLayout<X, Y>& layout, cudaStream_t stream) {
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");  // it may be in use
    copies_.synchronize();
    memory_.emplace(used_.size() * layout.bytes());
  }

  template <class T>
  static void send(std::byte* to, std::span<T> values, cudaStream_t stream) {
    if (values.empty()) return;
    check_cuda(
        cudaMemcpyAsync(to, values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  }

  CudaStream copies_;
  std::array<CudaEvent, 3> used_;  ///< per buffer: the steps that used it
  std::optional<DeviceArena> memory_;
  std::optional<std::size_t> latest_;
  DeviceBatch<X, Y> on_device_;
};

}  // namespace detail

template <class X, class Y>
class BatchUpload<PinnedBatch<X, Y>>
    : public detail::Uploads<detail::PinnedUpload<X, Y>, detail::PinnedPool> {};

}  // namespace lockstep
