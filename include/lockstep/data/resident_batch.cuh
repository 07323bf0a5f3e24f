// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batches of a data set that lies in a GPU's memory: which samples they hold, and how they
/// are gathered for the step.

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/data/device_batch.cuh"
#include "lockstep/data/resident_rows.cuh"
#include "lockstep/data/upload_lanes.hpp"
#include "lockstep/device/cuda/batch.cuh"
#include "lockstep/device/cuda/check.cuh"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/device/cuda/stream.cuh"

namespace lockstep {

namespace detail {

/// The draws of one loop over the data. More are drawn while the loop goes on, always some batches
/// ahead of the one that it has.
struct ResidentLoop {
  std::uint64_t number = next_number();  ///< no other loop of the process has it
  std::size_t total = 0;                 ///< draws of the whole loop
  std::size_t batch_size = 0;
  std::vector<Draw> draws;

  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> count{0};
    return ++count;
  }
};

/// Which samples a batch holds: draws [first, first + rows) of a loop over `data`.
template <class X, class Y, class Stored>
struct ResidentPart {
  std::shared_ptr<const ResidentRows<X, Y, Stored>> data;
  std::shared_ptr<ResidentLoop> loop;
  std::size_t first = 0;
  std::size_t rows = 0;
};

}  // namespace detail

/// Some samples of a `DeviceResident`. They are gathered when the batch is used, by `job.step`,
/// `evaluate` and the like: a model gets them as a `DeviceBatch`.
template <class X, class Y, class Stored>
struct ResidentBatch {
  std::size_t size() const { return part.rows; }

  /// Samples [first, first + count).
  ResidentBatch slice(std::size_t first, std::size_t count) const {
    ResidentBatch some = *this;
    some.part.first += first;
    some.part.rows = count;
    return some;
  }

  detail::ResidentPart<X, Y, Stored> part;  ///< the library's own
};

namespace detail {

/// The batches of one data set on the way to one replica, and the draws of the loop under way. A
/// batch that is not there is gathered with those behind it, by one kernel in front of the step:
/// each by itself would cost as much as any other kernel of a small step, and on a stream beside
/// the step more than that. All memory stays where it is, as captured steps need it, until a loop
/// has larger batches or more draws. The draws go up in pieces, in stream order.
template <class X, class Y, class Stored>
class ResidentLane {
  using Rows = ResidentRows<X, Y, Stored>;
  using Part = ResidentPart<X, Y, Stored>;

 public:
  explicit ResidentLane(const std::shared_ptr<const Rows>& data)
      : width_(data->width()), copy_(data->here()) {}

  /// Gathers a batch, unless it was gathered with one before. Memory is made for `room` samples at
  /// least. **Stream** in its order.
  const DeviceBatch<X, Y>& place(const Part& part, std::size_t room, cudaStream_t stream) {
    stream_ = stream;
    const ResidentLoop& loop = *part.loop;
    if (loop.number != loop_) begin_loop(loop);
    reserve(std::max(room, part.rows));
    upload(loop);
    // Batches have their places in memory by those in the loop: so ranks that are captured together
    // have the same.
    const std::size_t stride = std::max<std::size_t>(1, loop.batch_size);
    const std::size_t place = part.first / stride % places_;
    if (held_[place] != Held{part.first, part.rows}) gather(part, place, stride);
    placed_ = batch_in(place, part.rows);
    return placed_;
  }

 private:
  /// What a place holds: samples from this draw on.
  struct Held {
    std::size_t first = 0;
    std::size_t rows = 0;  // 0: nothing
    friend bool operator==(const Held&, const Held&) = default;
  };
  /// Each place has a graph, where steps are captured.
  static constexpr std::size_t most_places = 16;
  static constexpr std::size_t most_bytes = std::size_t{64} << 20;
  static constexpr std::size_t piece = 8192;  // draws
  /// Host memory that must not be written before it has been copied.
  struct Staging {
    PinnedArena memory{piece * sizeof(Draw)};
    CudaEvent copied;
  };

  Draw* draws() const { return reinterpret_cast<Draw*>(draws_->data()); }
  RowsLayout<X, Y> layout() const { return {room_, width_}; }
  /// A batch in its place. A smaller one lies as the largest would.
  DeviceBatch<X, Y> batch_in(std::size_t place, std::size_t rows) const {
    DeviceBatch<X, Y> batch = layout().at(memory_->data() + place * layout().bytes());
    batch.rows = rows;
    return batch;
  }

