// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a job on a GPU: GPT-2's tensors, trained in bfloat16 with float masters, its step
// one CUDA graph. Saving and loading against torch.save and torch.load, Python's safetensors and a
// plain write + fsync; and how long steps wait for an asynchronous save, against the copy alone.
//
//   bench_checkpoint_gpu [--width 768] [--rounds 7] [--folder build/bench]
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "files.hpp"
#include "load.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/lockstep.cuh"
#include "measure.hpp"
#include "model.hpp"
#include "options.hpp"
#include "peer.hpp"
#include "rounds.hpp"

namespace {

using namespace bench;

/// Gradients are what they are in memory; only what is kept counts here.
struct GpuGpt : Gpt {
  void forward(auto& step, int) {
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
};

using Ddp = DistributedDataParallel<GpuGpt, Device<Cuda>, World<1>, Optimizer<AdamW>,
                                    Precision<Mixed<BFloat16>>, CapturedStep>;

class Bench {
 public:
  explicit Bench(const BenchOptions& options)
      : options_(options),
        bytes_(12 * Gpt{options.width}.elements()),
        host_(bytes_),
        device_(bytes_),
        python_(options.width, "cuda"),
        folder_(options.folder) {
    for (int i = 0; i != 3; ++i) ddp_.step(0);  // the step is captured
    comm_.synchronize();
    std::printf("%.1f M parameters with AdamW's states and float masters, %.0f MB; %s\n\n",
                static_cast<double>(bytes_) / 12e6, static_cast<double>(bytes_) / 1e6,
                python_.text().c_str());
  }

  void run() {
    RatioTable table(static_cast<double>(bytes_) / (1 << 20));
    saving(table);
    loading(table);
    stalling(table);
    table.write("checkpoint_gpu");
  }

 private:
  Turn own(const std::string& name, const std::string& file, auto run) {
    return {name, [run] { return seconds_of(run); },
            [this, file] { std::filesystem::remove(folder_.file(file)); }};
  }
  Turn by_python(const std::string& command, const std::string& file, bool writes) {
    return {command, [=, this] { return python_.run(command, folder_.file(file)); },
            [=, this] {
              if (writes) std::filesystem::remove(folder_.file(file));
            }};
  }

  void saving(RatioTable& table) {
    std::vector<Turn> turns = {
        own("own", "own", [this] { save(ddp_, folder_.file("own")); }),
        own("plain", "plain", [this] { write_plainly(folder_.file("plain"), bytes()); }),
    };
    if (python_.has_torch()) {
      turns.push_back(by_python("save_torch", "torch", true));
      turns.push_back(by_python("save_torch_synced", "torch", true));
    }
    if (python_.has_safetensors())
      turns.push_back(by_python("save_safetensors_synced", "python", true));
    Results t = take_turns(turns, options_.rounds);
    table.row("save against write + fsync of as many bytes", t["own"], t["plain"], 0.9);
    table.row("save against torch.save + fsync", t["own"], t["save_torch_synced"], 1.5);
    table.row("save against torch.save, which leaves it in memory", t["own"], t["save_torch"], 1.5);
    table.row("save against safetensors.save_file + fsync", t["own"], t["save_safetensors_synced"],
              0);
  }

  void loading(RatioTable& table) {
    std::vector<Turn> turns = {{"own", [this] {
                                  return seconds_of([this] {
                                    load(ddp_, folder_.file("own"));
                                    comm_.synchronize();
                                  });
                                }}};
    if (python_.has_torch()) {
      turns.push_back(by_python("load_torch", "torch", false));
      turns.push_back(by_python("load_torch_into_job", "torch", false));
    }
    if (python_.has_safetensors())
      turns.push_back(by_python("load_safetensors_into_job", "python", false));
    Results t = take_turns(turns, options_.rounds);
    table.row("load against torch.load", t["own"], t["load_torch"], 2);
    table.row("load against torch.load + load_state_dict", t["own"], t["load_torch_into_job"], 0);
    table.row("load against safetensors.load_file + copy", t["own"], t["load_safetensors_into_job"],
              0);
  }

  /// Seconds until the device has done `count` steps, with a save between the first two if wanted.
  double steps(int count, bool saves) {
    comm_.synchronize();
    return seconds_of([&] {
      ddp_.step(0);
      if (saves) saver_.save(ddp_, folder_.file("own"), {.asynchronous = true});
      for (int i = 1; i != count; ++i) ddp_.step(0);
      comm_.synchronize();
    });
  }

  void stalling(RatioTable& table) {
    constexpr int count = 20;
    std::vector<Turn> turns = {
        {"copy",
         [this] {
           return seconds_of([this] {
             check_cuda(cudaMemcpyAsync(host_.data(), device_.data(), bytes_,
                                        cudaMemcpyDeviceToHost, comm_.gpu().stream()),
                        "cudaMemcpyAsync");
             comm_.synchronize();
           });
         }},
        {"steps", [this] { return steps(count, false); }},
        {"saved steps", [this] {
           const double seconds = steps(count, true);
           saver_.finish(ddp_);
           return seconds;
         }}};
    if (python_.has_torch()) turns.push_back(by_python("copy_to_host", "none", false));
    Results t = take_turns(turns, options_.rounds);
    const auto less = [](Times a, Times b) {
      return Times{true, a.median - b.median, a.minimum - b.minimum};
    };
    const Times stall = less(t["saved steps"], t["steps"]);
    table.row("steps wait for an asynchronous save, over the copy alone", stall, t["copy"], 1.15,
              true);
    table.row("same, over PyTorch's copies into pinned memory", stall, t["copy_to_host"], 0, true);
  }

  std::span<const std::byte> bytes() const { return {host_.data(), bytes_}; }

  BenchOptions options_;
  CudaLoopbackCommunicator comm_{std::make_shared<Gpu>(Rank{0}, 0)};
  Ddp ddp_{comm_, GpuGpt{{options_.width}}};
  Saver saver_;
  std::size_t bytes_;
  detail::PinnedArena host_;
  DeviceArena device_;
  SavingPeer python_;
  ContestantFiles folder_;
};

}  // namespace

int main(int argc, char** argv) try {
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench checkpoint: there is no GPU here\n");
    return 1;
  }
  const OthersLoad others;
  Bench(parse_options(argc, argv)).run();
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench checkpoint: %s\n", error.what());
  return 1;
}
