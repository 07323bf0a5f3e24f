// SPDX-License-Identifier: Apache-2.0
// Norms on a GPU. One stream: statistics, forward and backward of batch norm and layer norm against
// the bandwidth of a copy and against PyTorch's; with ReLU and residual in the same pass and in
// passes of their own. Then steps of whole jobs, call by call and as a CUDA graph: one rank, and
// two ranks that are threads and share the GPU, with statistics of both; against PyTorch's
// SyncBatchNorm in one process and in two that share the GPU.
//
//   bench_norm_gpu [passes|steps]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cub/device/device_reduce.cuh>
#include <cuda/std/functional>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "comparison_table.hpp"
#include "load.hpp"
#include "measure.hpp"
#include "resident.cuh"
#include "thread_ranks.cuh"
#include "timing.cuh"

namespace {

using namespace bench;

/// Numbers that look random, between -1 and 1.
template <class T>
__global__ void fill(T* values, std::size_t size, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761u + seed;
    bits = (bits ^ (bits >> 15)) * 2246822519u;
    bits ^= bits >> 13;
    values[i] = static_cast<T>(static_cast<float>(bits >> 8) * 0x1p-23f - 1.f);
  }
}

template <class T>
__global__ void set_to_one(T* values, std::size_t size) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i < size) values[i] = static_cast<T>(1.f);
}

// The passes that a network without fusion has. Each thread takes 16 bytes at a time, so that they
// run at the speed of a copy.

template <class T>
struct alignas(16) Packet {
  static constexpr std::size_t count = 16 / sizeof(T);
  T values[count];
};

/// y = relu(y), or relu(y + residual) if there is one.
template <class T>
__global__ void activate(Packet<T>* y, const Packet<T>* residual, std::size_t packets) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i >= packets) return;
  Packet<T> own = y[i];
  const Packet<T> added = residual == nullptr ? Packet<T>{} : residual[i];
  for (std::size_t k = 0; k < Packet<T>::count; ++k) {
    float value = static_cast<float>(own.values[k]);
    if (residual != nullptr) value += static_cast<float>(added.values[k]);
    own.values[k] = static_cast<T>(value > 0 ? value : 0.f);
  }
  y[i] = own;
}
/// d = dy where y is above zero.
template <class T>
__global__ void mask(const Packet<T>* y, const Packet<T>* dy, Packet<T>* d, std::size_t packets) {
  const std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
  if (i >= packets) return;
  const Packet<T> passed = y[i];
  Packet<T> own = dy[i];
  for (std::size_t k = 0; k < Packet<T>::count; ++k)
    if (!(static_cast<float>(passed.values[k]) > 0)) own.values[k] = static_cast<T>(0.f);
  d[i] = own;
}

struct ToFloat {
  template <class T>
  __device__ float operator()(T value) const {
    return static_cast<float>(value);
  }
};

/// Layer norms have no running statistics.
template <class Layer>
inline constexpr bool has_buffers = requires { typename Layer::Buffers; };

template <class Layer>
struct OneNorm {
  using Parameters = ParameterList<Layer>;
  using Buffers = std::conditional_t<has_buffers<Layer>, BufferList<Layer>, BufferList<>>;
  void shapes(auto& shape) const { Layer::shapes(shape, features); }
  std::size_t features = 1;
};

/// The step of a layer that is alone: its tensors and a stream.
template <class Model>
class LayerStep : public lockstep::detail::BareStep<Model, Buckets<>, DeviceMemory> {
 public:
  LayerStep(const Model& model, lockstep::detail::Arenas arenas, cudaStream_t stream)
      : lockstep::detail::BareStep<Model, Buckets<>, DeviceMemory>(model, arenas),
        stream_(stream) {}
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_;
};

/// A norm with its activations of type T, as (samples, channels, positions).
template <class T, class Layer>
class Alone {
 public:
  explicit Alone(const NormCase& c)
      : shape_(shape_of(c)),
        model_{shape_.channels},
        x_(c.size()),
        dy_(c.size()),
        residual_(c.size()),
        y_(c.size()),
        dx_(c.size()),
        d_(c.size()) {
    for (auto* const values : {&x_, &dy_, &residual_}) {
      fill<<<1024, 256, 0, stream_>>>(static_cast<T*>(*values), c.size(), ++seed_);
      check_launch("fill");
    }
    step_.for_each_parameter([&](auto name, const auto& view) {
      using W = typename std::remove_cvref_t<decltype(view)>::value_type;
      if (!name.ends_with("weight")) return;
      set_to_one<<<static_cast<unsigned>(view.size() / 256 + 1), 256, 0, stream_>>>(
          const_cast<W*>(view.data_handle()), view.size());
      check_launch("set_to_one");
    });
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }

  cudaStream_t stream() const { return stream_; }

