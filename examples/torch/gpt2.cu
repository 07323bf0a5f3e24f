// SPDX-License-Identifier: Apache-2.0
// GPT-2 124M, a LibTorch module, trained on all GPUs: forward and backward passes, the exchange of
// gradients and AdamW's update are one CUDA graph. Tokens are 16-bit numbers in a file, as nanoGPT
// and llm.c write them; without one, noise is learned, which shows the speed.
//
//   ./gpt2 --ranks 8 --tokens train.bin  eight GPUs, 16 windows of 1024 tokens for each in a step
//   ./gpt2 --ranks 1 --steps 30          30 steps of noise
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "lockstep/data.hpp"
#include "lockstep/nccl.cuh"
#include "lockstep/torch.cuh"
#include "torch/gpt2.hpp"

using namespace lockstep;

namespace {

constexpr std::size_t windows = 16, length = 1024;

struct Model : TorchModel<Model, gpt2::Gpt2> {
  torch::Tensor loss(const TensorBatch& batch) {
    const Autocast in_bf16(at::kCUDA);
    return module().loss(batch.inputs, batch.labels);
  }
};

using Job = Trainer<Model, ParallelStrategy<DDP>, Backend<Nccl>, Device<Cuda>, Optimizer<AdamW>,
                    Schedule<Cosine>, Clip<1>, CapturedStep>;

/// Windows as the module reads them, and shifted by one as it should predict them.
TensorBatch as_ids(const TokenBatch<std::uint16_t>& batch) {
  const auto rows = static_cast<std::int64_t>(batch.size());
  const auto columns = static_cast<std::int64_t>(batch.length);
  const at::Tensor all = as_tensor(batch.tokens).to(at::kLong).view({rows, columns + 1});
  return {all.narrow(1, 0, columns), all.narrow(1, 1, columns), batch.weights};
}

/// A file of random tokens.
std::string write_noise(std::size_t steps, std::size_t ranks) {
  const std::string path = "/tmp/lockstep-gpt2-noise.bin";
  std::vector<std::uint16_t> tokens(steps * ranks * windows * length + 1);
  RandomStream random(Seed{1});
  for (auto& token : tokens) token = static_cast<std::uint16_t>(random.below(50257));
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()),
             static_cast<std::streamsize>(tokens.size() * sizeof(tokens[0])));
  return path;
}

void train(Session& session) {
  const auto given = session.option("tokens", "noise", "a file of tokens of 16 bits");
  const std::size_t steps = session.option("steps", 100u, "updates");
  ::torch::manual_seed(1);
  Job job(session);
  job.optimizer().lr = 6e-4;
  job.optimizer().weight_decay = 0.1;
  if (given == "noise" && session.rank() == Rank{0}) write_noise(steps, session.world().value());
  job.barrier();
  const TokenDataset<std::uint16_t> data(given == "noise" ? "/tmp/lockstep-gpt2-noise.bin" : given,
                                         length, {.vocabulary = 50257});
  auto begin = std::chrono::steady_clock::now();
  std::size_t step = 0;
  for (auto epoch : job.epochs(1)) {
    for (const auto& batch : epoch.batches(data, windows)) {
      const auto loss = job.step(as_ids(batch));
      if (++step % 10 != 0 && step != steps) continue;
      const double value = loss;  // waits for the GPU
      const auto now = std::chrono::steady_clock::now();
      const double seconds = std::chrono::duration<double>(now - begin).count();
      begin = now;
      if (session.rank() == Rank{0})
        std::printf("step %zu, loss %.4f, %.1f ms a step\n", step, value, 100 * seconds);
      if (step == steps) return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) { return launch(argc, argv, train); }
