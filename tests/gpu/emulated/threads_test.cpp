// SPDX-License-Identifier: Apache-2.0
// Ranks that are threads, on several GPUs that the host plays; and what the player finds.
#include "gpu/emulated/kernels.hpp"
//
#include <atomic>
#include <barrier>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "data/fed.hpp"
#include "gpu/emulated/machine.hpp"
#include "gpu/exercise.cuh"
#include "gpu/ring_step.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/topology/grid.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played)

namespace {

using namespace lockstep;
using namespace thread_ranks;
using detail::launch_store;
using detail::OnGpu;

/// Each fault's message has these words, in order; the machine's end finds none.
void expect_faults(const std::vector<std::string>& words) {
  const std::vector<std::string> faults = emulated::take_faults();
  BOOST_TEST(faults.size() == words.size());
  for (std::size_t i = 0; i < std::min(faults.size(), words.size()); ++i)
    BOOST_TEST(faults[i].find(words[i]) != std::string::npos, faults[i]);
}

/// A stream, an event and a number of each GPU.
struct OnEach {
  explicit OnEach(std::size_t gpu) : current(gpu), number(sizeof(int)) {}
  OnGpu current;
  CudaStream stream;
  CudaEvent event;
  DeviceArena number;
  int* at() const { return reinterpret_cast<int*>(number.data()); }
};

std::string failure_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Ranks on as many GPUs, in turn.
template <class F>
void on_gpus(std::size_t gpus, std::size_t ranks, const F& f) {
  const emulated::Machine machine(gpus);
  expect_all_fine(run(ranks, f));
}

}  // namespace

// ---- What the player finds

BOOST_AUTO_TEST_CASE(a_launch_on_the_stream_of_another_gpu_is_a_fault) {
  const emulated::Machine machine(2);
  const OnEach one(1);
  const OnGpu current(0);
  BOOST_TEST(failure_of([&] {
               launch_store(one.stream, one.at(), 5);
             }).find("is launched on a stream of GPU 1, but the thread's current one is GPU 0") !=
             std::string::npos);
  expect_faults({"kernel 'store' is launched on a stream of GPU 1"});
}

BOOST_AUTO_TEST_CASE(a_grid_without_blocks_is_a_fault) {
  const emulated::Machine machine(1);
  const OnEach zero(0);
  const auto launch = [&](unsigned blocks, unsigned threads) {
    return failure_of([&] {
      detail::launch_kernel<detail::store<int>>("store", zero.stream, blocks, threads, zero.at(),
                                                5);
    });
  };
  BOOST_TEST(launch(1, 1).empty());
  BOOST_TEST(!launch(0, 1).empty());
  BOOST_TEST(!launch(1, 2048).empty());
  expect_faults({"has no grid that a GPU can run", "has no grid that a GPU can run"});
}

BOOST_AUTO_TEST_CASE(a_record_of_a_foreign_event_is_a_fault) {
  const emulated::Machine machine(2);
  const OnEach one(1);
  const OnGpu current(0);
  const CudaEvent event;
  BOOST_TEST(!failure_of([&] { event.record(one.stream); }).empty());
  one.event.record(one.stream);   // whatever is current
  one.event.block(CudaStream{});  // any stream may wait for it
  expect_faults({"an event of GPU 0 is recorded in a stream of GPU 1"});
}

