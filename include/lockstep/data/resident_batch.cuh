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
#include "lockstep/device/cuda/batch_upload.cuh"
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

template <class X, class Y, class Stored>
class ResidentLane;

/// The batch that a model gets, and how the next one is gathered while it is trained on: on a
/// stream beside the step's. The gather is no part of a captured step: as a branch of its graph it
/// cost 9 microseconds of a step of 49.
template <class X, class Y, class Stored>
struct GatheredBatch : DeviceBatch<X, Y> {
  ResidentLane<X, Y, Stored>* lane = nullptr;

  void begin_next() const { lane->begin_next(); }
  void end_next() const { lane->end_next(); }

  friend bool operator==(const GatheredBatch&, const GatheredBatch&) = default;
};

/// The batches of one data set on the way to one replica: memory for two of them, which they take
/// by turns, and the draws of the loop under way. All stays where it is, as captured steps need it,
/// until a loop has larger batches or more draws. The draws go up in pieces, in stream order.
template <class X, class Y, class Stored>
class ResidentLane {
  using Rows = ResidentRows<X, Y, Stored>;
  using Part = ResidentPart<X, Y, Stored>;

 public:
  explicit ResidentLane(const std::shared_ptr<const Rows>& data)
      : width_(data->width()), copy_(data->here()) {}

  /// Gathers a batch, unless it was gathered beside the step before. Memory is made for `room`
  /// samples at least. **Stream** in its order.
  const GatheredBatch<X, Y, Stored>& place(const Part& part, std::size_t room,
                                           cudaStream_t stream) {
    settle();
    stream_ = stream;
    const ResidentLoop& loop = *part.loop;
    if (loop.number != loop_) begin_loop(loop);
    reserve(std::max(room, part.rows));
    // Batches take turns by their place in the loop, so that ranks do which are captured together.
    const std::size_t turn = part.first / std::max<std::size_t>(1, loop.batch_size) % 2;
    upload(loop);
    const Held held{part.first, part.rows};
    if (held_[turn] != held) gather(stream, turn, held);
    turn_ = turn;
    const std::size_t end = part.first + part.rows;
    next_ = {end, std::min(part.rows, std::min(loop.total, uploaded_) - end)};
    static_cast<DeviceBatch<X, Y>&>(placed_) = batch_in(turn, part.rows);
    placed_.lane = this;
    return placed_;
  }

  /// The other memory's batch, if there is one more, comes in while the step runs that is enqueued
  /// next: the step before has read what is there.
  void begin_next() {
    if (next_.rows == 0) return;
    is_open_ = true;
    forked_.record(stream_);
    forked_.block(side_);
    gather(side_, turn_ ^ 1, next_);
  }
  /// What is enqueued from now on finds it there.
  void end_next() {
    if (!std::exchange(is_open_, false)) return;
    joined_.record(side_);
    joined_.block(stream_);
  }

 private:
  /// What a memory holds: samples from this draw on.
  struct Held {
    std::size_t first = 0;
    std::size_t rows = 0;  // 0: nothing
    friend bool operator==(const Held&, const Held&) = default;
  };
  static constexpr std::size_t piece = 8192;  // draws
  /// Host memory that must not be written before it has been copied.
  struct Staging {
    PinnedArena memory{piece * sizeof(Draw)};
    CudaEvent copied;
  };

  Draw* draws() const { return reinterpret_cast<Draw*>(draws_->data()); }
  /// A batch in one of the two memories. A smaller one lies as the largest would.
  DeviceBatch<X, Y> batch_in(std::size_t turn, std::size_t rows) const {
    const RowsLayout<X, Y> layout{room_, width_};
    DeviceBatch<X, Y> batch = layout.at(memory_->data() + turn * layout.bytes());
    batch.rows = rows;
    return batch;
  }

  void gather(cudaStream_t stream, std::size_t turn, const Held& held) {
    const DeviceBatch<X, Y> to = batch_in(turn, held.rows);
    GatherCall<X, Y, Stored> call;
    call.inputs = reinterpret_cast<const Stored*>(copy_.inputs.data());
    call.labels = reinterpret_cast<const Y*>(copy_.labels.data());
    call.values = reinterpret_cast<const X*>(copy_.values.data());
    call.draws = draws() + held.first;
    call.to_inputs = const_cast<X*>(to.inputs);
    call.to_labels = const_cast<Y*>(to.labels);
    call.to_weights = const_cast<float*>(to.weights);
    call.rows = static_cast<std::uint32_t>(held.rows);
    call.width = static_cast<std::uint32_t>(width_);
    launch_gather(stream, call);
    held_[turn] = held;
  }

  void begin_loop(const ResidentLoop& loop) {
    loop_ = loop.number;
    uploaded_ = 0;
    held_ = {};
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
    memory_.emplace(2 * RowsLayout<X, Y>{rows, width_}.bytes());
    held_ = {};
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

  /// After a step that threw, its gather may be under way.
  void settle() {
    if (!std::exchange(is_open_, false)) return;
    side_.synchronize();
    held_ = {};
  }
  /// Memory may be in use.
  void finish() { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  std::size_t width_;
  const typename Rows::Copy& copy_;
  std::array<Staging, 2> stagings_;
  std::optional<DeviceArena> draws_;  // is freed before the stagings, which waits for copies
  std::optional<DeviceArena> memory_;
  std::size_t room_ = 0;
  CudaStream side_;
  CudaEvent forked_, joined_;
  cudaStream_t stream_ = nullptr;
  std::uint64_t loop_ = 0;
  std::size_t uploaded_ = 0;
  std::size_t staged_ = 0;
  std::size_t turn_ = 0;
  std::array<Held, 2> held_{};
  Held next_{};
  bool is_open_ = false;
  GatheredBatch<X, Y, Stored> placed_;
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
