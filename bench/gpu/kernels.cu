// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <cstdint>
#include <cstdio>
#include <functional>

#include "lockstep/detail/bucket/pack.cuh"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/constants.cuh"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/optim/update.cuh"
#include "timing.cuh"

namespace bench {
namespace {

using namespace lockstep;

constexpr std::size_t count = gpt2_parameters;
constexpr double adam_bytes = 28;  // of a parameter: four floats read, three written

/// Numbers in [0, 1) that look random: data of zeroes would take the memory less power.
__global__ void fill(float* values, std::size_t size, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < size;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    std::uint32_t bits = static_cast<std::uint32_t>(i) * 2654435761u + seed;
    bits = (bits ^ (bits >> 15)) * 2246822519u;
    bits ^= bits >> 13;
    values[i] = static_cast<float>(bits >> 8) * 0x1p-24f;
  }
}

void launch_fill(cudaStream_t stream, const DeviceArena& arena, std::uint32_t seed) {
  fill<<<1024, 256, 0, stream>>>(reinterpret_cast<float*>(arena.data()),
                                 arena.bytes() / sizeof(float), seed);
  check_launch("fill");
}

class Floats {
 public:
  Floats(cudaStream_t stream, std::uint32_t seed) : arena_(count * sizeof(float)) {
    launch_fill(stream, arena_, seed);
  }
  float* data() const { return reinterpret_cast<float*>(arena_.data()); }

 private:
  DeviceArena arena_;
};

/// Parameters, gradients, states, and copies of them.
struct Arrays {
  CudaStream stream;
  Floats parameters{stream, 1};
  Floats gradients{stream, 2};
  Floats means{stream, 3};
  Floats squares{stream, 4};
  DeviceArena packed{count * sizeof(BFloat16)};
  DeviceArena packed_gradients{count * sizeof(BFloat16)};
  DeviceArena partials{detail::square_partials<float>(count) * sizeof(double)};
  DeviceArena adamw{sizeof(detail::StepNumbers<AdamW>)};
  DeviceArena sgd{sizeof(detail::StepNumbers<SGD>)};
  DeviceArena found{sizeof(detail::AnomalyRecord)};  // zeroed, and its step 0: there is none
  detail::PinnedArena seen{sizeof(std::uint32_t)};
  DeviceArena loss{sizeof(double)};
  DeviceArena from{count * 14};
  DeviceArena to{count * 14};

  Arrays() {
    launch_fill(stream, from, 5);
    auto numbers = detail::step_numbers<AdamW>({}, 1e-3, 100, 1);
    numbers.watch = {reinterpret_cast<detail::AnomalyRecord*>(found.data()),
                     reinterpret_cast<std::uint32_t*>(seen.data()),
                     reinterpret_cast<const double*>(loss.data())};
    detail::launch_store(stream, adamw_numbers(), numbers);
    detail::launch_store(stream, sgd_numbers(), detail::step_numbers<SGD>({}, 1e-3, 100, 1));
    detail::launch_cast(stream, gradients.data(), bfloat16(packed_gradients), 1, count);
  }

  static BFloat16* bfloat16(const DeviceArena& arena) {
    return reinterpret_cast<BFloat16*>(arena.data());
  }
  detail::StepNumbers<AdamW>* adamw_numbers() const {
    return reinterpret_cast<detail::StepNumbers<AdamW>*>(adamw.data());
  }
  detail::StepNumbers<SGD>* sgd_numbers() const {
    return reinterpret_cast<detail::StepNumbers<SGD>*>(sgd.data());
  }

