// SPDX-License-Identifier: Apache-2.0
// Example 01 on GPUs, through NCCL: a linear model, a hand-written loop, and a line every ten
// batches. What differs is the process group, `Device<Cuda>`, and that the model enqueues kernels.
//
//   ./minimal_ddp_gpu --ranks 8                          on eight GPUs
//   LOCKSTEP_SHARE_GPUS=1 ./minimal_ddp_gpu --ranks 2    two ranks, even on one GPU
//   torchrun --no-python --nproc-per-node 8 ./minimal_ddp_gpu
#include <cstdio>
#include <optional>
#include <vector>

#include "lockstep/nccl.cuh"

using namespace lockstep;

namespace {

constexpr unsigned width = 10;

// Kernels know numbers and pointers only: nvcc cannot write a parameter's name into their stubs.

/// One thread for each row.
__global__ void linear_forward(const float* weight, const float* bias, const float* x,
                               const float* y, float* errors, unsigned rows) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows) return;
  errors[i] = *bias - y[i];
  for (unsigned j = 0; j < width; ++j) errors[i] += weight[j] * x[i * width + j];
}

/// One thread, which adds up in the same order every time.
__global__ void mean_square(const float* errors, double* loss, unsigned rows) {
  double sum = 0;
  for (unsigned i = 0; i < rows; ++i) sum += errors[i] * errors[i];
  *loss = sum / rows;
}

/// One thread for each weight, and a last one for the bias.
__global__ void linear_backward(const float* x, const float* errors, float* weight, float* bias,
                                unsigned rows) {
  const unsigned j = threadIdx.x;
  float sum = 0;
  for (unsigned i = 0; i < rows; ++i) sum += errors[i] * (j < width ? x[i * width + j] : 1);
  (j < width ? weight[j] : *bias) = 2 * sum / rows;
}

/// torch.nn.Linear(10, 1) and torch.nn.MSELoss(). All memory is the GPU's.
struct Linear {
  using Parameters =
      ParameterList<Parameter<"weight", float, 1, width>, Parameter<"bias", float, 1>>;

  void forward(auto& step, const DeviceBatch<float, float>& batch) {
    const auto rows = static_cast<unsigned>(batch.size());
    if (!errors || errors->bytes() < rows * sizeof(float)) errors.emplace(rows * sizeof(float));
    linear_forward<<<(rows + 127) / 128, 128, 0, step.stream()>>>(
        step.param("weight"_p).data_handle(), step.param("bias"_p).data_handle(), batch.inputs,
        batch.labels, error_of_rows(), rows);
    mean_square<<<1, 1, 0, step.stream()>>>(error_of_rows(), step.loss(), rows);
  }

  void backward(auto& step, const DeviceBatch<float, float>& batch) {
    linear_backward<<<1, width + 1, 0, step.stream()>>>(
        batch.inputs, error_of_rows(), step.grad("weight"_p).data_handle(),
        step.grad("bias"_p).data_handle(), static_cast<unsigned>(batch.size()));
    step.ready("bias"_p);  // once the kernel has run: what follows is ordered by the stream
    step.ready("weight"_p);
  }

  float* error_of_rows() const { return reinterpret_cast<float*>(errors->data()); }

  std::optional<DeviceArena> errors;  // kept by forward for backward
};

InMemoryDataset<float, float> make_samples() {
  RandomStream random(Seed{0});
  std::vector<float> x(1000 * width);
  std::vector<float> y(1000);
  for (float& value : x) value = static_cast<float>(random.normal());
  for (std::size_t i = 0; i < y.size(); ++i) {
    for (std::size_t j = 0; j < width; ++j) y[i] += static_cast<float>(j) * x[width * i + j] / 10;
  }
  return {std::move(x), std::move(y)};
}

void train(Session& session) {                 // PyTorch:
  ProcessGroup<Backend<Nccl>> group(session);  // init_process_group("nccl")
  const auto dataset = make_samples();
  DistributedSampler<> sampler(dataset.size(), group.world_size(), group.rank());
  DataLoader loader(dataset, sampler, {.batch_size = 4});
  DistributedDataParallel<Linear, Device<Cuda>, Backend<Nccl>, Optimizer<SGD>> ddp(*group);
  ddp.optimizer().lr = 0.02;

  for (std::uint64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(Epoch{epoch});
    std::size_t batches = 0;
    for (const auto& batch : loader) {
      const auto loss = ddp.forward(batch).backward().reduce().update();
      if (++batches % 10 == 0 && group.rank() == Rank{0}) {  // reading a loss waits for the GPU
        std::printf("epoch %d, batch %zu of %zu: loss %.6f\n", static_cast<int>(epoch), batches,
                    loader.size(), static_cast<double>(loss));
      }
    }
  }
  group->barrier();
}

}  // namespace

int main(int argc, char** argv) { return launch(argc, argv, train); }
