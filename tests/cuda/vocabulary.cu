// SPDX-License-Identifier: Apache-2.0
// The library's vocabulary in device code: static views, 16-bit conversions and reduce operations
// give the same bits as on the host.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 4, 8>, Parameter<"b", Half, 5>>;
};
using Job = detail::Composed<Net, Device<Cuda>, World<2>>;

void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", call, cudaGetErrorString(error));
  std::exit(1);
}

/// Kernels take element types, sizes and views; never a name (nvcc cannot spell it in a host stub).
template <class View>
__global__ void fill(View view) {
  const auto i = threadIdx.x;
  const auto j = threadIdx.y;
  view(i, j) = static_cast<float>(i * 100 + j);
}

__global__ void convert(const float* in, Half* halves, BFloat16* brains, float* sums, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  halves[i] = Half(in[i]);
  brains[i] = BFloat16(in[i]);
  const Sum sum;
  sums[i] = static_cast<float>(sum.finish<Half>(sum.combine(sum.prepare(halves[i]), 1.0f), 2));
}

bool fills_through_a_view() {
  std::byte* arena = nullptr;
  const std::size_t bytes = Job::layout::plan().bytes;
  check_cuda(cudaMalloc(&arena, bytes), "cudaMalloc");
  check_cuda(cudaMemset(arena, 0, bytes), "cudaMemset");
  const Job::bare_step step(Net{}, {arena, arena});
  const auto view = step.grad("w"_p);
  static_assert(std::is_same_v<decltype(view), const DeviceView<float, 4, 8>>);
  fill<<<1, dim3(4, 8)>>>(view);
  check_cuda(cudaGetLastError(), "fill");
  std::vector<float> host(view.size());
  check_cuda(
      cudaMemcpy(host.data(), view.data_handle(), host.size() * sizeof(float), cudaMemcpyDefault),
      "cudaMemcpy");
  check_cuda(cudaFree(arena), "cudaFree");
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      if (host[i * 8 + j] != static_cast<float>(i * 100 + j)) return false;
    }
  }
  return true;
}

bool converts_as_the_host_does() {
  constexpr int n = 1 << 20;
  std::vector<float> in(n);
  for (int i = 0; i < n; ++i) {  // every exponent, many mantissas, NaN and infinity among them
    const unsigned bits = static_cast<unsigned>(i) * 4099u;
    std::memcpy(&in[i], &bits, 4);
  }
  float *device_in, *sums;
  Half* halves;
  BFloat16* brains;
  check_cuda(cudaMalloc(&device_in, n * 4), "cudaMalloc");
  check_cuda(cudaMalloc(&sums, n * 4), "cudaMalloc");
  check_cuda(cudaMalloc(&halves, n * 2), "cudaMalloc");
  check_cuda(cudaMalloc(&brains, n * 2), "cudaMalloc");
  check_cuda(cudaMemcpy(device_in, in.data(), n * 4, cudaMemcpyDefault), "cudaMemcpy");
  convert<<<n / 256, 256>>>(device_in, halves, brains, sums, n);
  check_cuda(cudaGetLastError(), "convert");
  std::vector<Half> host_halves(n);
  std::vector<BFloat16> host_brains(n);
  check_cuda(cudaMemcpy(host_halves.data(), halves, n * 2, cudaMemcpyDefault), "cudaMemcpy");
  check_cuda(cudaMemcpy(host_brains.data(), brains, n * 2, cudaMemcpyDefault), "cudaMemcpy");
  for (void* pointer : {static_cast<void*>(device_in), static_cast<void*>(sums),
                        static_cast<void*>(halves), static_cast<void*>(brains)}) {
    check_cuda(cudaFree(pointer), "cudaFree");
  }
  for (int i = 0; i < n; ++i) {
    if (host_halves[i].bits() != Half(in[i]).bits()) return false;
    if (host_brains[i].bits() != BFloat16(in[i]).bits()) return false;
  }
  return true;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const bool filled = fills_through_a_view();
  const bool converted = converts_as_the_host_does();
  std::printf("views %s, conversions %s\n", filled ? "right" : "WRONG",
              converted ? "right" : "WRONG");
  return filled && converted ? 0 : 1;
}
