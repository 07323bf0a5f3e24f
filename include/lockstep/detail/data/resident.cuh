// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `DeviceResident train(data)`: a data set in GPU memory; a kernel gathers its batches.

#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/data/loader.hpp"
#include "lockstep/detail/device/cuda/vector.cuh"

namespace lockstep {

namespace detail {

/// A sample of a batch and its weight.
struct Draw {
  std::uint32_t sample;
  float weight;
};

/// Gathers batches of `rows` samples, or fewer in the last; draws and outputs are a stride apart.
template <class X, class Y, class Stored>
struct GatherCall {
  const Stored* inputs = nullptr;  ///< of all samples
  const Y* labels = nullptr;
  const X* values = nullptr;    ///< the value of each stored byte, if X is not Stored
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

  /// The memory of a later batch.
  template <class T>
  LOCKSTEP_HOST_DEVICE T* later(T* memory, std::uint32_t batch) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory) + batch * byte_stride);
  }
};

/// One thread per packet of N elements of a row.
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

/// A data set whose rows are bytes, each of which stands for one of `values()`.
template <class D>
concept ByteRows = requires(const D& data) {
  { data.pixels() } -> std::convertible_to<std::span<const std::uint8_t>>;
  { data.labels() } -> std::convertible_to<std::span<const std::uint8_t>>;
  { data.values() } -> std::convertible_to<std::span<const float, 256>>;
  { data.width() } -> std::convertible_to<std::size_t>;
};

template <class D>
concept LabelledSet =
    Dataset<D> && LabelledRows<typename D::batch_type> && requires(typename D::batch_type& batch) {
      batch.inputs.data();
      batch.labels.data();
      { batch.width } -> std::convertible_to<std::size_t>;
    };

/// All rows, on the GPU of the upload and on GPUs that have asked for them since. Thread-safe.
template <class X, class Y, class Stored>
class ResidentRows {
 public:
  /// The rows in one GPU's memory: inputs, labels, and the values of bytes.
  struct Copy {
    Copy(int device, std::size_t rows, std::size_t width)
        : device(device),
          memory(align_up(rows * width * sizeof(Stored)) + align_up(rows * sizeof(Y)) +
                 (std::is_same_v<X, Stored> ? 0 : 256 * sizeof(X))),
          inputs(reinterpret_cast<Stored*>(memory.data())),
          labels(reinterpret_cast<Y*>(memory.data() + align_up(rows * width * sizeof(Stored)))),
          values(reinterpret_cast<X*>(reinterpret_cast<std::byte*>(labels) +
                                      align_up(rows * sizeof(Y)))) {}

    int device;
    DeviceArena memory;
    Stored* inputs;
    Y* labels;
    X* values;
  };

  /// **Host** blocks until all rows are on the current GPU.
  template <class Source>
  explicit ResidentRows(const Source& source) : size_(source.size()) {
    if (size_ == 0) return;
    if constexpr (ByteRows<Source>) {
      width_ = source.width();
      if constexpr (requires { source.prepare({}); }) source.prepare({});
      const Copy& copy = make_copy();
      copy_now(copy.inputs, source.pixels().data(), size_ * width_);
      copy_now(copy.values, source.values().data(), source.values().size_bytes());
      const std::vector<Y> labels(source.labels().begin(), source.labels().end());
      copy_now(copy.labels, labels.data(), size_ * sizeof(Y));
    } else if constexpr (LabelledSet<Source>) {
      upload_in_pieces(source);
    }
  }

  /// The rows are in host or device memory. **Host** blocks likewise.
  ResidentRows(std::span<const X> inputs, std::span<const Y> labels)
    requires std::is_same_v<X, Stored>
      : size_(labels.size()), width_(width_of_rows("DeviceResident", inputs.size(), size_)) {
    if (size_ == 0) return;
    const Copy& copy = make_copy();
    copy_now(copy.inputs, inputs.data(), inputs.size_bytes());
    copy_now(copy.labels, labels.data(), labels.size_bytes());
  }

  std::size_t size() const { return size_; }
  std::size_t width() const { return width_; }

  /// The rows on the current GPU. **Host** blocks at a GPU's first call, which copies them.
  const Copy& here() const {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    const std::lock_guard lock(mutex_);
    for (const auto& copy : copies_)
      if (copy->device == device) return *copy;
    const Copy& first = *copies_.front();
    const Copy& own = make_copy();
    check_cuda(cudaMemcpyPeerAsync(own.memory.data(), device, first.memory.data(), first.device,
                                   first.memory.bytes(), nullptr),
               "cudaMemcpyPeerAsync");
    check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
    return own;
  }

