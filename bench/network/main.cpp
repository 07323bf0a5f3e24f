// SPDX-License-Identifier: Apache-2.0
// How long an all-reduce and a DDP step take across hosts: flat Gloo, shared memory inside a host
// and Gloo between hosts, and PyTorch's DDP over Gloo on the same hosts. bench/network/run makes
// the hosts and starts this program on each; without arguments it is that script.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#if LOCKSTEP_GLOO  // from bench/xmake.lua, which links it as well
#include "lockstep/gloo.hpp"
#include "mlp.hpp"

namespace {

using Network = Mlp<float, 784, 256, 10>;
using Clock = std::chrono::steady_clock;

/// Prints what rank 0 sees of `batches` batches of `count` calls each, in microseconds a call.
/// ddp.py does the same in the same way.
template <class F>
void measure(Session& session, const std::string& name, std::size_t batches, std::size_t count,
             const auto& barrier, F&& once) {
  for (std::size_t i = 0; i < count; ++i) once();
  std::vector<double> times;
  for (std::size_t b = 0; b < batches; ++b) {
    barrier();
    const auto begin = Clock::now();
    for (std::size_t i = 0; i < count; ++i) once();
    const std::chrono::duration<double, std::micro> taken = Clock::now() - begin;
    times.push_back(taken.count() / static_cast<double>(count));
  }
  std::sort(times.begin(), times.end());
  if (session.rank() != Rank{0}) return;
  std::printf("measured %s %.1f %.1f\n", name.c_str(), times[times.size() / 2], times.front());
  std::fflush(stdout);
}

template <class How>
void run(Session& session) {
  auto comm = detail::make_communicator<CanonicalPolicies<Backend<How>>>(session);
  DistributedDataParallel<Network, Backend<How>, Optimizer<SGD>> ddp(comm);
  const auto barrier = [&] { comm.barrier(); };
  std::vector<float> data(25_MiB / sizeof(float));
  const auto all_reduce = [&](const char* name, std::size_t bytes, std::size_t batches,
                              std::size_t count) {
    const std::span<float> part = std::span(data).first(bytes / sizeof(float));
    measure(session, name, batches, count, barrier, [&] { comm.all_reduce(part, Sum{}); });
  };
  all_reduce("1KiB", 1_KiB, 15, 20);
  all_reduce("1MiB", 1_MiB, 9, 3);
  all_reduce("25MiB", 25_MiB, 3, 1);

  RandomStream random(Seed{1});
  LabelledBatch<float, int> batch;
  batch.resize(32, 784);
  for (float& x : batch.inputs) x = static_cast<float>(random.normal());
  for (int& y : batch.labels) y = static_cast<int>(random.below(10));
  ddp.optimizer().lr = 0.01;
  measure(session, "step", 9, 5, barrier, [&] { ddp.step(batch); });
}

}  // namespace

int be_a_rank(int argc, char** argv) {
  return launch(argc, argv, [](Session& session) {
    if (session.arguments().at(1) == "flat") {
      run<Gloo>(session);
    } else {
      run<Hierarchical<Shm, Gloo>>(session);
    }
  });
}
#else
int be_a_rank(int, char**) { return 2; }
#endif

int main(int argc, char** argv) {
  if (argc > 1) return be_a_rank(argc, argv);
  if (!LOCKSTEP_GLOO) {
    std::printf("bench network: Gloo is not installed (Debian: libgloo-dev)\n");
    return 0;
  }
  const char* const script = LOCKSTEP_SOURCE_DIR "/bench/network/run";
  execl("/bin/bash", "bash", script, argv[0], nullptr);
  std::perror("bench network: bash");
  return 1;
}
