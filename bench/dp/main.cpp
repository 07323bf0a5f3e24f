// SPDX-License-Identifier: Apache-2.0
// One step of the same global batch: DP with 1, 2, 4 and, where there are as many cores, 8
// replicas, the loss on replicas or of all outputs, against DDP with as many ranks, against the
// bare model, and against PyTorch, whose DataParallel is the module itself where there is no GPU
// (bench/gpu/dp.cu has the other, and
// `./x bench dp` runs it where one is). And the memory that each takes.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "load.hpp"
#include "measure.hpp"
#include "memory.hpp"
#include "mlp.hpp"
#include "models.hpp"
#include "torch_lines.hpp"

namespace {

using namespace bench;
using Network = Mlp<float, 784, 256, 10>;
using Batch = LabelledBatch<float, int>;

constexpr std::chrono::seconds time_limit{600};
constexpr std::size_t global_batch = 128;

/// What a way to train costs: time, and memory of all its processes.
struct Cost {
  Times step;
  double mebibytes;
};

struct Common {
  Track track;
  Times times;
  double mebibytes[most_ranks];
};

/// `make(rank)` gives something that steps; its ranks are processes.
Cost measure(std::size_t ranks, Clock::time_point deadline, const auto& make) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  run_ranks(ranks, deadline, [&](std::size_t rank) {
    const Batch batch = random_batch<float, int>(global_batch / ranks, 784, 10);
    Stand stand(common.track, rank, ranks);
    stand.barrier();
    const double before = own_mebibytes();
    const auto job = make(rank);
    for (int i = 0; i < 3; ++i) job->step(batch);
    stand.barrier();  // pages are shared by now
    common.mebibytes[rank] = own_mebibytes() - before;
    const auto times = stand.race({{"",
                                    {},
                                    [&](std::size_t, std::size_t iterations) {
                                      for (std::size_t i = 0; i < iterations; ++i) job->step(batch);
                                    }}},
                                  0);
    if (rank == 0) common.times = summary(times[0]);
  });
  Cost cost{common.times, 0};
  for (std::size_t r = 0; r < ranks; ++r) cost.mebibytes += common.mebibytes[r];
  return cost;
}

/// One process, without communicator or workers.
struct Bare {
  LoopbackCommunicator comm;
  DistributedDataParallel<Network, World<1>> ddp{comm};
  void step(const Batch& batch) { ddp.step(batch); }
};

struct OneRank {
  ShmCommunicator<> comm;
  DistributedDataParallel<Network> ddp{comm};
  OneRank(std::size_t rank, std::size_t ranks, const std::string& address)
      : comm(Rank{rank}, WorldSize{ranks}, detail::shm::Engine::open(address),
             std::chrono::minutes(1)) {}
  void step(const Batch& batch) { ddp.step(batch); }
};

/// PyTorch's step on as many threads; unknown where PyTorch is not installed.
Times torch_step(std::size_t threads) {
  Times times{};
  each_torch_line("python3 " LOCKSTEP_SOURCE_DIR "/bench/dp/data_parallel.py " +
                      std::to_string(threads) + " 2>/dev/null",
                  120, "step", [&](const nlohmann::json& read) {
                    times = {true, read["median"], read["minimum"]};
                  });
  return times;
}

class Table {
 public:
  Table() {
    std::printf(
        "| | median us | min | MiB | DDP, as many ranks | ratio | bare over it | PyTorch | ratio "
        "|\n|---|---|---|---|---|---|---|---|---|\n");
  }
  void row(const std::string& name, const Cost& own, const Cost& ddp, const Cost& bare,
           const Times& torch) {
    std::printf("| %s | %.0f | %.0f | %.1f | %.0f | %.3f | %.2f |", name.c_str(), own.step.median,
                own.step.minimum, own.mebibytes, ddp.step.median, own.step.median / ddp.step.median,
                bare.step.median / own.step.median);
    nlohmann::json row{{"what", name},
                       {"median", own.step.median},
                       {"minimum", own.step.minimum},
                       {"mebibytes", own.mebibytes},
                       {"over_ddp", own.step.median / ddp.step.median},
                       {"speed_up", bare.step.median / own.step.median}};
    if (torch.known) {
      std::printf(" %.0f | %.2f |\n", torch.median, torch.median / own.step.median);
      row["torch"] = torch.median;
    } else {
      std::printf(" - | - |\n");
    }
    rows_.push_back(row);
  }
  void write() const {
    std::ofstream(LOCKSTEP_SOURCE_DIR "/build/bench/dp.json") << rows_.dump(2) << "\n";
  }

 private:
  nlohmann::json rows_ = nlohmann::json::array();
};

void compare(Table& table, std::size_t n, const Cost& bare, Clock::time_point deadline) {
  const auto file = detail::shm::Engine::make_file(WorldSize{n});
  const std::string address = detail::shm::Engine::address(file);
  const Cost ddp = measure(
      n, deadline, [&](std::size_t rank) { return std::make_unique<OneRank>(rank, n, address); });
  const Cost on_output = measure(1, deadline, [&](std::size_t) {
    return std::make_unique<DataParallel<Network, LossOnOutput>>(DpOptions{.replicas = n});
  });
  const Cost on_replica = measure(1, deadline, [&](std::size_t) {
    return std::make_unique<DataParallel<Network, LossOnReplica>>(DpOptions{.replicas = n});
  });
  const Times torch = torch_step(n);
  const std::string count = std::to_string(n);
  table.row("DDP, " + count + (n == 1 ? " rank" : " ranks"), ddp, ddp, bare, torch);
  table.row("DP, " + count + ", LossOnOutput", on_output, ddp, bare, torch);
  table.row("DP, " + count + ", LossOnReplica", on_replica, ddp, bare, torch);
}

}  // namespace

int main() try {
  const Clock::time_point deadline = Clock::now() + time_limit;
  const OthersLoad others;
  std::printf("one step of MLP 784-256-256-10, SGD, a batch of %zu in all, %zu cores\n\n",
              global_batch, cores());
  Table table;
  const Cost bare = measure(1, deadline, [](std::size_t) { return std::make_unique<Bare>(); });
  table.row("bare model", bare, bare, bare, {});
  for (const std::size_t n : {1, 2, 4, 8}) {
    if (n <= std::max<std::size_t>(4, cores())) compare(table, n, bare, deadline);
  }
  table.write();
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench dp: %s\n", error.what());
  return 1;
}
