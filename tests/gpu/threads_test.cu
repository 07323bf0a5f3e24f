// SPDX-License-Identifier: Apache-2.0
// Threads on a GPU: their streams' order, calls under way, groups, steps as graphs, and faults.
#include <atomic>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/loopback.cuh"
#include "lockstep/detail/comm/threads/communicator.cuh"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "thread_ranks.cuh"

using namespace thread_ranks;

namespace {

using Comm = ThreadCommunicator<>;

constexpr std::size_t worlds[] = {1, 2, 4, 8};

__global__ void fill(float* data, std::size_t count, float value) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    data[i] = value;
  }
}

__global__ void count_wrong(const float* data, std::size_t count, float value, unsigned* wrong) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    if (data[i] != value) atomicAdd(wrong, 1u);
  }
}

/// A gradient that depends on the parameters, and a step against it.
__global__ void find_gradient(const float* x, float* gradient, std::size_t count, float target) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    gradient[i] = 1.7f * x[i] - target * static_cast<float>(i % 13);
  }
}
__global__ void descend(float* x, const float* gradient, std::size_t count) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += gridDim.x * blockDim.x) {
    x[i] -= 0.1f * gradient[i];
  }
}

/// A replica that trains a little: two buckets that are reduced while it computes, and one call of
/// each other kind.
class Replica {
 public:
  explicit Replica(Comm& comm)
      : comm_(comm),
        x_(comm.allocate<float>(2 * bucket)),
        gradient_(comm.allocate<float>(2 * bucket)),
        loss_(comm.allocate<float>(1)),
        losses_(comm.allocate<float>(comm.world_size().value())) {}

  void step() {
    const cudaStream_t stream = comm_.gpu().stream();
    const float target = 0.3f * static_cast<float>(comm_.rank().value() + 1);
    const auto first = gradient_.first(bucket);
    const auto second = gradient_.subspan(bucket);
    find_gradient<<<8, 256, 0, stream>>>(x_.data() + bucket, second.data(), bucket, target);
    auto second_work = comm_.all_reduce_async(second, Average{});
    find_gradient<<<8, 256, 0, stream>>>(x_.data(), first.data(), bucket, 2 * target);
    auto first_work = comm_.all_reduce_async(first, Average{});
    second_work.wait();
    descend<<<8, 256, 0, stream>>>(x_.data() + bucket, second.data(), bucket);
    first_work.wait();
    descend<<<8, 256, 0, stream>>>(x_.data(), first.data(), bucket);
    fill<<<1, 1, 0, stream>>>(loss_.data(), 1, target);
    check_launch("step");
    comm_.all_gather(loss_, losses_);
    comm_.all_reduce(losses_, Max{});
  }

  std::vector<float> parameters() { return download(comm_, x_); }
  std::vector<float> losses() { return download(comm_, losses_); }

 private:
  static constexpr std::size_t bucket = 10007;

  Comm& comm_;
  std::span<float> x_;
  std::span<float> gradient_;
  std::span<float> loss_;
  std::span<float> losses_;
};

/// The same bits on all ranks.
void require_agreement(Comm& comm, const std::vector<float>& mine, const std::string& what) {
  std::vector<float> roots = mine;
  comm.broadcast(roots, Rank{0});
  require_equal(mine, roots, what);
}

}  // namespace

BOOST_FIXTURE_TEST_SUITE(gpu_threads, GpuCase)