BOOST_AUTO_TEST_CASE(an_access_without_peer_access_is_a_fault) {
  const emulated::Machine machine(3);
  const OnEach one(1);
  const OnGpu current(0);
  const CudaStream stream;
  BOOST_TEST(!failure_of([&] { launch_store(stream, one.at(), 5); }).empty());
  expect_faults({"kernel 'store' is given memory of GPU 1, which GPU 0 cannot access"});
  check_cuda(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  launch_store(stream, one.at(), 5);
  stream.synchronize();
  BOOST_TEST(*one.at() == 5);
  BOOST_TEST(cudaDeviceEnablePeerAccess(1, 0) == cudaErrorPeerAccessAlreadyEnabled);
  BOOST_TEST(cudaGetLastError() == cudaErrorPeerAccessAlreadyEnabled);

  // Access to a pool is another matter.
  void* pooled = nullptr;
  check_cuda(cudaMallocAsync(&pooled, sizeof(int), one.stream), "cudaMallocAsync");
  BOOST_TEST(!failure_of([&] { launch_store(stream, static_cast<int*>(pooled), 5); }).empty());
  expect_faults({"kernel 'store' is given pool memory of GPU 1, which GPU 0 cannot access"});
  cudaPointerAttributes attributes{};
  check_cuda(cudaPointerGetAttributes(&attributes, pooled), "cudaPointerGetAttributes");
  BOOST_TEST((attributes.type == cudaMemoryTypeDevice && attributes.device == 1));
  check_cuda(cudaFreeAsync(pooled, one.stream), "cudaFreeAsync");
}

BOOST_AUTO_TEST_CASE(memory_that_is_freed_waits_for_peers_and_must_not_wait_for_ever) {
  const emulated::Machine machine(2);
  emulated::most_wait_milliseconds = 100;
  std::atomic<bool> partner_came = false;
  const OnEach one(1);
  const OnGpu current(0);
  const auto wait_for_partner = [&] {
    emulated::Gpu::get().enqueue(one.stream.get(),
                                 {[] {}, nullptr, nullptr, 0, [&] { return partner_came.load(); }});
  };
  wait_for_partner();
  DeviceArena{8};  // GPU 1 is no peer, and nobody waits for it
  expect_faults({});
  check_cuda(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  DeviceArena{8};
  expect_faults({"cudaMalloc on GPU 0 waits for streams", "cudaFree on GPU 0 waits for streams"});
  partner_came = true;
  emulated::Gpu::get().wake();
  one.stream.synchronize();
  DeviceArena{8};
  expect_faults({});
}

BOOST_AUTO_TEST_CASE(copies_between_peers_may_lose_bits) {
  const emulated::Machine machine(2);
  const OnEach one(1);
  const OnEach zero(0);
  launch_store(zero.stream, zero.at(), 7);
  emulated::host.corrupts_copies = true;
  const auto copied = [&] {
    check_cuda(cudaMemcpyPeerAsync(one.at(), 1, zero.at(), 0, sizeof(int), zero.stream),
               "cudaMemcpyPeerAsync");
    zero.stream.synchronize();
    return *one.at();
  };
  BOOST_TEST(copied() == 7);  // through the host
  check_cuda(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  BOOST_TEST(copied() != 7);
}

BOOST_AUTO_TEST_CASE(a_capture_needs_all_its_streams_joined) {
  const emulated::Machine machine(2);
  const OnEach one(1);
  const OnEach zero(0);
  const auto captured = [&](bool joined) {
    return detail::capture_stream(zero.stream, [&] {
      launch_store(zero.stream, zero.at(), 1);
      zero.event.record(zero.stream);
      zero.event.block(one.stream);
      {
        const OnGpu current(1);
        launch_store(one.stream, one.at(), 2);
      }
      if (!joined) return;
      one.event.record(one.stream);
      one.event.block(zero.stream);
    });
  };
  BOOST_TEST(!captured(false));
  const detail::StepGraph graph = captured(true);
  BOOST_REQUIRE(graph);
  BOOST_TEST(*one.at() == 0);
  graph.launch(zero.stream);
  zero.stream.synchronize();
  BOOST_TEST((*zero.at() == 1 && *one.at() == 2));
}

// ---- Threads

BOOST_AUTO_TEST_CASE(every_collective_is_exact_on_several_gpus) {
  for (const auto& [gpus, ranks] :
       {std::pair<std::size_t, std::size_t>{2, 2}, {4, 4}, {8, 8}, {4, 8}}) {
    on_gpus(gpus, ranks, [](auto& comm) {
      for (const bool on_host : {false, true}) {
        for (const std::size_t n : {0, 1, 1001}) {
          exercise::reductions<float>(comm, n, on_host, Average{});
          exercise::movements<float>(comm, n, on_host);
        }
      }
      exercise::variable_gathers<float>(comm, 3, false);
    });
  }
}

BOOST_AUTO_TEST_CASE(several_calls_may_be_under_way_on_several_gpus) {
  on_gpus(8, 8, [](auto& comm) {
    const std::size_t me = comm.rank().value();
    std::vector<std::span<float>> data;
    for (std::size_t c = 0; c < 5; ++c) {
      data.push_back(comm.template allocate<float>(500 + c));
      upload(comm, values<float>(me, 500 + c, c), data.back());
    }
    {
      auto a = comm.all_reduce_async(data[0], Average{});
      auto b = comm.all_reduce_async(data[1], Average{});
      auto c = comm.all_reduce_async(data[2], Average{});
      c.wait();
      comm.all_reduce(data[3], Average{});
      while (!a.test()) std::this_thread::yield();
    }
    comm.broadcast(data[4], Rank{3});
    for (std::size_t c = 0; c < 4; ++c) {
      require_equal(download(comm, data[c]), reduced<float>(Average{}, 8, 500 + c, c),
                    "call " + std::to_string(c));
    }
    require_equal(download(comm, data[4]), values<float>(3, 504, 4), "broadcast");
  });
}

// All ranks have made the call, and a GPU has yet to do it.
BOOST_AUTO_TEST_CASE(leaving_a_call_by_an_exception_waits_for_the_gpus) {
  std::atomic<bool> has_computed = false;
  std::barrier<> together(2);
  on_gpus(2, 2, [&](auto& comm) {
    const std::span<float> data = comm.template allocate<float>(100);
    upload(comm, std::vector<float>(100, 1), data);
    const bool is_slow = comm.rank() == Rank{1};
    together.arrive_and_wait();  // to allocate waits for all GPUs
    if (is_slow) {
      emulated::Gpu::get().enqueue(
          comm.gpu().stream(), {[] {}, nullptr, nullptr, 0, [&] { return has_computed.load(); }});
    }
    std::jthread computes;
    try {
      auto work = comm.all_reduce_async(data);
      together.arrive_and_wait();
      if (is_slow) {
        computes = std::jthread([&] {
          std::this_thread::sleep_for(50ms);
          has_computed = true;
          emulated::Gpu::get().wake();
        });
      }
      throw std::runtime_error("out of luck");
    } catch (const std::runtime_error&) {
      require(has_computed, "the GPU will use memory that the program has back");
    }
    require_equal(download(comm, data), std::vector<float>(100, 2), "the sum");
  });
}

BOOST_AUTO_TEST_CASE(groups_of_ranks_use_their_gpus) {
  on_gpus(4, 8, [](auto& comm) {
    auto row = join_groups(comm, Grid<8, 4>{});
    exercise::reductions<float>(row, 99, false, Average{});
    auto odd = new_group(comm, {Rank{1}, Rank{7}, Rank{3}});
    if (odd) exercise::movements<float>(*odd, 99, false);
  });
}

// A step of compute, a collective, a message and compute again, over and over.
BOOST_AUTO_TEST_CASE(a_step_of_all_gpus_is_captured_and_replayed) {
  for (const auto& [gpus, ranks] :
       {std::pair<std::size_t, std::size_t>{2, 2}, {4, 4}, {8, 8}, {2, 4}}) {
    on_gpus(gpus, ranks, [](auto& comm) {
      RingStep step(comm, 77);
      for (int round = 0; round < 5; ++round)
        step.check(round, [](const auto& replay) { replay(); });
    });
  }
}

BOOST_AUTO_TEST_CASE(ranks_that_are_threads_are_fed) {
  for (const std::size_t ranks : {2, 4}) {
    on_gpus(2, ranks, [](auto& comm) {
      fed::check<DistributedSampler<Masked, TorchShuffle>>(
          comm, {{7, 29}}, [&] { return detail::OnGpu(comm.gpu().index()); });
    });
  }
}

BOOST_AUTO_TEST_SUITE_END()
