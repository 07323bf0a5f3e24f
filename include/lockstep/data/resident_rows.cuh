// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The rows of a data set in the memory of GPUs, and the kernel that gathers some of them.

#include <cuda_runtime.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/labelled_batch.hpp"
#include "lockstep/data/load_batch.hpp"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/launch.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/vector.cuh"

namespace lockstep::detail {

/// A sample that a batch holds, and its weight there.
struct Draw {
  std::uint32_t sample;
  float weight;
};

/// All that a gather reads and writes: batches of `rows` samples, the last maybe of fewer, whose
/// draws and whose places in memory are one stride apart.
template <class X, class Y, class Stored>
struct GatherCall {
  const Stored* inputs = nullptr;  ///< of all samples
  const Y* labels = nullptr;
  const X* values = nullptr;    ///< what each stored byte stands for, where X is not what is stored
  const Draw* draws = nullptr;  ///< of the first batch
  X* to_inputs = nullptr;
  Y* to_labels = nullptr;
  float* to_weights = nullptr;
  std::uint32_t rows = 0;
  std::uint32_t last_rows = 0;
  std::uint32_t batches = 0;
  std::uint32_t width = 0;
  std::size_t draw_stride = 0;
  std::size_t byte_stride = 0;

  /// The same memory of a later batch.
  template <class T>
  LOCKSTEP_HOST_DEVICE T* later(T* memory, std::uint32_t batch) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory) + batch * byte_stride);
  }
};

/// A thread for each packet of N neighbours in a row.
template <std::size_t N, class X, class Y, class Stored>
LOCKSTEP_KERNEL gather_rows(GatherCall<X, Y, Stored> call) {
  const std::uint32_t packets = call.width / N;
  const std::uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t all_rows = at / packets;
  const std::uint32_t batch = all_rows / call.rows;
  const std::uint32_t row = all_rows - batch * call.rows;
  if (batch >= call.batches || (batch + 1 == call.batches && row >= call.last_rows)) return;
  const Draw draw = call.draws[batch * call.draw_stride + row];
  const std::size_t column = std::size_t{at - all_rows * packets} * N;
  const Stored* const from = call.inputs + std::size_t{draw.sample} * call.width + column;
  X* const to = call.later(call.to_inputs, batch) + std::size_t{row} * call.width + column;
  if constexpr (N == 1) {
    if constexpr (std::is_same_v<X, Stored>) {
      *to = *from;
    } else {
      *to = call.values[*from];
    }
  } else {
    const Packet<Stored, N> stored = load_packet<Caching::keep, N>(from);
    if constexpr (std::is_same_v<X, Stored>) {
      store_packet<Caching::keep>(to, stored);
    } else {
      Packet<X, N> packet;
#pragma unroll
      for (std::size_t i = 0; i < N; ++i) packet.at[i] = call.values[stored.at[i]];
      store_packet<Caching::keep>(to, packet);
    }
  }
  if (column == 0) {
    call.later(call.to_labels, batch)[row] = call.labels[draw.sample];
    call.later(call.to_weights, batch)[row] = draw.weight;
  }
}

/// **Stream** in its order. **Host** does not block.
template <class X, class Y, class Stored>
void launch_gather(cudaStream_t stream, const GatherCall<X, Y, Stored>& call) {
  constexpr unsigned threads = 128;
  constexpr bool is_even = 16 % sizeof(X) == 0 && 16 % sizeof(Stored) == 0;
  constexpr std::size_t packet = is_even ? packet_size<X, Stored> : 1;
  const auto blocks = [&](std::size_t size) {
    const std::size_t packets = std::size_t{call.batches} * call.rows * (call.width / size);
    return static_cast<unsigned>((packets + threads - 1) / threads);
  };
  if (call.width % packet == 0) {
    launch_kernel<gather_rows<packet, X, Y, Stored>>("gather_rows", stream, blocks(packet), threads,
                                                     call);
  } else {
    launch_kernel<gather_rows<1, X, Y, Stored>>("gather_rows", stream, blocks(1), threads, call);
  }
}

/// A data set whose rows are bytes, of which `values()` says what they stand for.
template <class D>
concept ByteRows = requires(const D& data) {
  { data.pixels() } -> std::convertible_to<std::span<const std::uint8_t>>;
  { data.labels() } -> std::convertible_to<std::span<const std::uint8_t>>;
  { data.values() } -> std::convertible_to<std::span<const float, 256>>;
  { data.width() } -> std::convertible_to<std::size_t>;
};

/// A data set whose batches are rows with a label each.
template <class D>
concept LabelledSet =
    Dataset<D> && LabelledRows<typename D::batch_type> && requires(typename D::batch_type& batch) {
      batch.inputs.data();
      batch.labels.data();
      { batch.width } -> std::convertible_to<std::size_t>;
    };

