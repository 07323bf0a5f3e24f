// SPDX-License-Identifier: Apache-2.0
// Kinds of jobs on GPUs, which the host plays: as job.cpp, for tests/soak/run.
#include "gpu/emulated/kernels.hpp"
//
#include <cstdio>
#include <string>

#include "gpu/plain_mlp.cuh"
#include "lockstep/gloo.cuh"
#include "soak/plain.hpp"

namespace soak {

/// The reference network on GPUs, of a drawn shape.
struct OnGpu : train::GpuPlainMlp<double, dynamic, dynamic, dynamic> {
  OnGpu() = default;
  explicit OnGpu(const Drawn& drawn) {
    in = drawn.shape.front();
    hidden = drawn.shape.at(1);
    out = drawn.shape.back();
  }
  OnGpu replicate() const {
    OnGpu other;
    copy_settings(other);
    return other;
  }
};

/// Its twin in one process.
struct Twin : train::PlainMlp<dynamic, dynamic, dynamic> {
  explicit Twin(const Drawn& drawn) {
    in = drawn.shape.front();
    hidden = drawn.shape.at(1);
    out = drawn.shape.back();
  }
  static void fill(std::string_view, std::size_t p, std::span<double> values) {
    for (std::size_t i = 0; i != values.size(); ++i)
      values[i] = train::wave(i, static_cast<double>(p + 1), 0.2);
  }
  double forward(auto& step, const auto& batch) {
    samples.inputs = in;
    samples.x = batch.inputs;
    samples.y.assign(batch.labels.begin(), batch.labels.end());
    return PlainMlp::forward(step, samples);
  }
  void backward(auto& step, const auto&) { PlainMlp::backward(step, samples); }

  train::Samples samples;
};

/// Copies of device memory.
struct DeviceElements {
  template <class View>
  static auto of(const View& view) {
    std::vector<typename View::value_type> values(view.size());
    check_cuda(cudaMemcpy(values.data(), view.data_handle(), view.size() * sizeof(values[0]),
                          cudaMemcpyDefault),
               "cudaMemcpy");
    return values;
  }
};

template <>
struct About<OnGpu> {
  using Net = PlainDeclared<Twin>;
  using From = DeviceElements;
  static Samples<double, std::int32_t> samples(const Drawn& drawn) {
    return {drawn.samples, drawn.shape.front(), drawn.shape.back()};
  }
};

}  // namespace soak

int main(int argc, char** argv) {
  using namespace soak;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  emulated::host.gpus = 4;
  Kinds kinds{argc, argv};
  kinds.kind<OnGpu, Device<Cuda>, ParallelStrategy<DP>, CapturedStep, Optimizer<AdamW>>("gpu_dp");
  kinds.kind<OnGpu, Device<Cuda>, Backend<Shm>, Optimizer<SGDMomentum>, Accumulate<2>,
             Buckets<BucketLimits{64, 256}>>("gpu_threads");
  kinds.kind<OnGpu, Device<Cuda>, Backend<Gloo>, Sharding<ZeroRedundancy>, Optimizer<AdamW>>(
      "gpu_gloo");
  int status = kinds.status.value_or(2);
  for (const std::string& fault : emulated::take_faults()) {
    std::fprintf(stderr, "emulated CUDA: %s\n", fault.c_str());
    status = 1;
  }
  return status;
}