 private:
  const Copy& make_copy() const {
    constexpr std::size_t most = std::numeric_limits<std::uint32_t>::max();
    if (size_ > most)
      fail("DeviceResident", {size_, " samples, and a GPU's batches are drawn from at most 2^32"},
           "divide the data set");
    if (width_ == 0 || width_ > most)
      fail("DeviceResident", {"samples of ", width_, " columns"},
           "give every sample inputs, fewer than 2^32");
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

  /// Loads the data set as batches of some megabytes.
  template <class Source>
  void upload_in_pieces(const Source& source) {
    typename Source::batch_type batch;
    std::vector<std::size_t> indices{0};
    load_batch(source, indices, Pass{}, 0, batch);
    width_ = batch.width;
    const Copy& copy = make_copy();
    const std::size_t piece = std::max<std::size_t>(1, 4_MiB / (width_ * sizeof(X)));
    for (std::size_t first = 0; first < size_; first += piece) {
      indices.resize(std::min(piece, size_ - first));
      std::iota(indices.begin(), indices.end(), first);
      load_batch(source, indices, Pass{}, 0, batch);
      if (batch.width != width_)
        fail("DeviceResident", {"samples of ", width_, " and of ", batch.width, " columns"},
             "give all samples the same width");
      copy_now(copy.inputs + first * width_, batch.inputs.data(),
               indices.size() * width_ * sizeof(X));
      copy_now(copy.labels + first, batch.labels.data(), indices.size() * sizeof(Y));
    }
  }

  std::size_t size_;
  std::size_t width_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<const Copy>> copies_;
};

/// The draws of one loop over the data, extended some batches ahead of the loop.
struct ResidentLoop {
  std::size_t total = 0;  ///< draws of the whole loop
  std::size_t batch_size = 0;
  std::vector<Draw> draws;
};

}  // namespace detail

/// Samples of a `DeviceResident`, gathered when a job uses the batch; a model gets a `DeviceBatch`.
template <class X, class Y, class Stored>
struct ResidentBatch {
  std::size_t size() const { return rows; }

  ResidentBatch slice(std::size_t first, std::size_t count) const {
    ResidentBatch some = *this;
    some.first += first;
    some.rows = count;
    return some;
  }

  // Internal: draws [first, first + rows) of a loop over `data`.

  const auto& source() const { return data; }

  std::shared_ptr<const detail::ResidentRows<X, Y, Stored>> data;
  std::shared_ptr<detail::ResidentLoop> loop;
  std::size_t first = 0;
  std::size_t rows = 0;
};

namespace detail {

/// The staged batches of one data set for one replica. A missing batch is gathered with the
/// following ones by one kernel before the step: a kernel per batch would cost as much as any of a
/// small step. Memory moves only for larger batches or more draws: captured steps hold its address.
template <class X, class Y, class Stored>
class ResidentUpload {
  using Rows = ResidentRows<X, Y, Stored>;
  using Batch = ResidentBatch<X, Y, Stored>;

 public:
  explicit ResidentUpload(const std::shared_ptr<const Rows>& data)
      : width_(data->width()), copy_(data->here()) {}

  const DeviceBatch<X, Y>& to_device(const Batch& batch, cudaStream_t stream) {
    return to_device_rows(batch, 0, batch.rows, std::min(batch.loop->batch_size, batch.loop->total),
                          stream);
  }

  /// Gathers a share of a batch unless it was gathered before. **Stream** in its order.
  const DeviceBatch<X, Y>& to_device_rows(const Batch& batch, std::size_t begin, std::size_t count,
                                          std::size_t room, cudaStream_t stream) {
    const Batch part = batch.slice(begin, count);
    stream_ = stream;
    const ResidentLoop& loop = *part.loop;
    if (part.loop != loop_) begin_loop(part.loop);
    reserve(std::max(room, part.rows));
    upload(loop);
    // The slot depends on the position in the loop, so that ranks captured together agree.
    const std::size_t stride = std::max<std::size_t>(1, loop.batch_size);
    const std::size_t slot = part.first / stride % slots_;
    if (held_[slot] != std::pair(part.first, part.rows)) gather(part, slot, stride);
    current_ = batch_in(slot, part.rows);
    return current_;
  }

 private:
  /// Captured steps have one graph per slot.
  static constexpr std::size_t most_places = 16;
  static constexpr std::size_t most_bytes = std::size_t{64} << 20;
  static constexpr std::size_t piece = 8192;  // draws

  Draw* draws() const { return reinterpret_cast<Draw*>(draws_->data()); }
  RowsLayout<X, Y> layout() const { return {room_, width_}; }
  /// A smaller batch has the layout of the largest.
  DeviceBatch<X, Y> batch_in(std::size_t slot, std::size_t rows) const {
    DeviceBatch<X, Y> batch = layout().at(memory_->data() + slot * layout().bytes());
    batch.rows = rows;
    return batch;
  }