  void copy() {
    check_cuda(
        cudaMemcpyAsync(y_, x_, shape_.size() * sizeof(T), cudaMemcpyDeviceToDevice, stream_),
        "cudaMemcpyAsync");
  }
  /// The statistics alone.
  void measure() {
    work_.reserve(shape_.channels, 1);
    work_.measure(static_cast<cudaStream_t>(stream_), shape_, static_cast<const T*>(x_));
  }
  /// The least that reads all: CUB's sum of them, in float.
  void add_up() {
    std::size_t bytes = scratch_.bytes();
    check_cuda(cub::DeviceReduce::TransformReduce(
                   scratch_.data(), bytes, static_cast<const T*>(x_), static_cast<float*>(total_),
                   static_cast<int>(shape_.size()), cuda::std::plus<>{}, ToFloat{}, 0.f, stream_),
               "cub::DeviceReduce::TransformReduce");
  }
  void forward() { layer_.forward(step_, read(x_), written(y_)); }
  void backward() { layer_.backward(step_, read(x_), read(dy_), written(dx_)); }

  void relu() {
    layer_.forward_relu(step_, read(x_), written(y_));
    layer_.backward_relu(step_, read(x_), read(dy_), written(dx_));
  }
  void relu_apart() {
    forward();
    activate<<<blocks(), 256, 0, stream_>>>(packets(y_), static_cast<const Packet<T>*>(nullptr),
                                            count());
    check_launch("activate");
    go_back();
  }
  void add_relu() {
    layer_.forward_add_relu(step_, read(x_), read(residual_), written(y_));
    layer_.backward_add_relu(step_, read(x_), read(y_), read(dy_), written(dx_), written(d_));
  }
  void add_relu_apart() {
    forward();
    activate<<<blocks(), 256, 0, stream_>>>(
        packets(y_), static_cast<const Packet<T>*>(packets(residual_)), count());
    check_launch("activate");
    go_back();
  }

 private:
  using Model = OneNorm<Layer>;
  using Shape = lockstep::detail::NormShape;

  /// Images with channels last, and rows, have one position.
  static Shape shape_of(const NormCase& c) {
    const auto extents = c.extents();
    if (c.kind() == "layer" || extents.size() == 2)
      return {c.size() / extents.back(), extents.back(), 1};
    if (c.text.ends_with(":last")) return {c.size() / extents[1], extents[1], 1};
    return {extents[0], extents[1], c.size() / (extents[0] * extents[1])};
  }

  void go_back() {
    mask<<<blocks(), 256, 0, stream_>>>(static_cast<const Packet<T>*>(packets(y_)),
                                        static_cast<const Packet<T>*>(packets(dy_)), packets(d_),
                                        count());
    check_launch("mask");
    layer_.backward(step_, read(x_), read(d_), written(dx_));
  }
  std::size_t count() const { return shape_.size() / Packet<T>::count; }
  unsigned blocks() const { return static_cast<unsigned>((count() + 255) / 256); }
  static Packet<T>* packets(const DeviceArray<T>& values) {
    return reinterpret_cast<Packet<T>*>(static_cast<T*>(values));
  }
  template <class Value>
  auto view(const DeviceArray<T>& values) const {
    // A layer norm normalises the last axis, so that its features are last here too.
    if constexpr (!has_buffers<Layer>) {
      return DeviceView<Value, dynamic, dynamic>(static_cast<T*>(values), shape_.samples,
                                                 shape_.channels);
    } else {
      return DeviceView<Value, dynamic, dynamic, dynamic>(static_cast<T*>(values), shape_.samples,
                                                          shape_.channels, shape_.positions);
    }
  }
  auto read(const DeviceArray<T>& values) const { return view<const T>(values); }
  auto written(const DeviceArray<T>& values) const { return view<T>(values); }

  CudaStream stream_;
  Shape shape_;
  Model model_;
  DeviceArray<T> x_, dy_, residual_, y_, dx_, d_;
  std::uint32_t seed_ = 0;
  DeviceArena parameters_{lockstep::detail::Layout<Model>(model_).plan().bytes};
  DeviceArena gradients_{parameters_.bytes()};
  DeviceArena buffers_{
      std::max<std::size_t>(256, lockstep::detail::BufferLayout<Model>(model_).plan().bytes)};
  LayerStep<Model> step_{model_, {parameters_.data(), gradients_.data(), buffers_.data()}, stream_};
  Layer layer_;
  lockstep::detail::NormWork<DeviceMemory> work_;
  DeviceArena scratch_{1 << 20};
  DeviceArray<float> total_{1};
};

/// PyTorch's, without its host's share where a CUDA graph could be made of it.
Times torch_times(const TorchNorms& torch, const std::string& what) {
  const Times graph = torch(what + " graph");
  return graph.known ? graph : torch(what + " eager");
}

