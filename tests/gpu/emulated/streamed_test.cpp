// SPDX-License-Identifier: Apache-2.0
// A hierarchy that works on a stream of its own, as Hierarchical<Shm, Nccl> does, without a GPU:
// both levels are Gloo's for GPUs, and what the library asks of CUDA is emulated.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/exercise.hpp"
#include "comm/gloo_ranks.hpp"
#include "gpu/emulated/cuda.hpp"
#include "gpu/exercise.cuh"
#include "lockstep/detail/comm/hierarchical/communicator.hpp"
#include "lockstep/detail/comm/hierarchical/two_levels.hpp"
#include "lockstep/detail/comm/staged.cuh"
#include "lockstep/detail/comm/streamed.cuh"

namespace {

using namespace ranks;

/// What kernels would do, when the stream gets to it.
class EmulatedPasses {
 public:
  explicit EmulatedPasses(cudaStream_t stream) : stream_(stream) {}

  static bool is_device(const void* data) {
    return data != nullptr && !detail::is_host_memory(data);
  }
  static bool takes(const void* data) { return is_device(data); }

  template <class T, class Value, class Op>
  void prepare(std::span<const T> from, std::span<Value> to, const Op& op) const {
    enqueue([=] { HostPasses::prepare(from, to, op); });
  }
  template <class Value, class T, class Op>
  void finish(std::span<const Value> from, std::span<T> to, const Op& op, std::size_t ranks) const {
    enqueue([=] { HostPasses::finish(from, to, op, ranks); });
  }
  template <class T, class Op>
  void combine(std::span<const T> gathered, std::span<T> out, const Op& op) const {
    if (!is_device(out.data())) return HostPasses::combine(gathered, out, op);
    enqueue([=] { HostPasses::combine(gathered, out, op); });
  }
  template <class T>
  void copy(std::span<const T> from, std::span<T> to) const {
    if (!is_device(to.data())) return HostPasses::copy(from, to);
    enqueue([=] { HostPasses::copy(from, to); });
  }

 private:
  void enqueue(std::function<void()> work) const {
    emulated::Gpu::get().enqueue(stream_, {std::move(work), nullptr, nullptr, 0});
  }

  cudaStream_t stream_;
};

/// A communicator of one level, in a stream's order.
struct Level : StagedCommunicator<GlooCommunicator<>> {
  using StagedCommunicator::StagedCommunicator;
  void raise_fault() {}
  EmulatedPasses passes() const { return EmulatedPasses(gpu().stream()); }
};

using Levels = TwoLevels<Level, Level>;
using Hierarchy = HierarchicalCommunicator<Level, Level, Levels>;
using Streamed = StreamedCommunicator<Hierarchy>;

/// Two ranks on each host.
class Columns : public Sockets {
 public:
  using Sockets::Sockets;
  Streamed join(Rank rank, WorldSize world, std::chrono::milliseconds timeout) const {
    const std::size_t host = rank.value() / 2;
    const std::size_t place = rank.value() % 2;
    auto gpu = std::make_shared<lockstep::Gpu>(rank, 0);
    auto lane = std::make_shared<lockstep::Gpu>(rank, 0);
    const auto level = [&](Rank own, std::size_t size, const std::string& name) {
      const Membership member = membership(own, WorldSize{size}, timeout);
      Store store(member.host, member.port, member.secret, 20s);
      return Level(make_gloo_communicator(member, store, name), lane);
    };
    auto inside = level(Rank{place}, 2, "host " + std::to_string(host));
    auto between = level(Rank{host}, world.value() / 2, "place " + std::to_string(place));
    std::vector<std::string> hosts;
    for (std::size_t r = 0; r < world.value(); ++r) hosts.push_back(std::to_string(r / 2));
    return {Hierarchy(std::make_unique<HierarchyStages<Level, Level, Levels>>(
                Hosts(hosts), std::move(inside), std::move(between))),
            std::move(gpu), std::move(lane)};
  }
};

Ends run_columns(std::size_t world, auto f) { return run_processes<Columns>(world, 20s, f); }

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_streamed)