  /// As many bytes as Adam reads and writes.
  void copy() const {
    check_cuda(
        cudaMemcpyAsync(to.data(), from.data(), count * 14, cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
  }
  template <class Shape, std::size_t Count = dynamic, bool Watches = false>
  void update() const {
    detail::launch_update<AdamW, float, float, float, Count, Watches, Shape>(
        stream, adamw_numbers(), parameters.data(), gradients.data(),
        {means.data(), squares.data()}, nullptr, count);
  }
  void update_mixed() const {
    detail::launch_update<AdamW, float, BFloat16, BFloat16>(
        stream, adamw_numbers(), parameters.data(), bfloat16(packed_gradients),
        {means.data(), squares.data()}, bfloat16(packed), count);
  }
  void update_sgd() const {
    detail::launch_update<SGD>(stream, sgd_numbers(), parameters.data(), gradients.data(), {},
                               nullptr, count);
  }
  void pack() const { detail::launch_cast(stream, gradients.data(), bfloat16(packed), 0.5, count); }
  void unpack() const {
    detail::launch_cast(stream, bfloat16(packed_gradients), gradients.data(), 1, count);
  }
  void norm() const {
    detail::launch_squares(stream, gradients.data(), reinterpret_cast<double*>(partials.data()),
                           count);
  }
};

Times of_bytes(Times copy, double bytes) {
  const double share = bytes / adam_bytes;
  return {copy.known, copy.median * share, copy.minimum * share};
}

}  // namespace

std::vector<Comparison> compare_kernels() {
  const Arrays arrays;
  const auto times = race_on_device(
      arrays.stream, {
                         [&] { arrays.copy(); },
                         [&] { arrays.update<detail::UpdateShape>(); },
                         [&] { arrays.update_mixed(); },
                         [&] { arrays.update_sgd(); },
                         [&] { arrays.pack(); },
                         [&] { arrays.unpack(); },
                         [&] { arrays.norm(); },
                         [&] { arrays.update<detail::UpdateShape, dynamic, true>(); },
                     });
  const Times copy = times[0];
  const Times adamw = times[1];
  std::printf("copy bandwidth %.2f TB/s, fused AdamW %.2f TB/s\n",
              adam_bytes * count / copy.median * 1e-6, adam_bytes * count / adamw.median * 1e-6);
  const TorchTimes torch[] = {torch_adamw(1), torch_adamw(148), torch_adamw(2000)};
  return {
      {"fused AdamW, 124 M floats, share of copy bandwidth", adamw, copy, 0.92},
      {"same, bfloat16 with float masters", times[2], copy, 0},
      {"fused SGD", times[3], of_bytes(copy, 12), 0},
      {"pack float to bfloat16", times[4], of_bytes(copy, 6), 0},
      {"unpack bfloat16 to float", times[5], of_bytes(copy, 6), 0},
      {"norm of floats", times[6], of_bytes(copy, 4), 0},
      {"fused AdamW that looks for anomalies, against one that does not", times[7], adamw, 0},
      {"flat fused AdamW against torch fused, 1 tensor", adamw, torch[0].eager, 0},
      {"same, 148 tensors", adamw, torch[1].eager, 1.3},
      {"same, 2000 tensors", adamw, torch[2].eager, 8},
      {"same, torch in a CUDA graph, 1 tensor", adamw, torch[0].graph, 0},
      {"same, 148 tensors", adamw, torch[1].graph, 0},
      {"same, 2000 tensors", adamw, torch[2].graph, 0},
  };
}

namespace {

template <class Shape, std::size_t Count = dynamic>
void print_variant(const Arrays& arrays) {
  const auto times = race_on_device(
      arrays.stream, {[&] { arrays.copy(); }, [&] { arrays.update<Shape, Count>(); }}, 15);
  std::printf("| %u | %u | %s | %s | %.1f | %.3f (minima %.3f) |\n", Shape::threads, Shape::packets,
              Shape::once == detail::Caching::stream ? "streamed" : "cached",
              Count == dynamic ? "dynamic" : "static", times[1].median,
              times[0].median / times[1].median, times[0].minimum / times[1].minimum);
}

}  // namespace

void print_update_variants() {
  const Arrays arrays;
  std::printf(
      "| threads | packets | states | count | median us | share of copy bandwidth |\n"
      "|---|---|---|---|---|---|\n");
  print_variant<detail::PassShape<128, 1>>(arrays);
  print_variant<detail::PassShape<128, 1, true>>(arrays);
  print_variant<detail::PassShape<128, 2>>(arrays);
  print_variant<detail::PassShape<128, 2, true>>(arrays);
  print_variant<detail::PassShape<256, 1>>(arrays);
  print_variant<detail::PassShape<256, 1, true>>(arrays);
  print_variant<detail::PassShape<256, 2>>(arrays);
  print_variant<detail::PassShape<256, 2, true>>(arrays);
  print_variant<detail::PassShape<256, 4>>(arrays);
  print_variant<detail::PassShape<256, 4, true>>(arrays);
  print_variant<detail::PassShape<512, 1>>(arrays);
  print_variant<detail::PassShape<512, 1, true>>(arrays);
  print_variant<detail::PassShape<512, 2>>(arrays);
  print_variant<detail::PassShape<512, 2, true>>(arrays);
  print_variant<detail::PassShape<1024, 1>>(arrays);
  print_variant<detail::PassShape<1024, 1, true>>(arrays);
  print_variant<detail::UpdateShape, count>(arrays);
}

}  // namespace bench