  /// Gathers a batch, and drawn following ones, into slots from its own on, `stride` draws apart.
  void gather(const Batch& part, std::size_t slot, std::size_t stride) {
    const DeviceBatch<X, Y> to = batch_in(slot, part.rows);
    GatherCall<X, Y, Stored> call;
    call.inputs = copy_.inputs;
    call.labels = copy_.labels;
    call.values = copy_.values;
    call.draws = draws() + part.first;
    call.to_inputs = const_cast<X*>(to.inputs);
    call.to_labels = const_cast<Y*>(to.labels);
    call.to_weights = const_cast<float*>(to.weights);
    call.rows = static_cast<std::uint32_t>(part.rows);
    call.width = static_cast<std::uint32_t>(width_);
    call.draw_stride = stride;
    call.byte_stride = layout().bytes();
    for (std::size_t first = part.first; slot != slots_; ++slot, first += stride) {
      const std::size_t drawn = first < uploaded_ ? uploaded_ - first : 0;
      const std::size_t rows = std::min(part.rows, drawn);
      // The last batch of a loop may be smaller; a batch that is not fully drawn is gathered later.
      if (rows == 0 || (rows != part.rows && uploaded_ != part.loop->total)) break;
      held_[slot] = {first, rows};
      call.last_rows = static_cast<std::uint32_t>(rows);
      ++call.batches;
    }
    launch_gather(stream_, call);
  }

  void begin_loop(const std::shared_ptr<ResidentLoop>& loop) {
    loop_ = loop;
    uploaded_ = 0;
    held_.fill({});
    if (!draws_ || draws_->bytes() < loop->total * sizeof(Draw)) {
      finish();
      draws_.emplace(align_up(loop->total * sizeof(Draw)));
    }
  }

  void reserve(std::size_t rows) {
    if (memory_ && rows <= room_) return;
    if (rows > std::numeric_limits<std::uint32_t>::max() / width_)
      fail("DeviceResident", {"a batch of ", rows, " samples of ", width_, " columns"},
           "make batches smaller: a GPU gathers fewer than 2^32 numbers at a time");
    finish();
    room_ = rows;
    slots_ = std::clamp<std::size_t>(most_bytes / layout().bytes(), 1, most_places);
    memory_.emplace(slots_ * layout().bytes());
    held_.fill({});
  }