BOOST_AUTO_TEST_CASE(every_collective_is_exact) {
  for (const std::size_t world : {2, 4, 6}) {
    expect_all_fine(run_columns(world, [](Streamed& comm) {
      exercise::every_operation<float>(comm, false);
      exercise::every_operation<Half>(comm, false);
      exercise::every_operation<std::int64_t>(comm, false);
      for (const bool on_host : {false, true}) {
        exercise::reductions<float>(comm, 0, on_host, Sum{});
        exercise::movements<float>(comm, 0, on_host, false);
      }
    }));
  }
  expect_all_fine(run_columns(4, [](Streamed& comm) {
    strings_of_four(comm);
    exercise::numbers_and_pieces(comm);
  }));
}

// Each call waits for what the compute stream is still writing, and what that does next for the
// call.
BOOST_AUTO_TEST_CASE(both_streams_wait_for_each_other) {
  expect_all_fine(run_columns(4, [](Streamed& comm) {
    emulated::upload_milliseconds = 20;
    constexpr std::size_t n = 1001;
    const auto upload = [&](std::span<float> data, const std::vector<float>& from) {
      check_cuda(cudaMemcpyAsync(data.data(), from.data(), data.size_bytes(),
                                 cudaMemcpyHostToDevice, comm.gpu().stream()),
                 "cudaMemcpyAsync");
    };
    const auto first = comm.allocate<float>(n);
    const auto second = comm.allocate<float>(n);
    const auto copy = comm.allocate<float>(n);
    const std::vector<float> ones(n, 1);
    const std::vector<float> twos(n, 2);
    for (int round = 0; round < 3; ++round) {
      upload(first, ones);
      auto a = comm.all_reduce_async(first);
      upload(second, twos);
      auto b = comm.all_reduce_async(second);
      a.wait();
      check_cuda(cudaMemcpyAsync(copy.data(), first.data(), copy.size_bytes(),
                                 cudaMemcpyDeviceToDevice, comm.gpu().stream()),
                 "cudaMemcpyAsync");
      b.wait();
      comm.broadcast(second, Rank{3});
      comm.synchronize();
      for (std::size_t i = 0; i < n; ++i)
        if (copy[i] != 4 || second[i] != 8)
          require(false, "element " + std::to_string(i) + " is wrong");
    }
  }));
}

BOOST_AUTO_TEST_CASE(leaving_a_call_by_an_exception_waits_for_the_lane) {
  expect_all_fine(run_columns(4, [](Streamed& comm) {
    emulated::upload_milliseconds = 50;
    const auto data = comm.allocate<float>(100);
    try {
      auto work = comm.all_reduce_async(data);
      throw std::runtime_error("out of luck");
    } catch (const std::runtime_error&) {
      std::fill(data.begin(), data.end(), 7.0F);  // the memory is the program's again
    }
    comm.barrier();
    std::this_thread::sleep_for(200ms);
    require(std::count(data.begin(), data.end(), 7.0F) == 100, "it is written to afterwards");
  }));
}

BOOST_AUTO_TEST_CASE(a_rank_that_gives_up_is_told_to_all) {
  const Ends ends = run_columns(4, [](Streamed& comm) {
    const auto data = comm.allocate<float>(100);
    comm.all_reduce(data);
    if (comm.rank() == Rank{1}) {
      comm.abort("the disk is full");
      return;
    }
    comm.all_reduce(data);
  });
  expect_words(ends, 1, {"failed"});
  // Its neighbour and its partner hear it from itself, the fourth from one of these.
  BOOST_TEST(ends[0].find("the disk is full") != std::string::npos, ends[0]);
  BOOST_TEST(ends[3].find("the disk is full") != std::string::npos, ends[3]);
}

BOOST_AUTO_TEST_SUITE_END()
