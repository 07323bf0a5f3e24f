// SPDX-License-Identifier: Apache-2.0
#include "all_reduce.hpp"

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "lockstep/detail/comm/threads/communicator.cuh"
#include "lockstep/detail/core/bytes.hpp"

namespace bench {
namespace {

using namespace lockstep;

constexpr std::size_t batches = 15;
constexpr std::size_t in_one_graph = 20;

struct Size {
  std::size_t bytes;
  const char* name;
};
constexpr Size sizes[] = {
    {1_KiB, "1 KiB"}, {1_MiB, "1 MiB"}, {25_MiB, "25 MiB"}, {64_MiB, "64 MiB"}};

/// Microseconds per iteration, from all ranks' start to all ranks' end.
template <class Comm, class Run>
double batch(Comm& comm, std::size_t iterations, const Run& run) {
  comm.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < iterations; ++i) run();
  comm.barrier();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(iterations);
}

/// One rank's part of the comparison; the rows are rank 0's.
template <std::size_t Ranks>
std::vector<Comparison> compare_on(ThreadCommunicator<Ranks>& comm,
                                   const std::map<std::size_t, Times>& nccl) {
  const std::size_t most = sizes[std::size(sizes) - 1].bytes / sizeof(float);
  const auto all = comm.template allocate<float>(most);
  const auto copied = comm.template allocate<float>(most);
  std::vector<Comparison> rows;
  for (const Size& size : sizes) {
    const auto data = all.first(size.bytes / sizeof(float));
    const std::size_t iterations = size.bytes > 2_MiB ? 20 : 200;
    const auto reduce = [&] { comm.all_reduce(data, Average{}); };
    const auto copy = [&] {  // by rank 0: the others leave the memory to it
      if (comm.rank() != Rank{0}) return;
      check_cuda(cudaMemcpyAsync(copied.data(), data.data(), data.size_bytes(), cudaMemcpyDefault,
                                 comm.gpu().stream()),
                 "cudaMemcpyAsync");
    };
    const auto graph = comm.capture([&] {
      for (std::size_t i = 0; i < in_one_graph; ++i) reduce();
    });
    if (!graph) throw Error("bench", "no graph: " + graph.reason(), "see the reason");
    std::vector<double> eager;
    std::vector<double> captured;
    std::vector<double> copies;
    batch(comm, 5, [&] {
      reduce();
      copy();
      comm.replay(graph);
    });
    for (std::size_t b = 0; b < batches; ++b) {
      eager.push_back(batch(comm, iterations, reduce));
      copies.push_back(batch(comm, iterations, copy));
      captured.push_back(batch(comm, iterations / in_one_graph, [&] { comm.replay(graph); }) /
                         static_cast<double>(in_one_graph));
    }
    const std::string what =
        std::string("all-reduce ") + size.name + ", " + std::to_string(Ranks) + " threads, 1 GPU";
    rows.push_back({what + ", vs copy", summary(eager), summary(copies), 0});
    rows.push_back({what + ", in a graph, vs copy", summary(captured), summary(copies), 0});
    if (const auto peer = nccl.find(size.bytes); peer != nccl.end()) {
      rows.push_back({what + ", vs NCCL's over sockets (unfair)", summary(eager), peer->second, 0});
    }
  }
  return rows;
}

template <std::size_t Ranks>
void compare(std::vector<Comparison>& rows) {
  const auto world = std::make_shared<detail::threads::SharedWorld>(WorldSize{Ranks});
  const auto nccl = Ranks == 2 ? nccl_over_sockets(Ranks) : std::map<std::size_t, Times>();
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::jthread> threads;
  for (std::size_t r = 0; r < Ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        ThreadCommunicator<Ranks> comm(world, Rank{r}, std::make_shared<Gpu>(Rank{r}, 0),
                                       std::chrono::seconds(60));
        const std::vector<Comparison> made = compare_on(comm, nccl);
        if (r == 0) rows.insert(rows.end(), made.begin(), made.end());
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

}  // namespace

std::vector<Comparison> compare_all_reduce() {
  std::vector<Comparison> rows;
  compare<2>(rows);
  compare<4>(rows);
  compare<8>(rows);
  return rows;
}

}  // namespace bench