template <class T>
void compare_batch_norm(const NormCase& c, const TorchNorms& torch, ComparisonTable& table) {
  Alone<T, BatchNorm<"bn", dynamic>> one(c);
  const auto times = race_on_device(
      one.stream(),
      {[&] { one.copy(); }, [&] { one.measure(); }, [&] { one.add_up(); }, [&] { one.forward(); },
       [&] { one.backward(); }, [&] { one.relu(); }, [&] { one.relu_apart(); },
       [&] { one.add_relu(); }, [&] { one.add_relu_apart(); }});
  const auto [copy, measure, add_up, forward, backward, relu, relu_apart, add_relu,
              add_relu_apart] = std::array<Times, 9>{
      times[0], times[1], times[2], times[3], times[4], times[5], times[6], times[7], times[8]};
  const Times both{true, forward.median + backward.median, forward.minimum + backward.minimum};
  const std::string what = "batch norm " + c.words();
  // A copy reads and writes each byte. Statistics read x; forward reads x twice and writes y;
  // backward reads x and dy twice and writes dx.
  table.row(what + ": statistics, share of copy bandwidth", measure, of_copy(copy, 0.5), 0.85);
  table.row("same, statistics against CUB's sum of all", measure, add_up, 0);
  table.row("same, forward", forward, of_copy(copy, 1.5), 0.85);
  table.row("same, backward", backward, of_copy(copy, 2.5), 0.85);
  table.row("same, against PyTorch: forward", forward,
            torch_times(torch, c.text + " plain forward"), 0);
  table.row("same, forward and backward", both, torch_times(torch, c.text + " plain both"), 0);
  table.row("same, with ReLU", relu, torch_times(torch, c.text + " relu both"), 0);
  table.row("same, with residual and ReLU", add_relu, torch_times(torch, c.text + " add_relu both"),
            0);
  for (const char* const way : {"relu", "add_relu"}) {
    const Times compiled = torch(c.text + " " + way + " both compile");
    if (compiled.known)
      table.row("same, " + std::string(way) + " by torch.compile",
                way == std::string("relu") ? relu : add_relu, compiled, 0);
  }
  table.row(what + ": ReLU in one pass against passes of its own", relu, relu_apart, 0);
  table.row("same, residual and ReLU", add_relu, add_relu_apart, 0);
}

template <class T>
void compare_layer_norm(const NormCase& c, const TorchNorms& torch, ComparisonTable& table) {
  Alone<T, LayerNorm<"ln", dynamic, T>> one(c);
  const auto times = race_on_device(
      one.stream(), {[&] { one.copy(); }, [&] { one.forward(); }, [&] { one.backward(); }});
  const Times both{true, times[1].median + times[2].median, times[1].minimum + times[2].minimum};
  const std::string what = "layer norm " + c.words();
  // Forward reads x and writes y; backward reads x and dy and writes dx.
  table.row(what + ": forward, share of copy bandwidth", times[1], times[0], 0.85);
  table.row("same, backward", times[2], of_copy(times[0], 1.5), 0.85);
  table.row("same, against PyTorch: forward", times[1],
            torch_times(torch, c.text + " plain forward"), 0);
  table.row("same, forward and backward", both, torch_times(torch, c.text + " plain both"), 0);
}

void compare_passes(ComparisonTable& table) {
  const std::vector<NormCase> cases{
      {"batch:256x64x56x56:float32"},      {"batch:256x64x56x56:bfloat16"},
      {"batch:256x256x14x14:float32"},     {"batch:256x512x7x7:float32"},
      {"batch:64x256x64x64:float32:last"}, {"batch:64x256x64x64:bfloat16:last"},
      {"layer:32768x1024:float32"},        {"layer:32768x1024:bfloat16"},
      {"layer:8192x4096:float32"}};
  TorchNorms torch;
  torch.ask("cuda", cases);
  for (const NormCase& c : cases) {
    const bool halves = c.text.find("bfloat16") != std::string::npos;
    if (c.kind() == "layer") {
      halves ? compare_layer_norm<BFloat16>(c, torch, table)
             : compare_layer_norm<float>(c, torch, table);
    } else {
      halves ? compare_batch_norm<BFloat16>(c, torch, table)
             : compare_batch_norm<float>(c, torch, table);
    }
  }
}

// Steps of jobs.

/// A batch norm that is a whole model; its activations are the batch's inputs.
struct NormNet {
  using Norm = BatchNorm<"bn", dynamic>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;
  using Batch = DeviceBatch<float, std::int32_t>;

  NormNet(std::size_t channels, std::size_t positions, std::size_t size)
      : channels(channels),
        positions(positions),
        y(std::make_shared<DeviceArray<float>>(size)),
        dx(std::make_shared<DeviceArray<float>>(size)) {}
  void shapes(auto& shape) const { Norm::shapes(shape, channels); }

