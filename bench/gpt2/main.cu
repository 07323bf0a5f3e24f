// SPDX-License-Identifier: Apache-2.0
// A training step of GPT-2 124M with AdamW on one GPU: the model of examples/gpt2, as one CUDA
// graph, against PyTorch's DDP of the same model, in one run. Also tokens a second, the share of
// the GPU's peak, and memory.
//
//   bench_gpt2 [WINDOWS...]         batches of so many windows of 1,024 tokens: 16 4 8 32 64
//   ncu --profile-from-start off --clock-control none --metrics gpu__time_duration.sum
//     bench_gpt2 --profile 16       the kernels of one step, call by call
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "comparison_table.hpp"
#include "device_memory.cuh"
#include "gpt2/gpt2.cuh"
#include "load.hpp"
#include "measure.hpp"
#include "torch_lines.hpp"

namespace bench {
namespace {

using namespace lockstep;
using Model = gpt2::Gpt2<>;
using Batch = DeviceBatch<std::uint16_t, std::int32_t>;

/// As in docs/benchmarks.md: the products with weights, forward and back, and those of attention
/// without regard to the places that the mask leaves out.
constexpr double operations_per_token = 6 * 123.69e6 + 12.0 * 12 * 768 * 1024;
constexpr double peak = 989.5e12;  // of bfloat16, dense: the maker's figure for H100 and H200

/// Random windows on the GPU.
class Tokens {
 public:
  explicit Tokens(std::size_t windows)
      : windows_(windows),
        tokens_(windows * (Model::context + 1)),
        labels_(windows),
        weights_(windows) {
    RandomStream random(Seed{1});
    std::vector<std::uint16_t> tokens(windows * (Model::context + 1));
    for (auto& token : tokens) token = static_cast<std::uint16_t>(random.below(Model::vocabulary));
    const std::vector<float> weights(windows, 1.f);
    copy(tokens, tokens_);
    copy(weights, weights_);
  }
  Batch batch() const { return {tokens_, labels_, weights_, windows_, Model::context + 1}; }

 private:
  template <class T>
  static void copy(const std::vector<T>& from, const DeviceArray<T>& to) {
    check_cuda(cudaMemcpy(+to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }

  std::size_t windows_;
  DeviceArray<std::uint16_t> tokens_;
  DeviceArray<std::int32_t> labels_;
  DeviceArray<float> weights_;
};

template <class... Policies>
using Ddp = DistributedDataParallel<Model, Device<Cuda>, World<1>, Optimizer<AdamW>,
                                    Precision<Mixed<BFloat16>>, Policies...>;

/// Microseconds a step, by turns of twenty.
template <class D>
void measure(D& ddp, CudaLoopbackCommunicator& comm, const Batch& batch, int turns,
             std::vector<double>& times) {
  constexpr int steps = 20;
  for (int turn = 0; turn != turns; ++turn) {
    for (int i = 0; i != 5; ++i) ddp.step(batch);
    comm.synchronize();
    const auto start = Clock::now();
    for (int i = 0; i != steps; ++i) ddp.step(batch);
    comm.synchronize();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count() /
                    steps);
  }
}

struct Peer {
  Times step{};
  double bytes = 0;
};
/// PyTorch's ways, from its own process, which ends before ours goes on.
std::map<std::string, Peer> torch_peers(std::size_t windows, const std::string& ways) {
  std::map<std::string, Peer> peers;
  each_torch_line("python3 " LOCKSTEP_SOURCE_DIR "/bench/torch/gpu.py gpt2 " +
                      std::to_string(windows) + " " + ways,
                  240, "step", [&](const nlohmann::json& read) {
                    const auto& wall = read["wall"];
                    peers[read["way"]] = {{true, wall["median"], wall["minimum"]}, read["bytes"]};
                  });
  return peers;
}

void compare(std::size_t windows, ComparisonTable& table, std::string& figures) {
  const std::string ways = windows == 16 ? "eager graph compile compile_loss" : "compile_loss";
  std::vector<double> times;
  double bytes = 0;
  std::map<std::string, Peer> peers;
  {
    const double before = used_bytes();
    CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
    const std::string algorithms = Model::choose(windows);
    const Tokens tokens(windows);
    Ddp<CapturedStep> ddp(comm, [&] { return Model(algorithms); });
    ddp.optimizer().lr = 1e-4;
    measure(ddp, comm, tokens.batch(), 4, times);
    bytes = used_bytes() - before;
    peers = torch_peers(windows, ways);
    measure(ddp, comm, tokens.batch(), 4, times);
  }
  const Times own = summary(times);
  const std::map<std::string, std::pair<std::string, double>> names = {
      {"eager", {"DDP eager", 0}},
      {"graph", {"DDP in a CUDA graph", 0}},
      {"compile", {"DDP, torch.compile", 1.25}},
      {"compile_loss", {"DDP, torch.compile with the loss", windows == 16 ? 1.25 : 0}}};
  for (const auto& [way, peer] : peers)
    table.row(std::to_string(windows) + " x 1,024 tokens against PyTorch " + names.at(way).first,
              own, peer.step, names.at(way).second);
  const auto line = [&](const std::string& who, const Times& step, double taken) {
    const double tokens = 1e6 * static_cast<double>(windows * Model::context) / step.median;
    char text[160];
    std::snprintf(text, sizeof text, "| %zu | %s | %.2f | %.0f | %.1f%% | %.1f |\n", windows,
                  who.c_str(), step.median / 1000, tokens,
                  100 * tokens * operations_per_token / peak, taken / (1 << 30));
    figures += text;
  };
  line("lockstep", own, bytes);
  for (const auto& [way, peer] : peers)
    line("PyTorch " + names.at(way).first, peer.step, peer.bytes);
}

void profile(std::size_t windows) {
  CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
  const std::string algorithms = Model::choose(windows);
  const Tokens tokens(windows);
  Ddp<> ddp(comm, [&] { return Model(algorithms); });
  const Batch batch = tokens.batch();
  for (int i = 0; i != 2; ++i) ddp.step(batch);
  comm.synchronize();
  check_cuda(cudaProfilerStart(), "cudaProfilerStart");
  ddp.step(batch);
  comm.synchronize();
  check_cuda(cudaProfilerStop(), "cudaProfilerStop");
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) try {
  using namespace bench;
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench gpt2: there is no GPU here\n");
    return 1;
  }
  if (argc > 2 && std::string_view(argv[1]) == "--profile") {
    profile(std::stoul(argv[2]));
    return 0;
  }
  const OthersLoad others;
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::stoul(argv[i]));
  if (sizes.empty()) sizes = {16, 4, 8, 32, 64};
  ComparisonTable table;
  std::string figures;
  for (const std::size_t windows : sizes) compare(windows, table, figures);
  table.write("gpt2");
  std::printf(
      "\n| windows | | ms a step | tokens a second | of the peak | GiB "
      "|\n|---|---|---|---|---|---|\n%s",
      figures.c_str());
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench gpt2: %s\n", error.what());
  return 1;
}
