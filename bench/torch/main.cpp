// SPDX-License-Identifier: Apache-2.0
// A training step of LibTorch's modules, everything in it: lockstep's DDP on two ranks, one process
// of plain LibTorch, and Python's DDP over Gloo on two ranks. Plain SGD, each rank a process with
// one thread. Arguments choose models: linear, mlp, convnet, transformer.
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "comparison_table.hpp"
#include "load.hpp"
#include "lockstep/lockstep.hpp"
#include "measure.hpp"
#include "modules.hpp"
#include "torch_lines.hpp"

namespace {

using namespace bench;
using namespace lockstep;

constexpr std::chrono::seconds time_limit{600};

enum Way : std::size_t { passes, plain, alone, beside, shared, replicated, ways };

struct Common {
  Track track;
  Times times[ways];
};

Contestant contestant(const char* name, auto& ddp, const Samples& batch) {
  return {name, {}, [&](std::size_t, std::size_t iterations) {
            for (std::size_t i = 0; i < iterations; ++i) ddp.step(batch);
          }};
}

/// LibTorch's forward and backward passes and nothing else: what no step can be faster than.
class Passes {
 public:
  explicit Passes(const std::string& name) : net_(make_net(name)) {}
  void step(const Samples& batch) {
    net_->zero_grad();
    net_->loss(batch).backward();
  }

 private:
  std::shared_ptr<Net> net_;
};

/// The loop that LibTorch's users write for one process. Two of them beside each other, which share
/// nothing but the machine, are what no step of two ranks can be faster than.
class Plain {
 public:
  explicit Plain(const std::string& name)
      : net_(make_net(name)), optimizer_(net_->parameters(), 0.01) {}
  void step(const Samples& batch) {
    optimizer_.zero_grad();
    const at::Tensor loss = net_->loss(batch);
    loss.backward();
    static_cast<void>(loss.item<float>());
    optimizer_.step();
  }

 private:
  std::shared_ptr<Net> net_;
  torch::optim::SGD optimizer_;
};

template <class... Policies>
auto make_ddp(auto& comm, const std::string& name) {
  auto ddp = std::make_unique<lockstep::DistributedDataParallel<Stepped, Policies...>>(
      comm, Stepped(make_net(name)));
  ddp->optimizer().lr = 0.01;
  return ddp;
}

std::array<Times, ways> measure(const std::string& name, Clock::time_point deadline) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  run_ranks(1, deadline, [&](std::size_t) {
    at::set_num_threads(1);
    const Samples batch = make_batch(name);
    LoopbackCommunicator comm;
    Passes bare(name);
    Plain by_hand(name);
    const auto ddp = make_ddp<World<1>>(comm, name);
    Stand stand(common.track, 0, 1);
    const auto times =
        stand.race({contestant("passes", bare, batch), contestant("plain", by_hand, batch),
                    contestant("alone", *ddp, batch)},
                   0);
    for (const Way way : {passes, plain, alone}) common.times[way] = summary(times[way]);
  });
  const auto file = lockstep::detail::shm::Engine::make_file(WorldSize{2});
  const std::string address = lockstep::detail::shm::Engine::address(file);
  run_ranks(2, deadline, [&](std::size_t rank) {
    at::set_num_threads(1);
    const Samples batch = make_batch(name);
    ShmCommunicator<2> comm(Rank{rank}, WorldSize{2}, lockstep::detail::shm::Engine::open(address),
                            std::chrono::minutes(1));
    Plain by_hand(name);
    const auto together = make_ddp<World<2>>(comm, name);
    const auto apart = make_ddp<World<2>, Sharding<Replicated>>(comm, name);
    Stand stand(common.track, rank, 2);
    const auto times =
        stand.race({contestant("beside", by_hand, batch), contestant("shared", *together, batch),
                    contestant("replicated", *apart, batch)},
                   0);
    if (rank != 0) return;
    common.times[beside] = summary(times[0]);
    common.times[shared] = summary(times[1]);
    common.times[replicated] = summary(times[2]);
  });
  std::array<Times, ways> result;
  std::copy_n(common.times, ways, result.begin());
  return result;
}

/// Python's steps by model; none where PyTorch is not installed.
std::map<std::string, Times> python_steps() {
  std::map<std::string, Times> times;
  each_torch_line("torchrun --standalone --nproc-per-node 2 " LOCKSTEP_SOURCE_DIR
                  "/bench/torch/ddp.py linear mlp convnet transformer 2>/dev/null",
                  240, "step", [&](const nlohmann::json& read) {
                    times[read["model"]] = {true, read["median"], read["minimum"]};
                  });
  return times;
}

/// Gives every rank one thread, Python's too. OpenMP and OpenBLAS read how many they may have
/// before `main` begins, so the program begins anew.
void take_one_thread(char** argv) {
  const char* const given = std::getenv("OMP_NUM_THREADS");
  if (given != nullptr && std::string_view(given) == "1") return;
  setenv("OMP_NUM_THREADS", "1", 1);
  execv("/proc/self/exe", argv);
  throw std::runtime_error("cannot begin anew with OMP_NUM_THREADS=1");
}

}  // namespace

int main(int argc, char** argv) try {
  take_one_thread(argv);
  const Clock::time_point deadline = Clock::now() + time_limit;
  const OthersLoad others;
  std::printf("one step of a LibTorch module, microseconds, %zu cores\n\n", cores());
  auto python = python_steps();
  ComparisonTable table;
  const auto each = [&](const std::string& title, const std::string& name, double target,
                        double most_over_plain) {
    if (argc > 1 && std::find(argv + 1, argv + argc, name) == argv + argc) return;
    const auto times = measure(name, deadline);
    table.row(title + ", W=2 against Python DDP + Gloo", times[shared], python[name], target);
    table.row(title + ", W=2, replicated, against Python DDP + Gloo", times[replicated],
              python[name], 0);
    table.row(title + ", W=1 over plain LibTorch", times[alone], times[plain], 0, true);
    table.row(title + ", W=2 over plain LibTorch in one process", times[shared], times[plain],
              most_over_plain, true);
    table.row(title + ", W=2 over plain LibTorch in two processes", times[shared], times[beside],
              most_over_plain, true);
    table.row(title + ", plain LibTorch in two processes over one", times[beside], times[plain], 0,
              true);
    table.row(title + ", W=1 over LibTorch's forward and backward passes alone", times[alone],
              times[passes], 0, true);
  };
  each("Linear(10,1), batch 4", "linear", 40, 0);
  each("MLP 784-256-256-10, batch 32", "mlp", 3, 1.03);
  each("ConvNet of example 06, batch 64", "convnet", 0, 1.03);
  each("transformer, 2 blocks of 128, 64 tokens, batch 8", "transformer", 0, 1.03);
  table.write("torch");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench torch: %s\n", error.what());
  return 1;
}