  void upload(const ResidentLoop& loop) {
    while (uploaded_ != loop.draws.size()) {
      StagingMemory& staging = stagings_[staged_ ^= 1];
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

  /// Waits, because memory may be in use.
  void finish() { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  std::size_t width_;
  const typename Rows::Copy& copy_;
  std::array<StagingMemory, 2> stagings_{StagingMemory(piece * sizeof(Draw)),
                                         StagingMemory(piece * sizeof(Draw))};
  std::optional<DeviceArena> draws_;  // freed before `stagings_`, which waits for copies
  std::optional<DeviceArena> memory_;
  std::size_t room_ = 0;
  std::size_t slots_ = 0;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<const ResidentLoop> loop_;
  std::size_t uploaded_ = 0;
  std::size_t staged_ = 0;
  /// The first draw and the number of samples in each slot.
  std::array<std::pair<std::size_t, std::size_t>, most_places> held_{};
  DeviceBatch<X, Y> current_;
};

/// The batch type of a data set on a GPU; any type after a rejection, to give only one error.
template <class D>
consteval auto resident_batch() {
  static_assert(
      LabelledSet<D>,
      "lockstep: DeviceResident uploads data sets whose batches are LabelledBatches; give "
      "samples `inputs` of one width and `label`, or upload other batches in the step "
      "(BatchUpload)");
  if constexpr (LabelledSet<D>) {
    static_assert(!changes_by_pass<D>(),
                  "lockstep: this data set draws random numbers, and DeviceResident would freeze "
                  "them, because it uploads samples once; draw them in the model (step.random), "
                  "or keep the data on the host (Pinned)");
    using Batch = typename D::batch_type;
    using Input = std::remove_cvref_t<decltype(std::declval<Batch&>().inputs[0])>;
    using Label = std::remove_cvref_t<decltype(std::declval<Batch&>().labels[0])>;
    using Stored = std::conditional_t<ByteRows<D>, std::uint8_t, Input>;
    return std::type_identity<ResidentBatch<Input, Label, Stored>>();
  } else {
    return std::type_identity<ResidentBatch<float, std::int32_t, float>>();
  }
}

}  // namespace detail

template <class X, class Y, class Stored>
class BatchUpload<ResidentBatch<X, Y, Stored>>
    : public detail::Uploads<detail::ResidentUpload<X, Y, Stored>,
                             const detail::ResidentRows<X, Y, Stored>> {};

/// A data set of labelled rows in the memory of the GPU that is current at construction: inside a
/// job's function, the rank's GPU. Bytes stay bytes there and become floats when a batch is
/// gathered, bitwise as in the host's loader. If replicas are on several GPUs
/// (`ParallelStrategy<DP>`), every GPU gets a copy at first use. Copies share the rows.
template <class Source>
class DeviceResident {
 public:
  using batch_type = typename decltype(detail::resident_batch<Source>())::type;

  /// **Host** blocks until all rows are on the GPU; `source` is not needed afterwards.
  explicit DeviceResident(const Source& source) : rows_(std::make_shared<Rows>(source)) {}

  /// Copies rows of inputs and their labels from contiguous host or device memory, such as two
  /// `thrust::device_vector`s, which must be complete. **Host** blocks until the copy is done.
  template <detail::ContiguousMemory Inputs, detail::ContiguousMemory Labels>
  DeviceResident(const Inputs& inputs, const Labels& labels)
      : rows_(std::make_shared<Rows>(flat(inputs), flat(labels))) {}

  std::size_t size() const { return rows_->size(); }
  std::size_t width() const { return rows_->width(); }

  /// A batch of samples that the program chooses.
  void load(std::span<const std::size_t> indices, batch_type& out) const {
    // A new loop: another batch may still use the old one.
    out = {rows_, std::make_shared<detail::ResidentLoop>(), 0, indices.size()};
    out.loop->total = out.loop->batch_size = indices.size();
    for (const std::size_t index : indices) out.loop->draws.push_back(draw(index, 1));
  }

  // Internal, for the loader.

  const auto& resident_rows() const { return rows_; }
  detail::Draw draw(std::size_t index, float weight) const {
    if (index >= size()) [[unlikely]]
      detail::fail("DeviceResident", {"sample ", index, " of ", size()},
                   "draw from the samples that there are");
    return {static_cast<std::uint32_t>(index), weight};
  }

 private:
  using Rows = typename decltype(batch_type::data)::element_type;

  std::shared_ptr<Rows> rows_;
};

template <detail::ContiguousMemory Inputs, detail::ContiguousMemory Labels>
DeviceResident(const Inputs&, const Labels&)
    -> DeviceResident<InMemoryDataset<std::remove_cv_t<detail::FlatElement<const Inputs>>,
                                      std::remove_cv_t<detail::FlatElement<const Labels>>>>;

namespace detail {

/// The iterating thread draws thousands of samples at a time, which are gathered where used.
template <class Source, Sampling Sampler>
class ResidentBatches {
 public:
  struct Slot {
    const Sampler* sampler = nullptr;
    typename DeviceResident<Source>::batch_type batch;
  };
  static constexpr bool collective = false;

  ResidentBatches(const DeviceResident<Source>& dataset, const LoaderOptions& options)
      : dataset_(dataset), batch_size_(options.batch_size) {}

  std::size_t slots() const { return 1; }
  std::size_t workers() const { return 0; }

  std::size_t begin(const Sampler& sampler, std::size_t batches) {
    begun_ = sampler.position();
    loop_ = std::make_shared<ResidentLoop>();
    loop_->total = sampler.size() - begun_;
    loop_->batch_size = batch_size_;
    loop_->draws.reserve(loop_->total);
    return batches;
  }

  void request(Slot& slot, const Sampler& sampler, std::size_t number) const {
    slot.sampler = &sampler;
    auto& batch = slot.batch;
    if (batch.loop != loop_) batch = {dataset_.resident_rows(), loop_, 0, 0};
    batch.first = number * batch_size_;
    batch.rows = std::min(batch_size_, loop_->total - batch.first);
  }

  void fill(Slot& slot) const {
    const std::size_t drawn = loop_->draws.size();
    const std::size_t needed = slot.batch.first + slot.batch.rows;
    if (drawn >= needed) return;
    const std::size_t end = std::min(loop_->total, std::max(needed, drawn + draws_at_a_time));
    for (std::size_t k = begun_ + drawn; k != begun_ + end; ++k) {
      const float weight = Sampler::masks ? slot.sampler->weight(k) : 1.f;
      loop_->draws.push_back(dataset_.draw((*slot.sampler)[k], weight));
    }
  }

 private:
  static constexpr std::size_t draws_at_a_time = 8192;

  const DeviceResident<Source> dataset_;
  std::size_t batch_size_;
  std::size_t begun_ = 0;  ///< first draw of the loop
  std::shared_ptr<ResidentLoop> loop_;
};

template <class Source, class Sampler>
struct BatchesOf<DeviceResident<Source>, Sampler>
    : std::type_identity<ResidentBatches<Source, Sampler>> {};

}  // namespace detail

}  // namespace lockstep