  void forward(auto& step, const Batch& batch) {
    norm.forward(step, view<const float>(batch.inputs, batch), view<float>(*y, batch));
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
  void backward(auto& step, const Batch& batch) {
    norm.backward(step, view<const float>(batch.inputs, batch), view<const float>(*y, batch),
                  view<float>(*dx, batch));
  }

  template <class T>
  auto view(T* data, const Batch& batch) const {
    return DeviceView<T, dynamic, dynamic, dynamic>(data, batch.rows, channels, positions);
  }

  std::size_t channels, positions;
  std::shared_ptr<DeviceArray<float>> y, dx;
  Norm norm;
};

/// Ways to make a step, of one rank; rank 0 keeps the times of all.
template <class Comm>
class Ways {
 public:
  Ways(Comm& comm, const std::vector<std::size_t>& extents)
      : comm_(comm),
        extents_(extents),
        data_(extents[0], extents[1] * extents[2] * extents[3], 10),
        batch_(data_.batch()) {}

  template <class... Policies>
  void add() {
    using Job = DistributedDataParallel<NormNet, Device<Cuda>, Policies...>;
    auto job = std::make_shared<Job>(
        comm_, NormNet(extents_[1], extents_[2] * extents_[3], batch_.rows * batch_.width));
    job->optimizer().lr = 0;  // the outputs are their own gradient, which would grow and grow
    for (int i = 0; i < 10; ++i) job->step(batch_);  // the step is captured
    steps_.push_back([this, job](int count) {
      for (int i = 0; i < count; ++i) job->step(batch_);
    });
  }

  std::vector<Times> race() { return bench::race(comm_, steps_, 100); }

 private:
  Comm& comm_;
  std::vector<std::size_t> extents_;
  const Resident data_;
  const DeviceBatch<float, std::int32_t> batch_;
  std::vector<std::function<void(int)>> steps_;
};

constexpr std::size_t ranks = 2;

void compare_steps(ComparisonTable& table) {
  const std::vector<std::string> shapes{"8x64x14x14", "32x64x28x28", "32x256x56x56"};
  TorchNorms torch;
  torch.ask_ranks("nccl", shapes, 1);
  torch.ask_ranks("nccl", shapes);
  torch.ask_ranks("gloo", shapes);
  for (const std::string& shape : shapes) {
    const auto extents = NormCase{"batch:" + shape + ":float32"}.extents();
    std::vector<Times> one, two;
    {
      CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
      Ways<CudaLoopbackCommunicator> ways(comm, extents);
      ways.template add<World<1>, Norms<Synced>>();
      ways.template add<World<1>, Norms<Synced>, CapturedStep>();
      one = ways.race();
    }
    on_ranks<ranks>([&](auto& comm) {
      Ways<std::remove_reference_t<decltype(comm)>> ways(comm, extents);
      using W = World<ranks>;
      ways.template add<W, Backend<Shm>, Norms<Synced>>();
      ways.template add<W, Backend<Shm>, Norms<Synced>, CapturedStep>();
      ways.template add<W, Backend<Shm>, Norms<Local>>();
      ways.template add<W, Backend<Shm>, Norms<Local>, CapturedStep>();
      auto times = ways.race();
      if (comm.rank() == Rank{0}) two = std::move(times);
    });
    const std::string alone = "a step of one rank, batch norm " + shape;
    table.row(alone + ": call by call against PyTorch's SyncBatchNorm in DDP", one[0],
              torch("nccl 1 " + shape + " synced"), 0);
    table.row("same, as a graph", one[1], torch("nccl 1 " + shape + " synced"), 0);
    table.row(
        "same, against the kernels of PyTorch's SyncBatchNorm, which it leaves out in a world of "
        "one",
        one[1], torch("nccl 1 " + shape + " kernels"), 0);
    const std::string what =
        "a step of two ranks that share the GPU, batch norm " + shape + " each";
    table.row(what + ": Norms<Synced> over Norms<Local>", two[0], two[2], 0, true);
    table.row("same, as graphs", two[1], two[3], 0, true);
    table.row("same, threads as a graph against PyTorch's SyncBatchNorm, processes, NCCL", two[1],
              torch("nccl " + shape + " synced"), 0);
    table.row("same, threads call by call", two[0], torch("nccl " + shape + " synced"), 0);
    table.row("same, as a graph against PyTorch's over Gloo", two[1],
              torch("gloo " + shape + " synced"), 0);
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench norm: there is no GPU here\n");
    return 1;
  }
  const std::string what = argc > 1 ? argv[1] : "";
  const OthersLoad others;
  std::printf("norms in training on one GPU; microseconds\n\n");
  ComparisonTable table;
  if (what != "steps") compare_passes(table);
  if (what != "passes") compare_steps(table);
  table.write("norm_gpu");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench norm: %s\n", error.what());
  return 1;
}