BOOST_AUTO_TEST_CASE(large_data_is_reduced_right_whatever_its_count) {
  if (no_gpu()) return;
  for (std::size_t world : worlds) {
    expect_all_fine(run(world, [](Comm& comm) {
      for (std::size_t n : {std::size_t{1} << 20, std::size_t{3'000'017}}) {
        const auto data = comm.allocate<float>(n);
        upload(comm, values<float>(comm.rank().value(), n), data);
        comm.all_reduce(data, Average{});
        require_equal(download(comm, data), reduced<float>(Average{}, comm.world_size().value(), n),
                      "average of " + std::to_string(n));
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(worlds_that_the_compiler_knows_give_the_same) {
  if (no_gpu()) return;
  const auto check = [](auto& comm) {
    const auto data = comm.template allocate<float>(5003);
    upload(comm, values<float>(comm.rank().value(), 5003), data);
    comm.all_reduce(data);
    require_equal(download(comm, data), reduced<float>(Sum{}, comm.world_size().value(), 5003),
                  "sum");
  };
  expect_all_fine(run<1>(1, check));
  expect_all_fine(run<2>(2, check));
  expect_all_fine(run<3>(3, check));
  expect_all_fine(run<8>(8, check));
  expect_words(run<4>(2, check), nobody, {"the program is for 4 ranks and the job has 2"});
}

BOOST_AUTO_TEST_CASE(work_is_ordered_with_the_compute_streams_and_the_host_does_not_wait) {
  if (no_gpu()) return;
  for (std::size_t world : {2, 8}) {
    expect_all_fine(run(world, [](Comm& comm) {
      const cudaStream_t stream = comm.gpu().stream();
      const auto large = comm.allocate<float>(1 << 20);
      const auto small = comm.allocate<float>(17);
      const auto wrong = comm.allocate<std::uint32_t>(1);
      const auto world_size = static_cast<float>(comm.world_size().value());
      const auto me = static_cast<float>(comm.rank().value());
      for (int round = 0; round < 200; ++round) {
        const auto data = round % 2 == 0 ? large : small;
        const float sum =
            world_size * static_cast<float>(round) + world_size * (world_size - 1) / 2;
        fill<<<64, 256, 0, stream>>>(data.data(), data.size(), me + static_cast<float>(round));
        comm.all_reduce(data);
        count_wrong<<<64, 256, 0, stream>>>(data.data(), data.size(), sum, wrong.data());
      }
      check_launch("count_wrong");
      const auto counted = download(comm, wrong);
      require(counted[0] == 0, std::to_string(counted[0]) + " elements were wrong");
    }));
  }
}

BOOST_AUTO_TEST_CASE(many_calls_are_under_way_and_waited_for_in_any_order) {
  if (no_gpu()) return;
  for (std::size_t world : worlds) {
    expect_all_fine(run(world, [](Comm& comm) {
      constexpr std::size_t calls = 2 * Comm::most_in_flight + 3;
      constexpr std::size_t n = 1009;
      const auto data = comm.allocate<float>(calls * n);
      upload(comm, values<float>(comm.rank().value(), calls * n), data);
      struct Held {  // a handle stays where it was made
        decltype(comm.all_reduce_async(data, Max{})) work;
      };
      std::vector<std::unique_ptr<Held>> works;
      for (std::size_t c = 0; c < calls; ++c) {
        works.emplace_back(new Held{comm.all_reduce_async(data.subspan(c * n, n), Max{})});
      }
      for (std::size_t c = calls; c-- > 0;) works[c]->work.wait();
      require_equal(download(comm, data),
                    reduced<float>(Max{}, comm.world_size().value(), calls * n), "max");
      for (const auto& held : works) require(held->work.test(), "a call is not over");
    }));
  }
}

BOOST_AUTO_TEST_CASE(memory_need_not_be_the_communicators) {
  if (no_gpu()) return;
  expect_all_fine(run(4, [](Comm& comm) {
    const DeviceArena memory(1000 * sizeof(float));
    const std::span<float> data(reinterpret_cast<float*>(memory.data()), 1000);
    upload(comm, values<float>(comm.rank().value(), 1000), data);
    comm.all_reduce(data);
    require_equal(download(comm, data), reduced<float>(Sum{}, 4, 1000), "sum");
    comm.barrier();
  }));
}

BOOST_AUTO_TEST_CASE(memory_of_a_pool_and_managed_memory_are_reduced_in_stream_order) {
  if (no_gpu()) return;
  expect_all_fine(run(4, [](Comm& comm) {
    constexpr std::size_t n = 100'003;
    const cudaStream_t stream = comm.gpu().stream();
    void* pooled = nullptr;
    check_cuda(cudaMallocAsync(&pooled, n * sizeof(float), stream), "cudaMallocAsync");
    void* managed = nullptr;
    check_cuda(cudaMallocManaged(&managed, n * sizeof(float)), "cudaMallocManaged");
    const std::span<float> in_pool(static_cast<float*>(pooled), n);
    const std::span<float> in_both(static_cast<float*>(managed), n);
    for (int round = 0; round < 3; ++round) {
      const auto mine = static_cast<float>(comm.rank().value() + round);
      const auto sum = static_cast<float>(6 + 4 * round);
      fill<<<64, 256, 0, stream>>>(in_pool.data(), n, mine);
      comm.all_reduce(in_pool);
      require_equal(download(comm, in_pool), std::vector<float>(n, sum), "in a pool");
      fill<<<64, 256, 0, stream>>>(in_both.data(), n, mine);
      comm.all_reduce(in_both);
      // The host reads at once.
      require_equal({in_both.begin(), in_both.end()}, std::vector<float>(n, sum), "managed");
      auto work = comm.all_reduce_async(in_both, Max{});
      work.wait();
      require_equal({in_both.begin(), in_both.end()}, std::vector<float>(n, sum), "managed, later");
    }
    const std::size_t me = comm.rank().value();
    fill<<<64, 256, 0, stream>>>(in_both.data(), n, static_cast<float>(me));
    if (me % 2 == 0) comm.send(in_both, Rank{me + 1});
    if (me % 2 == 1) comm.receive(in_both, Rank{me - 1});
    require_equal({in_both.begin(), in_both.end()},
                  std::vector<float>(n, static_cast<float>(me / 2 * 2)), "a managed message");
    comm.barrier();
    check_cuda(cudaFreeAsync(pooled, stream), "cudaFreeAsync");
    check_cuda(cudaFree(managed), "cudaFree");
  }));
}

BOOST_AUTO_TEST_CASE(a_nan_of_any_rank_wins) {
  if (no_gpu()) return;
  expect_all_fine(run(4, [](Comm& comm) {
    for (std::size_t bad = 0; bad < 4; ++bad) {
      const auto data = comm.allocate<float>(6);
      std::vector<float> mine(6, static_cast<float>(comm.rank().value()));
      if (comm.rank() == Rank{bad}) mine[5] = std::numeric_limits<float>::quiet_NaN();
      upload(comm, mine, data);
      comm.all_reduce(data, Max{});
      auto result = download(comm, data);
      require(result[0] == 3 && result[5] != result[5], "max");
      upload(comm, mine, data);
      comm.all_reduce(data, Min{});
      result = download(comm, data);
      require(result[0] == 0 && result[5] != result[5], "min");
    }
  }));
}

BOOST_AUTO_TEST_CASE(groups_are_communicators_of_their_own) {
  if (no_gpu()) return;
  expect_all_fine(run(4, [](Comm& comm) {
    auto pair = join_groups<Grid<4, 2>>(comm);
    require(pair.world_size() == WorldSize{2}, "a pair has two ranks");
    const auto data = pair.allocate<float>(100);
    fill<<<1, 32, 0, comm.gpu().stream()>>>(data.data(), 100,
                                            static_cast<float>(comm.rank().value()));
    pair.all_reduce(data);
    const float expected = comm.rank().value() < 2 ? 1.f : 5.f;
    require_equal(download(comm, data), std::vector<float>(100, expected), "sum of a pair");

    auto reversed = new_group(comm, {Rank{3}, Rank{1}});
    require(reversed.has_value() == (comm.rank().value() % 2 == 1), "the listed ranks are in it");
    if (reversed) {
      require(reversed->rank() == Rank{comm.rank() == Rank{3} ? 0u : 1u}, "the listed order");
      std::vector<int> host{static_cast<int>(comm.rank().value())};
      reversed->broadcast(host, Rank{0});
      require(host[0] == 3, "the root's value");
    }
    comm.barrier();
  }));
  expect_words(run(2, [](Comm& comm) { new_group(comm, {Rank{2}}); }), nobody,
               {"new_group: a rank is outside the world; list ranks of the parent, each once"});
  expect_words(
      run(2, [](Comm& comm) { new_group(comm, {comm.rank() == Rank{0} ? Rank{0} : Rank{1}}); }),
      nobody, {"called new_group(1 rank) with different arguments"});
}

BOOST_AUTO_TEST_CASE(a_step_as_a_graph_gives_the_same_bits) {
  if (no_gpu()) return;
  for (std::size_t world : worlds) {
    expect_all_fine(run(world, [](Comm& comm) {
      Replica eager(comm);
      Replica captured(comm);
      eager.step();
      captured.step();
      const auto graph = comm.capture([&] { captured.step(); });
      require(static_cast<bool>(graph), "not captured: " + graph.reason());
      for (int i = 0; i < 100; ++i) {
        eager.step();
        comm.replay(graph);
      }
      require_equal(captured.parameters(), eager.parameters(), "parameters after 100 replays");
      require_equal(captured.losses(), eager.losses(), "losses after 100 replays");
      require_agreement(comm, captured.parameters(), "parameters of rank 0");
      captured.step();
      eager.step();
      require_equal(captured.parameters(), eager.parameters(), "an eager step after replays");
    }));
  }
}

BOOST_AUTO_TEST_CASE(messages_can_be_part_of_a_graph) {
  if (no_gpu()) return;
  expect_all_fine(run(2, [](Comm& comm) {
    const auto data = comm.allocate<float>(1000);
    const bool sends = comm.rank() == Rank{0};
    const auto step = [&] {
      if (sends) {
        fill<<<1, 256, 0, comm.gpu().stream()>>>(data.data(), 1000, 7.f);
        comm.send(data, Rank{1});
        fill<<<1, 256, 0, comm.gpu().stream()>>>(data.data(), 1000, 1.f);
      } else {
        comm.receive(data, Rank{0});
      }
    };
    const auto graph = comm.capture(step);
    require(static_cast<bool>(graph), "not captured: " + graph.reason());
    for (int i = 0; i < 20; ++i) comm.replay(graph);
    require_equal(download(comm, data), std::vector<float>(1000, sends ? 1.f : 7.f), "message");
  }));
}

BOOST_AUTO_TEST_CASE(a_step_that_cannot_be_captured_on_one_rank_is_captured_on_none) {
  if (no_gpu()) return;
  for (std::size_t world : worlds) {
    expect_all_fine(run(world, [](Comm& comm) {
      const Rank culprit{comm.world_size().value() - 1};
      const bool is_culprit = comm.rank() == culprit;
      Replica replica(comm);
      Replica plain(comm);
      replica.step();
      plain.step();
      const auto expect_none = [&](const char* words, auto step) {
        const auto graph = comm.capture(step);
        require(!graph, std::string("captured, in spite of ") + words);
        require(graph.reason().find(words) != std::string::npos, "the reason is " + graph.reason());
        replica.step();
        plain.step();
        require_equal(replica.parameters(), plain.parameters(),
                      std::string("steps after ") + words);
      };
      expect_none("no luck before", [&] {
        if (is_culprit) throw std::runtime_error("no luck before");
        replica.step();
      });
      expect_none("no luck after", [&] {
        replica.step();
        if (is_culprit) throw std::runtime_error("no luck after");
        replica.step();
      });
      expect_none("lockstep: rank", [&] {
        replica.step();
        if (is_culprit) comm.synchronize();
        replica.step();
      });
      expect_none("", [&] {  // a mistake that nobody checks invalidates the capture
        replica.step();
        if (is_culprit) static_cast<void>(cudaStreamSynchronize(comm.gpu().stream()));
        replica.step();
      });
      expect_none("host memory", [&] {
        std::vector<float> loss(1);
        comm.all_reduce(loss);
        replica.step();
      });
      const auto graph = comm.capture([&] { replica.step(); });
      require(static_cast<bool>(graph), "not captured after all: " + graph.reason());
      comm.replay(graph);
      plain.step();
      require_equal(replica.parameters(), plain.parameters(), "a replay after all");
    }));
  }
}

BOOST_AUTO_TEST_CASE(replaying_nothing_is_an_error) {
  if (no_gpu()) return;
  expect_words(run(2,
                   [](Comm& comm) {
                     const auto graph = comm.capture([] { throw std::runtime_error("no"); });
                     comm.replay(graph);
                   }),
               nobody, {"there is no captured step", "no; run the step itself"});
}

BOOST_AUTO_TEST_CASE(calls_that_differ_are_errors_on_all_ranks_and_change_nothing) {
  if (no_gpu()) return;
  const auto expect = [](const std::vector<std::string>& parts, auto call) {
    expect_words(run(3,
                     [&](Comm& comm) {
                       const auto data = comm.allocate<float>(1000);
                       upload(comm, std::vector<float>(1000, 1.f), data);
                       try {
                         call(comm, data, comm.rank() == Rank{1});
                       } catch (const Error&) {
                         require_equal(download(comm, data), std::vector<float>(1000, 1.f), "data");
                         throw;
                       }
                     }),
                 nobody, parts);
  };
  expect(
      {"rank 0 called all_reduce(sum of 1000 float)", "rank 1 called all_reduce(sum of 999 float)"},
      [](Comm& comm, auto data, bool odd) { comm.all_reduce(data.first(odd ? 999 : 1000)); });
  expect({"rank 0 called broadcast(1000 float, root 0)",
          "rank 1 called broadcast(1000 float, root 1)"},
         [](Comm& comm, auto data, bool odd) { comm.broadcast(data, Rank{odd ? 1u : 0u}); });
  expect({"in device memory and rank 1 called all_reduce(sum of 1000 float) in host memory"},
         [](Comm& comm, auto data, bool odd) {
           std::vector<float> own(1000);
           comm.all_reduce(odd ? std::span<float>(own) : data);
         });
  expect({"in is device memory and out is host memory"}, [](Comm& comm, auto data, bool) {
    std::vector<float> own(3000);
    comm.all_gather(data, own);
  });
}

BOOST_AUTO_TEST_CASE(a_thread_that_dies_is_named_and_its_memory_left_alone) {
  if (no_gpu()) return;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const Ends ends = run(4, [](Comm& comm) {
      const auto data = comm.allocate<float>(1 << 20);
      for (int step = 0; step < 20; ++step) {
        auto work = comm.all_reduce_async(data);
        if (step == 11 && comm.rank() == Rank{2}) throw std::runtime_error("out of luck");
        work.wait();
      }
    });
    BOOST_TEST(ends[2] == "out of luck");
    expect_words(ends, 2, {"rank 2 failed: it ended with an exception"});
    BOOST_TEST((std::chrono::steady_clock::now() - begin < 10s));
  }
  BOOST_TEST(cudaDeviceSynchronize() == cudaSuccess);
}

BOOST_AUTO_TEST_CASE(a_thread_that_hangs_is_named_within_the_limit) {
  if (no_gpu()) return;
  std::atomic<bool> noticed = false;
  const Ends ends = run(
      2,
      [&](Comm& comm) {
        const auto data = comm.allocate<float>(100);
        comm.all_reduce(data);
        if (comm.rank() == Rank{1}) {
          while (!noticed) std::this_thread::sleep_for(1ms);
          return;
        }
        try {
          comm.all_reduce(data);
        } catch (...) {
          noticed = true;
          throw;
        }
      },
      500ms);
  expect_words(ends, 1,
               {"all_reduce(sum of 100 float): waited 500 ms for rank 1 (made 2 of 3 calls)"});
}

BOOST_AUTO_TEST_CASE(abandoning_reaches_the_others) {
  if (no_gpu()) return;
  expect_words(run(3,
                   [](Comm& comm) {
                     if (comm.rank() == Rank{1}) {
                       comm.abort("the data is broken");
                     } else {
                       comm.barrier();
                     }
                   }),
               1, {"rank 1 failed: the data is broken"});
}

BOOST_AUTO_TEST_CASE(a_program_of_threads_shares_a_gpu_only_if_it_was_asked_to) {
  if (no_gpu()) return;
  const std::size_t ranks = detail::visible_gpus() + 1;
  std::string program = "program";
  std::string option = "--ranks=" + std::to_string(ranks);
  char* argv[] = {program.data(), option.data()};
  std::atomic<int> right = 0;
  const auto train = [&](Session& session) {
    for (int i = 0; i < 3; ++i) {  // one communicator after the other, of the same name
      auto comm = make_thread_communicator(session.membership(), session.store());
      const auto data = comm.allocate<float>(10);
      upload(comm, values<float>(comm.rank().value(), 10), data);
      comm.all_reduce(data);
      require_equal(download(comm, data), reduced<float>(Sum{}, ranks, 10), "sum");
      ++right;
    }
  };
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
  BOOST_TEST(launch_threads(2, argv, train) == 1);
  BOOST_TEST(right == 0);
  ::setenv("LOCKSTEP_SHARE_GPUS", "1", 1);
  BOOST_TEST(launch_threads(2, argv, train) == 0);
  ::unsetenv("LOCKSTEP_SHARE_GPUS");
  BOOST_TEST(right == static_cast<int>(3 * ranks));
}

BOOST_AUTO_TEST_CASE(a_world_of_one_copies_and_scales) {
  if (no_gpu()) return;
  CudaLoopbackCommunicator comm(std::make_shared<Gpu>(Rank{0}, 0));
  const auto data = comm.allocate<float>(1001);
  const auto out = comm.allocate<float>(1001);
  const auto mine = values<float>(0, 1001);
  upload(comm, mine, data);
  comm.all_reduce(data, Average{});
  comm.broadcast(data, Rank{0});
  comm.all_gather(data, out);
  BOOST_TEST((download(comm, out) == mine));
  comm.all_reduce_async(out, PreMultipliedSum<float>{0.5f}).wait();
  comm.reduce_scatter(out, data, PreMultipliedSum<float>{0.5f});
  auto expected = mine;
  for (float& x : expected) x *= 0.25f;
  BOOST_TEST((download(comm, data) == expected));
  std::vector<float> host(1001);
  comm.all_to_all(data, host);
  BOOST_TEST((host == expected));
  const auto graph = comm.capture([&] { comm.all_reduce(data, PreMultipliedSum<float>{2.f}); });
  BOOST_TEST(static_cast<bool>(graph), graph.reason());
  comm.replay(graph);
  comm.replay(graph);
  BOOST_TEST((download(comm, data) == mine));
  const auto none = comm.capture([] { throw std::runtime_error("no luck"); });
  BOOST_TEST(!none);
  BOOST_TEST(none.reason() == "no luck");
  comm.barrier();
}

BOOST_AUTO_TEST_SUITE_END()
