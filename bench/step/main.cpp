// SPDX-License-Identifier: Apache-2.0
// One training step, everything in it: lockstep's DDP at one and two ranks, the same model bare,
// and PyTorch's DDP over Gloo; DDP through MPI, on ranks that mpirun starts; and the update alone,
// fused with the reduction or after it. Plain SGD, each rank a process with one thread.
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comparison_table.hpp"
#include "convnet.hpp"
#include "load.hpp"
#include "lockstep/trace.hpp"
#include "measure.hpp"
#include "models.hpp"
#include "mpi.hpp"
#include "torch_lines.hpp"
#include "ways.hpp"

namespace {

using namespace bench;
constexpr std::chrono::seconds time_limit{600};

enum Way : std::size_t { bare, one, one_ignoring, shared, shared_ignoring, replicated, ways };

struct Common {
  Track track;
  Times times[ways];
};

/// A model's step at one rank and at two.
template <class Model, class Batch>
std::array<Times, ways> measure(const Batch& batch, Clock::time_point deadline) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  run_ranks(1, deadline, [&](std::size_t) {
    LoopbackCommunicator comm;
    HandWritten<Model> by_hand;
    const auto ddp = make_ddp<Model, World<1>>(comm);
    const auto ignoring = make_ddp<Model, World<1>, Anomaly<Ignore>>(comm);
    ddp->optimizer().lr = ignoring->optimizer().lr = 0.01;
    Stand stand(common.track, 0, 1);
    const auto times =
        stand.race({contestant("bare", by_hand, batch), contestant("ddp", *ddp, batch),
                    contestant("ignoring", *ignoring, batch)},
                   0);
    common.times[bare] = summary(times[0]);
    common.times[one] = summary(times[1]);
    common.times[one_ignoring] = summary(times[2]);
  });
  const auto file = detail::shm::Engine::make_file(WorldSize{2});
  const std::string address = detail::shm::Engine::address(file);
  run_ranks(2, deadline, [&](std::size_t rank) {
    ShmCommunicator<2> comm(Rank{rank}, WorldSize{2}, detail::shm::Engine::open(address),
                            std::chrono::minutes(1));
    const auto together = make_ddp<Model, World<2>>(comm);
    const auto apart = make_ddp<Model, World<2>, Sharding<Replicated>>(comm);
    const auto ignoring = make_ddp<Model, World<2>, Anomaly<Ignore>>(comm);
    together->optimizer().lr = apart->optimizer().lr = ignoring->optimizer().lr = 0.01;
    Stand stand(common.track, rank, 2);
    const auto times =
        stand.race({contestant("shared", *together, batch), contestant("replicated", *apart, batch),
                    contestant("ignoring", *ignoring, batch)},
                   0);
    if (rank != 0) return;
    common.times[shared] = summary(times[0]);
    common.times[replicated] = summary(times[1]);
    common.times[shared_ignoring] = summary(times[2]);
  });
  std::array<Times, ways> result;
  std::copy_n(common.times, ways, result.begin());
  return result;
}

/// The MLP's step on two ranks while a trace is recorded, and without the policy.
std::pair<Times, Times> measure_traced(Clock::time_point deadline) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = detail::shm::Engine::make_file(WorldSize{2});
  const std::string address = detail::shm::Engine::address(file);
  const auto batch = random_batch<float, int>(32, 784, 10);
  run_ranks(2, deadline, [&](std::size_t rank) {
    ShmCommunicator<2> comm(Rank{rank}, WorldSize{2}, detail::shm::Engine::open(address),
                            std::chrono::minutes(1));
    const auto plain = make_ddp<Network, World<2>>(comm);
    const auto traced = make_ddp<Network, World<2>, Observers<Trace>>(comm);
    plain->optimizer().lr = traced->optimizer().lr = 0.01;
    const auto tracer = std::make_shared<detail::Tracer>(10'000'000, Rank{rank});
    const Contestant recording{"traced", {}, [&](std::size_t, std::size_t iterations) {
                                 detail::recorder_of_thread() = tracer;
                                 for (std::size_t i = 0; i < iterations; ++i) {
                                   const Trace::Span step({"ProfilerStep", i});
                                   traced->step(batch);
                                   tracer->take_calls();
                                 }
                                 detail::recorder_of_thread().reset();
                               }};
    Stand stand(common.track, rank, 2);
    const auto times = stand.race({recording, contestant("plain", *plain, batch)}, 0);
    if (rank != 0) return;
    common.times[shared] = summary(times[0]);
    common.times[replicated] = summary(times[1]);
  });
  return {common.times[shared], common.times[replicated]};
}

/// The step of example 06's network on two ranks, with batch norms over the samples of both, and
/// over those of each.
std::pair<Times, Times> measure_convnet(Clock::time_point deadline) {
  using Images = ConvNet<float, 1, 28, 32, 64, 10>;
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = detail::shm::Engine::make_file(WorldSize{2});
  const std::string address = detail::shm::Engine::address(file);
  const auto batch = random_batch<float, int>(64, 784, 10);
  run_ranks(2, deadline, [&](std::size_t rank) {
    ShmCommunicator<2> comm(Rank{rank}, WorldSize{2}, detail::shm::Engine::open(address),
                            std::chrono::minutes(1));
    const auto synced = make_ddp<Images, World<2>, Norms<Synced>>(comm);
    const auto local = make_ddp<Images, World<2>, Norms<Local>>(comm);
    synced->optimizer().lr = local->optimizer().lr = 0.01;
    Stand stand(common.track, rank, 2);
    const auto times =
        stand.race({contestant("synced", *synced, batch), contestant("local", *local, batch)}, 0);
    if (rank != 0) return;
    common.times[shared] = summary(times[0]);
    common.times[replicated] = summary(times[1]);
  });
  return {common.times[shared], common.times[replicated]};
}