/// The types of a row: as the model gets it, and what is kept of an input, which is a byte where
/// that is what the data set has. Another data set's are some, so that what it is refused with
/// stays the only error.
template <class D>
struct RowTypes {
  using Input = float;
  using Label = std::int32_t;
  using Stored = float;
};
template <LabelledSet D>
struct RowTypes<D> {
  using Batch = typename D::batch_type;
  using Input = std::remove_cvref_t<decltype(std::declval<Batch&>().inputs[0])>;
  using Label = std::remove_cvref_t<decltype(std::declval<Batch&>().labels[0])>;
  using Stored = std::conditional_t<ByteRows<D>, std::uint8_t, Input>;
};

/// All rows, on the GPU that was current when they were uploaded and on those that asked for them
/// since. Members may be called by several threads at once.
template <class X, class Y, class Stored>
class ResidentRows {
 public:
  using input_type = X;
  using label_type = Y;
  using stored_type = Stored;

  /// The rows in the memory of one GPU.
  struct Copy {
    Copy(int device, std::size_t rows, std::size_t width)
        : device(device),
          inputs(rows * width * sizeof(Stored)),
          labels(rows * sizeof(Y)),
          values(std::is_same_v<X, Stored> ? 0 : 256 * sizeof(X)) {}

    int device;
    DeviceArena inputs;
    DeviceArena labels;
    DeviceArena values;
  };

  /// **Host** blocks until all rows are on the current GPU.
  template <class Source>
  explicit ResidentRows(const Source& source) : size_(source.size()) {
    if (size_ == 0) return;
    if (size_ > std::numeric_limits<std::uint32_t>::max())
      fail("DeviceResident", {size_, " samples, and a GPU's batches are drawn from at most 2^32"},
           "divide the data set");
    if constexpr (ByteRows<Source>) {
      width_ = source.width();
      require_columns();
      if constexpr (requires { source.prepare({}); }) source.prepare({});
      const Copy& copy = make_copy();
      copy_now(copy.inputs.data(), source.pixels().data(), copy.inputs.bytes());
      copy_now(copy.values.data(), source.values().data(), copy.values.bytes());
      const std::vector<Y> labels(source.labels().begin(), source.labels().end());
      copy_now(copy.labels.data(), labels.data(), copy.labels.bytes());
    } else if constexpr (LabelledSet<Source>) {
      upload_in_pieces(source);
    }
  }

  std::size_t size() const { return size_; }
  std::size_t width() const { return width_; }

  /// The rows in the current GPU's memory. They come from the GPU that has them, at the first call
  /// on each. **Host** blocks then.
  const Copy& here() const {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard lock(mutex_);
    for (const auto& copy : copies_)
      if (copy->device == device) return *copy;
    const Copy& first = *copies_.front();
    const Copy& own = make_copy();
    const auto bring = [&](const DeviceArena& to, const DeviceArena& from) {
      if (from.bytes() == 0) return;
      check_cuda(
          cudaMemcpyPeerAsync(to.data(), device, from.data(), first.device, from.bytes(), nullptr),
          "cudaMemcpyPeerAsync");
    };
    bring(own.inputs, first.inputs);
    bring(own.labels, first.labels);
    bring(own.values, first.values);
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    return own;
  }

 private:
  void require_columns() const {
    if (width_ == 0 || width_ > std::numeric_limits<std::uint32_t>::max())
      fail("DeviceResident", {"samples of ", width_, " columns"},
           "give every sample inputs, fewer than 2^32");
  }

  const Copy& make_copy() const {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    try {
      copies_.push_back(std::make_unique<const Copy>(device, size_, width_));
    } catch (const Error& error) {
      fail("DeviceResident",
           {"GPU ", device, " has no room for ", size_ * (width_ * sizeof(Stored) + sizeof(Y)),
            " bytes of data (", error.problem(), ")"},
           "keep the data on the host (Pinned), or give every rank a part of it", rank_of_thread());
    }
    return *copies_.back();
  }

  /// What the data set loads as a batch, some megabytes at a time.
  template <class Source>
  void upload_in_pieces(const Source& source) {
    typename Source::batch_type batch;
    std::vector<std::size_t> indices{0};
    load_batch(source, indices, BatchPlace{}, batch);
    width_ = batch.width;
    require_columns();
    const Copy& copy = make_copy();
    const std::size_t piece = std::max<std::size_t>(1, 4_MiB / row_bytes());
    for (std::size_t first = 0; first < size_; first += piece) {
      indices.resize(std::min(piece, size_ - first));
      std::iota(indices.begin(), indices.end(), first);
      load_batch(source, indices, BatchPlace{}, batch);
      if (batch.width != width_)
        fail("DeviceResident", {"samples of ", width_, " and of ", batch.width, " columns"},
             "give all samples the same width");
      copy_now(copy.inputs.data() + first * row_bytes(), batch.inputs.data(),
               indices.size() * row_bytes());
      copy_now(copy.labels.data() + first * sizeof(Y), batch.labels.data(),
               indices.size() * sizeof(Y));
    }
  }
  std::size_t row_bytes() const { return width_ * sizeof(X); }

  std::size_t size_;
  std::size_t width_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const Copy>> copies_;
};

template <class D>
using ResidentRowsOf = ResidentRows<typename RowTypes<D>::Input, typename RowTypes<D>::Label,
                                    typename RowTypes<D>::Stored>;

}  // namespace lockstep::detail
