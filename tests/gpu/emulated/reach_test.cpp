// SPDX-License-Identifier: Apache-2.0
// What ranks on several GPUs do with each other's memory, on GPUs that the host plays: without peer
// access, with copies that lose bits, with memory of other kinds; and how much they ask of CUDA.
#include "gpu/emulated/kernels.hpp"
//
#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/exercise.cuh"
#include "gpu/ring_step.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/topology/grid.hpp"

namespace gpu_reach {

namespace {

using namespace lockstep;
using namespace thread_ranks;
using detail::launch_store;
using detail::OnGpu;

using Comm = ThreadCommunicator<>;
struct Shape {
  std::size_t gpus;
  std::size_t ranks;
};
constexpr Shape shapes[] = {{2, 2}, {8, 8}, {2, 5}, {4, 8}};

/// Pieces that go through the host are small.
class Machine : public emulated::Machine {
 public:
  explicit Machine(std::size_t gpus) : emulated::Machine(gpus) { most_staged = 2048; }
  ~Machine() {
    most_staged = 64 * 1024;
    ::unsetenv("LOCKSTEP_PEER_ACCESS");
  }
};

/// What `f` writes to stderr.
template <class F>
std::string said_by(const F& f) {
  std::FILE* const file = std::tmpfile();
  std::fflush(stderr);
  const int before = ::dup(2);
  ::dup2(::fileno(file), 2);
  f();
  std::fflush(stderr);
  ::dup2(before, 2);
  ::close(before);
  std::string text(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

void expect_said(const std::string& said, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    BOOST_TEST(said.find(part) != std::string::npos, "'" << part << "' is not in: " << said);
}

/// Full mantissas, so that another order of combining would show, in one and in several pieces.
void exact_sums(Comm& comm) {
  const std::size_t world = comm.world_size().value();
  for (const std::size_t n : {std::size_t{17}, std::size_t{3001}}) {
    const auto data = comm.allocate<float>(n);
    upload(comm, values<float>(comm.rank().value(), n), data);
    comm.all_reduce(data, Average{});
    require_equal(download(comm, data), reduced<float>(Average{}, world, n), "average");
  }
}

/// Every collective, messages included, in one and in several pieces.
void every_collective(Comm& comm) {
  exact_sums(comm);
  for (const std::size_t n : {0, 1, 1001}) {
    exercise::reductions<float>(comm, n, false, Average{});
    exercise::movements<float>(comm, n, false);
    exercise::pieces_in_place<float>(comm, n, false, Average{});
  }
  exercise::reductions<double>(comm, 1001, false, Max{});
  exercise::variable_gathers<float>(comm, 3, false);
}

/// No GPU has access to another.
bool none_is_open() {
  for (const auto& row : emulated::host.accesses)
    for (const auto& one : row)
      if (one) return false;
  return true;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_reach)

BOOST_AUTO_TEST_CASE(without_peer_access_data_goes_through_the_host) {
  for (const auto& [gpus, ranks] : shapes) {
    const Machine machine(gpus);
    emulated::host.may_access = false;
    const std::string said = said_by([&] { expect_all_fine(run(ranks, every_collective)); });
    expect_said(said, {"lockstep: GPU 0 cannot access the memory of GPU 1", "through host memory",
                       "LOCKSTEP_PEER_ACCESS=0"});
    if (gpus == 4) expect_said(said, {"(as in 5 other pairs)"});
    BOOST_TEST(said_by([&] { expect_all_fine(run(ranks, exact_sums)); }) == "");  // said before
  }
}

BOOST_AUTO_TEST_CASE(a_switch_leaves_the_gpus_closed_and_says_nothing) {
  const Machine machine(4);
  ::setenv("LOCKSTEP_PEER_ACCESS", "0", 1);
  BOOST_TEST(said_by([] { expect_all_fine(run(4, every_collective)); }) == "");
  BOOST_TEST(none_is_open());
}

BOOST_AUTO_TEST_CASE(too_many_peers_are_no_error) {
  const Machine machine(4);
  emulated::host.most_peers = 2;
  expect_said(said_by([] { expect_all_fine(run(4, every_collective)); }),
              {"GPU 0 may not access the memory of GPU 3", "at most eight peers"});
}

BOOST_AUTO_TEST_CASE(copies_that_lose_bits_are_noticed_and_not_used) {
  for (const std::size_t gpus : {2, 4}) {
    const Machine machine(gpus);
    emulated::host.corrupts_copies = true;
    expect_said(said_by([&] { expect_all_fine(run(gpus, every_collective)); }),
                {"GPUs 0 and 1 do not get each other's bytes right", "IOMMU", "iommu=pt"});
    BOOST_TEST(none_is_open());
  }
}

BOOST_AUTO_TEST_CASE(gpus_that_reach_each_other_are_tried_once) {
  const Machine machine(4);
  BOOST_TEST(said_by([] { expect_all_fine(run(4, every_collective)); }) == "");
  emulated::take_tally();
  expect_all_fine(run(4, [](Comm&) {}));
  const emulated::Tally again = emulated::take_tally();
  BOOST_TEST(again.of("launch") == 0);
  BOOST_TEST(again.of("cudaMalloc") == 0);
}

BOOST_AUTO_TEST_CASE(nothing_is_allocated_in_a_call) {
  for (const bool may_access : {true, false}) {
    const Machine machine(4);
    emulated::host.may_access = may_access;
    emulated::Tally tally;
    said_by([&] {
      expect_all_fine(run(4, [&](Comm& comm) {
        const auto data = comm.allocate<float>(3001);
        const auto all = comm.allocate<float>(4 * 3001);
        comm.barrier();
        if (comm.rank() == Rank{0}) emulated::take_tally();
        comm.barrier();
        comm.all_reduce(data);
        comm.all_gather(data, all);
        comm.reduce_scatter(all, data);
        comm.barrier();
        if (comm.rank() == Rank{0}) tally = emulated::take_tally();
        comm.barrier();
      }));
    });
    for (const char* const call : {"cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost"})
      BOOST_TEST(tally.of(call) == 0, call);
  }
}

BOOST_AUTO_TEST_CASE(many_calls_are_under_way_through_the_host) {
  const Machine machine(4);
  ::setenv("LOCKSTEP_PEER_ACCESS", "0", 1);
  expect_all_fine(run(8, [](Comm& comm) {
    const std::size_t me = comm.rank().value();
    std::vector<std::span<float>> data;
    for (std::size_t c = 0; c < 4; ++c) {
      data.push_back(comm.allocate<float>(700 + c));
      upload(comm, values<float>(me, 700 + c, c), data.back());
    }
    {
      auto a = comm.all_reduce_async(data[0], Average{});
      auto b = comm.all_reduce_async(data[1], Average{});
      auto c = comm.all_reduce_async(data[2], Average{});
      comm.broadcast(data[3], Rank{5});
      c.wait();
      while (!a.test()) std::this_thread::yield();
    }
    for (std::size_t c = 0; c < 3; ++c) {
      require_equal(download(comm, data[c]), reduced<float>(Average{}, 8, 700 + c, c),
                    "call " + std::to_string(c));
    }
    require_equal(download(comm, data[3]), values<float>(5, 703, 3), "broadcast");
    auto row = join_groups(comm, Grid<8, 4>{});
    exercise::movements<float>(row, 99, false);
  }));
}

// The same graph, whether GPUs reach each other or not.
BOOST_AUTO_TEST_CASE(a_step_through_the_host_is_captured_and_replayed) {
  for (const auto& [gpus, ranks] : {Shape{2, 2}, {8, 8}, {2, 4}}) {
    const Machine machine(gpus);
    ::setenv("LOCKSTEP_PEER_ACCESS", "0", 1);
    expect_all_fine(run(ranks, [](Comm& comm) {
      constexpr std::size_t n = 1777;  // several pieces
      RingStep step(comm, n);
      const auto beside = comm.allocate<float>(n);
      for (int round = 0; round < 3; ++round) {
        upload(comm, values<float>(comm.rank().value(), n), beside);
        step.check(round, [&](const auto& replay) {
          auto in_flight = comm.all_reduce_async(beside, Average{});  // uses the same host memory
          replay();
          in_flight.wait();
        });
        require_equal(download(comm, beside),
                      reduced<float>(Average{}, comm.world_size().value(), n), "beside");
      }
    }));
  }
}

// ---- Memory of other kinds

namespace {

/// A pool that the program has made, and memory of it.
class OwnPool {
 public:
  OwnPool(const Gpu& gpu, std::size_t count) : stream_(gpu.stream()), count_(count) {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = gpu.device();
    check_cuda(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
    check_cuda(cudaMallocFromPoolAsync(&data_, count * sizeof(float), pool_, stream_),
               "cudaMallocFromPoolAsync");
  }
  ~OwnPool() {
    static_cast<void>(cudaFreeAsync(data_, stream_));
    static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaMemPoolDestroy(pool_));
  }
  void grant(int gpu) const {
    cudaMemAccessDesc access{};
    access.location.type = cudaMemLocationTypeDevice;
    access.location.id = gpu;
    access.flags = cudaMemAccessFlagsProtReadWrite;
    check_cuda(cudaMemPoolSetAccess(pool_, &access, 1), "cudaMemPoolSetAccess");
  }
  std::span<float> span() const { return {static_cast<float*>(data_), count_}; }

 private:
  cudaStream_t stream_;
  std::size_t count_;
  cudaMemPool_t pool_ = nullptr;
  void* data_ = nullptr;
};

void exact_sum(Comm& comm, std::span<float> data) {
  upload(comm, values<float>(comm.rank().value(), data.size()), data);
  comm.all_reduce(data);
  require_equal(download(comm, data), reduced<float>(Sum{}, comm.world_size().value(), data.size()),
                "sum");
}

}  // namespace

BOOST_AUTO_TEST_CASE(memory_of_the_default_pool_is_reduced) {
  const Machine machine(4);
  expect_all_fine(run(4, [](Comm& comm) {
    void* data = nullptr;
    check_cuda(cudaMallocAsync(&data, 1001 * sizeof(float), comm.gpu().stream()),
               "cudaMallocAsync");
    exact_sum(comm, {static_cast<float*>(data), 1001});
    comm.barrier();
    check_cuda(cudaFreeAsync(data, comm.gpu().stream()), "cudaFreeAsync");
  }));
}

BOOST_AUTO_TEST_CASE(memory_of_another_pool_is_rejected_by_name_until_it_is_granted) {
  const Machine machine(2);
  const Ends ends = run(2, [](Comm& comm) {
    const OwnPool pool(comm.gpu(), 500);
    if (comm.rank() == Rank{1}) exact_sum(comm, pool.span());
    const auto data = comm.allocate<float>(500);
    exact_sum(comm, data);
  });
  BOOST_TEST(
      ends[1].find("rank 1, all_reduce(sum of 500 float): its data is memory of a pool that "
                   "GPU 0 has no access to; grant it by cudaMemPoolSetAccess") != std::string::npos,
      ends[1]);
  BOOST_TEST(ends[0].find("rank 1 failed") != std::string::npos, ends[0]);

  expect_all_fine(run(2, [](Comm& comm) {
    const OwnPool pool(comm.gpu(), 500);
    pool.grant(1 - comm.gpu().device());
    exact_sum(comm, pool.span());
    comm.barrier();
  }));
  // Through the host every GPU uses its own memory alone.
  ::setenv("LOCKSTEP_PEER_ACCESS", "0", 1);
  expect_all_fine(run(2, [](Comm& comm) {
    const OwnPool pool(comm.gpu(), 500);
    exact_sum(comm, pool.span());
    comm.barrier();
  }));
}

BOOST_AUTO_TEST_CASE(memory_of_another_gpu_is_rejected_by_name) {
  const Machine machine(3);
  const auto expect = [](const std::string& words, const auto& call) {
    const Ends ends = run(2, [&](Comm& comm) {
      const OnGpu current(2);
      const DeviceArena foreign(3000 * sizeof(float));
      const auto data = comm.allocate<float>(1000);  // of its own GPU, whichever is current
      exact_sum(comm, data);
      call(comm, data, std::span(reinterpret_cast<float*>(foreign.data()), 3000));
    });
    for (std::size_t r = 0; r < 2; ++r) {
      const std::string all = "rank " + std::to_string(r) + ", " + words +
                              " is memory of GPU 2, and this rank's GPU is " + std::to_string(r);
      BOOST_TEST(ends[r].find(all) != std::string::npos, ends[r]);
    }
  };
  expect("all_reduce(sum of 3000 float): its data",
         [](Comm& comm, auto, auto foreign) { comm.all_reduce(foreign); });
  expect("all_gather(1000 float): out",
         [](Comm& comm, auto data, auto foreign) { comm.all_gather(data, foreign.first(2000)); });
  expect("reduce_scatter(sum of 2000 float): in", [](Comm& comm, auto data, auto foreign) {
    comm.reduce_scatter(foreign.first(2000), data);
  });
}

BOOST_AUTO_TEST_CASE(managed_memory_is_ready_for_the_host_when_a_call_is_over) {
  for (const char* const access : {"1", "0"}) {
    const Machine machine(4);
    ::setenv("LOCKSTEP_PEER_ACCESS", access, 1);
    expect_all_fine(run(4, [](Comm& comm) {
      void* managed = nullptr;
      check_cuda(cudaMallocManaged(&managed, 999 * sizeof(float), cudaMemAttachGlobal),
                 "cudaMallocManaged");
      const std::span<float> data(static_cast<float*>(managed), 999);
      const auto me = static_cast<float>(comm.rank().value());
      for (int round = 0; round < 20; ++round) {
        std::fill(data.begin(), data.end(), me);
        launch_store(comm.gpu().stream(), data.data(), me + static_cast<float>(round));
        comm.all_reduce(data);
        require(data[0] == 6 + 4 * static_cast<float>(round) && data[998] == 6, "sum");
      }
      std::vector<float> host(4 * 999);  // and a result in plain host memory
      launch_store(comm.gpu().stream(), data.data(), me);
      comm.all_gather(data, host);
      require(host[0] == 0 && host[3 * 999] == 3, "gathered");
      if (me == 0) {
        launch_store(comm.gpu().stream(), data.data(), 7.f);
        comm.send(data, Rank{1});
        data[0] = 1;
      } else if (me == 1) {
        comm.receive(data, Rank{0});
        require(data[0] == 7, "message");
      }
      comm.barrier();
      check_cuda(cudaFree(managed), "cudaFree");
    }));
  }
}

// ---- What a call costs

namespace {

/// The calls of CUDA that all ranks make for one all-reduce, and its launches. Each GPU has more to
/// do than what the largest grid does at a time.
emulated::Tally tally_of(std::size_t gpus, std::size_t ranks) {
  emulated::host.processors = 10;
  emulated::Tally tally;
  expect_all_fine(run(ranks, [&](Comm& comm) {
    const auto data = comm.allocate<float>(gpus * (ranks == 2  ? 70'000
                                                   : gpus == 1 ? 90'000
                                                               : 40'000));
    comm.barrier();
    if (comm.rank() == Rank{0}) emulated::take_tally();
    comm.agree(detail::Call{});  // without CUDA
    comm.all_reduce(data);
    comm.agree(detail::Call{});
    if (comm.rank() == Rank{0}) tally = emulated::take_tally();
    comm.barrier();
  }));
  BOOST_TEST_MESSAGE(gpus << " GPUs, " << ranks << " ranks: " << tally.of("cudaEventRecord")
                          << " records, " << tally.of("cudaStreamWaitEvent") << " waits, "
                          << tally.of("cudaSetDevice") << " changes of the GPU, "
                          << tally.of("launch") << " launches of " << tally.launches.at(0).blocks.x
                          << " blocks");
  return tally;
}

}  // namespace

BOOST_AUTO_TEST_CASE(calls_of_cuda_grow_with_ranks_plus_gpus_and_grids_are_small) {
  for (const auto& [gpus, ranks] : {Shape{2, 2}, {4, 4}, {8, 8}, {2, 8}}) {
    const Machine machine(gpus);
    const emulated::Tally tally = tally_of(gpus, ranks);
    BOOST_TEST(tally.of("cudaEventRecord") == ranks + gpus + 2);
    BOOST_TEST(tally.of("cudaStreamWaitEvent") == 2 * (ranks + gpus));
    BOOST_TEST(tally.of("cudaPointerGetAttributes") == ranks);
    BOOST_TEST(tally.of("launch") == gpus);
    for (const emulated::Launch& launch : tally.launches) {
      BOOST_TEST((launch.blocks.x >= 16 && launch.blocks.x <= 32));
      BOOST_TEST(launch.threads == 512u);
    }
    BOOST_TEST(tally.launches[0].blocks.x == (ranks == 2 ? 32u : 16u));
  }
}

// What every rank on one GPU does is what it was before several were thought of.
BOOST_AUTO_TEST_CASE(on_one_gpu_no_call_is_added_and_the_grid_fills_it) {
  for (const std::size_t ranks : {4, 8}) {
    const Machine machine(1);
    const emulated::Tally tally = tally_of(1, ranks);
    BOOST_TEST(tally.of("cudaEventRecord") == ranks + 1);
    BOOST_TEST(tally.of("cudaStreamWaitEvent") == 2 * ranks);
    BOOST_TEST(tally.of("cudaSetDevice") == 0);
    BOOST_TEST(tally.of("cudaPointerGetAttributes") == ranks);
    BOOST_TEST(tally.of("launch") == 1);
    BOOST_TEST(tally.launches.at(0).blocks.x == 10 * 2048 / 512);
  }
}

BOOST_AUTO_TEST_CASE(through_the_host_calls_are_linear_too) {
  std::size_t before = 0;
  for (const std::size_t gpus : {2, 4, 8}) {
    const Machine machine(gpus);
    ::setenv("LOCKSTEP_PEER_ACCESS", "0", 1);
    most_staged = std::size_t{4} << 20;
    // Those that order and move: a fast rank may be asking for more already, without either.
    const emulated::Tally tally = tally_of(gpus, gpus);
    std::size_t all = 0;
    for (const char* call : {"cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync",
                             "cudaMemcpy2DAsync", "launch"})
      all += tally.of(call);
    BOOST_TEST(all >= gpus);
    if (before != 0) BOOST_TEST(all <= 2 * before + 8);
    before = all;
  }
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace gpu_reach