/// Reduction and Adam's update of 25 MiB, fused and one after the other.
std::pair<Times, Times> measure_update(std::size_t ranks, Clock::time_point deadline) {
  const SharedMemory memory(sizeof(Common));
  Common& common = *memory.as<Common>();
  const auto file = detail::shm::Engine::make_file(WorldSize{ranks});
  const std::string address = detail::shm::Engine::address(file);
  run_ranks(ranks, deadline, [&](std::size_t rank) {
    ShmCommunicator<> comm(Rank{rank}, WorldSize{ranks}, detail::shm::Engine::open(address),
                           std::chrono::minutes(1));
    const auto fused = make_ddp<Block, Optimizer<Adam>>(comm);
    const auto apart = make_ddp<Block, Optimizer<Adam>, Sharding<Replicated>>(comm);
    Stand stand(common.track, rank, ranks);
    const auto times =
        stand.race({contestant("fused", *fused, 0), contestant("apart", *apart, 0)}, 0);
    if (rank != 0) return;
    common.times[shared] = summary(times[0]);
    common.times[replicated] = summary(times[1]);
  });
  return {common.times[shared], common.times[replicated]};
}

/// PyTorch's step; unknown where PyTorch is not installed.
Times torch_step(const std::string& model, const std::string& how, int ranks) {
  Times times{};
  each_torch_line(
      "torchrun --standalone --nproc-per-node " + std::to_string(ranks) +
          " " LOCKSTEP_SOURCE_DIR "/bench/step/ddp.py " + model + " " + how + " 2>/dev/null",
      120, "step",
      [&](const nlohmann::json& read) { times = {true, read["median"], read["minimum"]}; });
  return times;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 3 && argv[1] == std::string("mpi")) {
    run_mpi_rank(argv[2]);
    return 0;
  }
  const Clock::time_point deadline = Clock::now() + time_limit;
  const OthersLoad others;
  std::printf("one step, microseconds, %zu cores\n\n", cores());
  ComparisonTable table;
  const auto linear = measure<Linear>(random_batch<float, float>(4, 10, 2), deadline);
  const auto mlp = measure<Network>(random_batch<float, int>(32, 784, 10), deadline);
  const auto [traced, plain] = measure_traced(deadline);
  const auto [synced, local] = measure_convnet(deadline);
  const auto [fused, apart] = measure_update(2, deadline);
  const auto each = [&](const std::string& name, const char* script, const auto& times,
                        double target) {
    table.row(name + ", World<1> / bare", times[one], times[bare], 1.005, true);
    table.row(name + ", World<1>, Anomaly<Stop> / Ignore", times[one], times[one_ignoring], 1.01,
              true);
    table.row(name + ", W=2, Anomaly<Stop> / Ignore", times[shared], times[shared_ignoring], 1.01,
              true);
    table.row(name + ", W=1 against PyTorch without DDP", times[one],
              torch_step(script, "plain", 1), 0);
    table.row(name + ", W=2 against PyTorch DDP + Gloo", times[shared],
              torch_step(script, "ddp", 2), target);
    table.row(name + ", W=2 over W=1", times[shared], times[one],
              std::string(script) == "mlp" ? 1.05 : 0, true);
    table.row(name + ", W=2, shared parameters against replicated", times[shared],
              times[replicated], 0);
  };
  each("Linear(10,1), batch 4", "linear", linear, 50);
  each("MLP 784-256-256-10, batch 32", "mlp", mlp, 1.5);
  table.row("MLP 784-256-256-10, batch 32, W=2, traced / not", traced, plain, 1.02, true);
  table.row("ConvNet of example 06, batch 64, W=2, Norms<Local> against PyTorch DDP + Gloo", local,
            torch_step("convnet", "ddp", 2), 1.5);
  table.row("ConvNet, W=2, Norms<Synced> over Norms<Local>", synced, local, 1.05, true);
  table.row("reduce + Adam of 25 MiB, W=2: fused against all-reduce, then Adam", fused, apart, 1.8);
  if (const auto times = race_through_mpi(); times[over_mpi].known) {
    const std::string name = "MLP 784-256-256-10, batch 32, W=2, Backend<Mpi>";
    table.row(name + " against Backend<Gloo>", times[over_mpi], times[over_gloo], 0);
    table.row(name + " against a loop with MPI_Allreduce", times[over_mpi], times[by_hand], 0);
    table.row(name + ": a thread against none", times[over_mpi], times[without_thread], 0);
  } else {
    std::printf(
        "skipped: rows through MPI (no MPI was found when this was compiled, or no mpirun "
        "is here)\n");
  }
  table.write("step");
  others.print();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench step: %s\n", error.what());
  return 1;
}
