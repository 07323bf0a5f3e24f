// SPDX-License-Identifier: Apache-2.0
// Two ranks that are threads and share one GPU, with AdamW: states on every rank (Replicated)
// against states once over both (ZeroRedundancy), call by call and as a CUDA graph; and the GPU
// memory that each takes of a rank. There is no peer: PyTorch's ranks are processes, and NCCL does
// not let two of them share a GPU.
//
//   bench_zero_gpu
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comparison_table.hpp"
#include "device_memory.cuh"
#include "load.hpp"
#include "measure.hpp"
#include "resident.cuh"
#include "thread_ranks.cuh"

namespace {

using namespace bench;

constexpr std::size_t ranks = 2;
using Comm = ThreadCommunicator<ranks>;

/// The network of the other benchmarks, and one of 34 million parameters in six buckets.
struct Small {
  using Model = GpuMlp<float, 784, 512, 10>;
  static constexpr const char* name = "784-512-512-10, batch 64";
  static constexpr std::size_t rows = 64, inputs = 784;
  static constexpr int steps = 500;
};
struct Large {
  using Model = GpuMlp<float, 4096, 4096, 10>;
  static constexpr const char* name = "4096-4096-4096-10, batch 256";
  static constexpr std::size_t rows = 256, inputs = 4096;
  static constexpr int steps = 20;
};

/// What is known of a way to train when it has run.
struct Seen {
  std::string name;
  Times step{};
  std::array<double, ranks> state_bytes{};
  double mebibytes = 0;  // of a rank
};

/// The ways of one rank; what is seen of them is rank 0's to write.
template <class Network>
class Ways {
 public:
  Ways(Comm& comm, std::vector<Seen>& seen) : comm_(comm), seen_(seen) {}

  template <class... Policies>
  void add(const std::string& name) {
    using Job = DistributedDataParallel<typename Network::Model, Device<Cuda>, Backend<Shm>,
                                        World<ranks>, Optimizer<AdamW>, Policies...>;
    const double before = settled_memory();
    auto job = std::make_shared<Job>(comm_);
    for (int i = 0; i < 10; ++i) job->step(batch_);  // plans are made, the step is captured
    const double after = settled_memory();
    if (comm_.rank() == Rank{0}) {
      seen_.push_back({name, {}, {}, (after - before) / static_cast<double>(ranks)});
    }
    comm_.barrier();
    seen_.back().state_bytes[comm_.rank().value()] = static_cast<double>(job->state_bytes());
    comm_.barrier();
    steps_.push_back([this, job](int count) {
      for (int i = 0; i < count; ++i) job->step(batch_);
    });
  }

  void race() {
    const std::vector<Times> times = bench::race(comm_, steps_, Network::steps);
    if (comm_.rank() != Rank{0}) return;
    for (std::size_t w = 0; w != times.size(); ++w) seen_[w].step = times[w];
  }

 private:
  double settled_memory() {
    settle(comm_);
    const double used = used_mebibytes();
    comm_.barrier();
    return used;
  }

  Comm& comm_;
  std::vector<Seen>& seen_;
  const Resident data_{Network::rows, Network::inputs, 10};
  const DeviceBatch<float, std::int32_t> batch_ = data_.batch();
  std::vector<std::function<void(int)>> steps_;
};

template <class Network>
std::vector<Seen> measure() {
  std::vector<Seen> seen;
  on_ranks<ranks>([&](Comm& comm) {
    Ways<Network> ways(comm, seen);
    ways.template add<Sharding<Replicated>>("Replicated");
    ways.template add<Sharding<Replicated>, CapturedStep>("Replicated, graph");
    ways.template add<Sharding<ZeroRedundancy>>("ZeroRedundancy");
    ways.template add<Sharding<ZeroRedundancy>, CapturedStep>("ZeroRedundancy, graph");
    ways.template add<Sharding<ZeroRedundancy, Gradients>>("ZeroRedundancy, Gradients");
    ways.race();
  });
  return seen;
}

template <class Network>
void compare(ComparisonTable& table, std::vector<Seen>& all) {
  std::vector<Seen> seen = measure<Network>();
  const auto find = [&](const std::string& name) -> Times {
    for (const Seen& way : seen)
      if (way.name == name) return way.step;
    return {};
  };
  for (const Seen& way : seen) {
    if (!way.name.starts_with("ZeroRedundancy")) continue;
    const bool graph = way.name.ends_with(", graph");
    const std::string peer = graph ? "Replicated, graph" : "Replicated";
    table.row(std::string(Network::name) + ": " + way.name + " against " + peer, way.step,
              find(peer), 0);
  }
  for (Seen& way : seen) {
    way.name = std::string(Network::name) + ": " + way.name;
    all.push_back(std::move(way));
  }
}

}  // namespace

int main() try {
  if (lockstep::detail::visible_gpus() == 0) {
    std::fprintf(stderr, "bench zero: there is no GPU here\n");
    return 1;
  }
  const OthersLoad others;
  std::printf("a step with AdamW on %zu ranks, threads that share one GPU; microseconds\n\n",
              ranks);
  ComparisonTable table;
  std::vector<Seen> all;
  compare<Small>(table, all);
  compare<Large>(table, all);
  std::printf(
      "\n| | bytes of states, rank 0 | rank 1 | of Replicated's | a rank's GPU memory, MiB |\n"
      "|---|---|---|---|---|\n");
  double whole = 0;
  for (const Seen& way : all) {
    const double most = std::max(way.state_bytes[0], way.state_bytes[1]);
    if (way.name.ends_with(": Replicated")) whole = most;
    std::printf("| %s | %.0f | %.0f | %.4f | %.1f |\n", way.name.c_str(), way.state_bytes[0],
                way.state_bytes[1], most / whole, way.mebibytes);
    table.add({{"measure", way.name + ", states"},
               {"bytes", most},
               {"of_replicated", most / whole},
               {"mebibytes", way.mebibytes}});
  }
  table.write("zero_gpu");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench zero: %s\n", error.what());
  return 1;
}