  /// Gathers a batch, and those behind it whose samples are drawn, into the places from its own on.
  /// Batches of a loop, or a replica's shares of them, begin `stride` draws apart.
  void gather(const Part& part, std::size_t place, std::size_t stride) {
    const DeviceBatch<X, Y> to = batch_in(place, part.rows);
    GatherCall<X, Y, Stored> call;
    call.inputs = reinterpret_cast<const Stored*>(copy_.inputs.data());
    call.labels = reinterpret_cast<const Y*>(copy_.labels.data());
    call.values = reinterpret_cast<const X*>(copy_.values.data());
    call.draws = draws() + part.first;
    call.to_inputs = const_cast<X*>(to.inputs);
    call.to_labels = const_cast<Y*>(to.labels);
    call.to_weights = const_cast<float*>(to.weights);
    call.rows = static_cast<std::uint32_t>(part.rows);
    call.width = static_cast<std::uint32_t>(width_);
    call.draw_stride = stride;
    call.byte_stride = layout().bytes();
    for (std::size_t first = part.first; place != places_; ++place, first += stride) {
      const std::size_t drawn = first < uploaded_ ? uploaded_ - first : 0;
      const std::size_t rows = std::min(part.rows, drawn);
      // The last batch of a loop may be smaller; a batch that is not drawn to its end comes later.
      if (rows == 0 || (rows != part.rows && uploaded_ != part.loop->total)) break;
      held_[place] = {first, rows};
      call.last_rows = static_cast<std::uint32_t>(rows);
      ++call.batches;
    }
    launch_gather(stream_, call);
  }

  void begin_loop(const ResidentLoop& loop) {
    loop_ = loop.number;
    uploaded_ = 0;
    held_.fill({});
    if (!draws_ || draws_->bytes() < loop.total * sizeof(Draw)) {
      finish();
      draws_.emplace(align_up(loop.total * sizeof(Draw)));
    }
  }

  void reserve(std::size_t rows) {
    if (memory_ && rows <= room_) return;
    if (rows > std::numeric_limits<std::uint32_t>::max() / width_)
      fail("DeviceResident", {"a batch of ", rows, " samples of ", width_, " columns"},
           "make batches smaller: a GPU gathers fewer than 2^32 numbers at a time");
    finish();
    room_ = rows;
    places_ = std::clamp<std::size_t>(most_bytes / layout().bytes(), 1, most_places);
    memory_.emplace(places_ * layout().bytes());
    held_.fill({});
  }

  /// Sends up what was drawn since the last call.
  void upload(const ResidentLoop& loop) {
    while (uploaded_ != loop.draws.size()) {
      Staging& staging = stagings_[staged_ ^= 1];
      const std::size_t count = std::min(piece, loop.draws.size() - uploaded_);
      staging.copied.synchronize();
      std::memcpy(staging.memory.data(), loop.draws.data() + uploaded_, count * sizeof(Draw));
      check_cuda(cudaMemcpyAsync(draws() + uploaded_, staging.memory.data(), count * sizeof(Draw),
                                 cudaMemcpyHostToDevice, stream_),
                 "cudaMemcpyAsync");
      staging.copied.record(stream_);
      uploaded_ += count;
    }
  }

  /// Memory may be in use.
  void finish() { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  std::size_t width_;
  const typename Rows::Copy& copy_;
  std::array<Staging, 2> stagings_;
  std::optional<DeviceArena> draws_;  // is freed before the stagings, which waits for copies
  std::optional<DeviceArena> memory_;
  std::size_t room_ = 0;
  std::size_t places_ = 0;
  cudaStream_t stream_ = nullptr;
  std::uint64_t loop_ = 0;
  std::size_t uploaded_ = 0;
  std::size_t staged_ = 0;
  std::array<Held, most_places> held_{};
  DeviceBatch<X, Y> placed_;
};

}  // namespace detail

/// A replica's lanes, one for each data set that it was given batches of.
template <class X, class Y, class Stored>
class BatchUpload<ResidentBatch<X, Y, Stored>> {
  using Lane = detail::ResidentLane<X, Y, Stored>;

 public:
  const auto& operator()(const ResidentBatch<X, Y, Stored>& batch, cudaStream_t stream) {
    const detail::ResidentLoop& loop = *batch.part.loop;
    return lane_of(batch.part).place(batch.part, std::min(loop.batch_size, loop.total), stream);
  }

  /// A share of a batch, with room for at least `room` samples.
  const DeviceBatch<X, Y>& operator()(const ResidentBatch<X, Y, Stored>& batch, std::size_t first,
                                      std::size_t count, std::size_t room, cudaStream_t stream) {
    const auto share = batch.slice(first, count);
    return lane_of(share.part).place(share.part, room, stream);
  }

 private:
  Lane& lane_of(const detail::ResidentPart<X, Y, Stored>& part) { return lanes_.of(part.data); }

  detail::UploadLanes<Lane, const detail::ResidentRows<X, Y, Stored>> lanes_;
};

}  // namespace lockstep
