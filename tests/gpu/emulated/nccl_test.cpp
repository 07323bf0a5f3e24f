// SPDX-License-Identifier: Apache-2.0
// NCCL's communicators, and hierarchies of threads and NCCL, on several GPUs: the host plays both.
#if __has_include(<nccl.h>)
#include "gpu/emulated/kernels.hpp"
//
#include <algorithm>
#include <barrier>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/fed.hpp"
#include "gpu/emulated/machine.hpp"
#include "gpu/emulated/nccl_ranks.hpp"
#include "gpu/exercise.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/comm/hierarchical/nccl.cuh"
#include "lockstep/detail/device/cuda/gpu.cuh"
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_nccl)

namespace {

using namespace lockstep;
using nccl_ranks::Job;
using nccl_ranks::run_nccl;
using thread_ranks::download;
using thread_ranks::expect_all_fine;
using thread_ranks::require;
using thread_ranks::upload;
using namespace std::chrono_literals;

namespace names {
using namespace detail::nccl;
using detail::Combining;
static_assert(data_type<double>() == ncclFloat64 && data_type<BFloat16>() == ncclBfloat16 &&
              data_type<std::int16_t>() == ncclNumTypes && data_type<std::uint8_t>() == ncclUint8 &&
              data_type<std::uint64_t>() == ncclUint64);
static_assert(reduces<Sum, float> && reduces<Average, BFloat16> && reduces<Min, std::int8_t>);
static_assert(reduce_operation<Average, float>() == ncclSum);
static_assert(reduces<PreMultipliedSum<>, Half> && !reduces<Sum, std::int16_t>);
static_assert(!reduces<Min, float> && !reduces<BitXor, std::uint32_t>);
static_assert(reduce_operation<Combining<Average>, float>() == ncclSum &&
              reduce_operation<Combining<PreMultipliedSum<>>, float>() == ncclSum &&
              reduce_operation<Combining<Product>, double>() == ncclProd &&
              !reduces<Combining<Max>, float>);
static_assert(factors_of<BFloat16>(Average{}, 3) == Factors{1, 1, 3});
static_assert(factors_of<Half>(Average{}, 3) == Factors{0.25, 1, 0.75});
static_assert(factors_of<Half>(Average{}, 8) == Factors{0.125, 1, 1});
}  // namespace names
static_assert(detail::CapturingCommunicator<CudaLoopbackCommunicator>);
static_assert(detail::JointlyCapturing<ThreadCommunicator<>> &&
              detail::StreamOrdering<ThreadCommunicator<>>);
static_assert(detail::CapturingCommunicator<NcclCommunicator<>> &&
              !detail::JointlyCapturing<NcclCommunicator<>>);
static_assert(ArenaAllocating<NcclCommunicator<>> && AsyncReducing<NcclCommunicator<2>> &&
              Splitting<NcclCommunicator<>>);
static_assert(ArenaAllocating<ThreadCommunicator<>> && AsyncReducing<ThreadCommunicator<2>> &&
              Splitting<ThreadCommunicator<>>);
static_assert(ArenaAllocating<CudaLoopbackCommunicator> &&
              AsyncReducing<CudaLoopbackCommunicator> && Splitting<CudaLoopbackCommunicator>);

/// Two ranks on each host.
template <class F>
void run_hierarchy(Job& job, const F& f) {
  job.run(
      [](Membership member, Store& store, std::shared_ptr<Gpu> gpu) {
        member.process_ranks = 2;
        return make_threaded_nccl_communicator(member, store, "world", std::move(gpu));
      },
      f);
}

/// Numbers whose sums are exact in every type.
template <class T>
std::vector<T> numbers(Rank rank, std::size_t count) {
  std::vector<T> all(count);
  for (std::size_t i = 0; i < count; ++i)
    all[i] = T(static_cast<float>((rank.value() * 5 + i) % 7));
  return all;
}
inline float sum_at(std::size_t world, std::size_t i) {
  float sum = 0;
  for (std::size_t r = 0; r < world; ++r) sum += static_cast<float>((r * 5 + i) % 7);
  return sum;
}

/// An all-reduce in memory that is there already, compared with `expected(i)`.
template <class T, class Comm, class Op, class F>
void reduces(Comm& comm, std::span<T> data, const Op& op, const F& expected) {
  upload(comm, numbers<T>(comm.rank(), data.size()), data);
  comm.all_reduce(data, op);
  const std::vector<T> got = download(comm, data);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const T wanted = expected(i);
    if (std::memcmp(&got[i], &wanted, sizeof(T)) == 0) continue;
    throw std::runtime_error(std::string(Op::name) + ": element " + std::to_string(i) + " of " +
                             std::to_string(got.size()) + " is " + exercise::text(got[i]) +
                             ", not " + exercise::text(wanted));
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(nccl_is_exact_on_two_four_and_eight_gpus) {
  for (const std::size_t world : {2, 4, 8}) {
    Job job(world);
    run_nccl(job, [](NcclCommunicator<>& comm) {
      for (const bool on_host : {false, true}) {
        exercise::reductions<float>(comm, 1001, on_host, Average{});
        exercise::reductions<std::int16_t>(comm, 101, on_host, Sum{});
        exercise::movements<float>(comm, 257, on_host);
      }
      exercise::numbers_and_pieces(comm);
      NcclCommunicator<> pair = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), 2});
      exercise::reductions<float>(pair, 101, false, Sum{});
    });
  }
}

// Rank 1 makes the call when rank 0 has left it. NCCL must not have rank 0's memory any more then.
BOOST_AUTO_TEST_CASE(leaving_a_call_by_an_exception_ends_nccls_use_of_its_memory) {
  Job job(2);
  const auto ends = participants::run_threads(2, [&](Rank rank) {
    const Membership own = job.member(rank);
    Store store(own.host, own.port, own.secret, 60s);
    const auto gpu = std::make_shared<Gpu>(rank, rank.value());
    NcclCommunicator<> comm(own, store, "world", gpu);
    const std::span<float> data = comm.allocate<float>(100);
    upload(comm, std::vector<float>(100, 1), data);
    job.together.arrive_and_wait();
    if (rank == Rank{0}) {
      BOOST_CHECK_THROW(
          {
            auto work = comm.all_reduce_async(data);
            throw std::runtime_error("out of luck");
          },
          std::runtime_error);
      std::fill(data.begin(), data.end(), 7.0F);  // the memory is the program's again
    }
    job.together.arrive_and_wait();
    if (rank == Rank{1}) {
      static_cast<void>(error_of([&] {
        comm.all_reduce(data);
        comm.synchronize();
      }));
    }
    job.together.arrive_and_wait();
    if (rank == Rank{0})
      BOOST_TEST(std::count(data.begin(), data.end(), 7.0F) == 100, "it is written to afterwards");
    comm.barrier();
  });
  BOOST_TEST(ends[0].find("this rank gave it up: it ended with an exception") != std::string::npos,
             ends[0]);
  BOOST_TEST(ends[1].find("rank 0 failed: it ended with an exception") != std::string::npos,
             ends[1]);
}

// NCCL's own average multiplies by 1/3 in bfloat16, which is 0.2% too large.
BOOST_AUTO_TEST_CASE(averages_of_16_bits_are_rounded_once) {
  emulated::nccl::averages = 0;
  for (const std::size_t world : {3, 6}) {
    Job job(world);
    run_nccl(job, [&](NcclCommunicator<>& comm) {
      const auto mean = [&](std::size_t i) { return sum_at(world, i) / static_cast<float>(world); };
      const auto bits = comm.allocate<BFloat16>(100);
      reduces(comm, bits, Average{}, [&](std::size_t i) { return BFloat16(mean(i)); });
      const float third = 1.0F / 3;
      reduces(comm, bits, PreMultipliedSum<float>(third),
              [&](std::size_t i) { return BFloat16(sum_at(world, i) * third); });
      const auto halves = comm.allocate<Half>(100);
      reduces(comm, halves, Average{}, [&](std::size_t i) { return Half(mean(i)); });
      // The sum is beyond the range of half; the average is not.
      upload(comm, std::vector<Half>(100, Half(60000.0F)), halves);
      comm.all_reduce(halves, Average{});
      for (const Half value : download(comm, halves))
        require(value.bits() == Half(60000.0F).bits(), "an average of large numbers overflows");
    });
  }
  BOOST_TEST(emulated::nccl::averages == 0);
}

BOOST_AUTO_TEST_CASE(nothing_is_allocated_after_joining) {
  Job job(4);
  run_nccl(job, [&](NcclCommunicator<>& comm) {
    const auto data = comm.allocate<float>(5000);
    const auto all = comm.allocate<float>(5000 * 4);
    std::vector<float> little(10, 1);
    std::vector<float> much((3 << 20) + 5, 1);  // several parts
    std::vector<float> much_of_all(much.size() * 4);
    const int before = emulated::nccl::connections;
    const std::size_t found = job.allocations(comm.rank(), [&] {
      comm.all_reduce(little, Sum{});
      comm.all_reduce(much, Sum{});
      comm.all_gather(much, much_of_all);
      comm.all_reduce(data, Average{});
      comm.all_reduce(data, Max{});
      comm.all_gather(data, all);
      comm.broadcast(data, Rank{1});
      comm.reduce_scatter(all, data, Sum{});
      comm.synchronize();
    });
    require(found == 0, "CUDA was asked " + std::to_string(found) + " times for memory");
    require(emulated::nccl::connections == before, "NCCL connects in a call");
    require(little[9] == 4 && much.front() == 4 && much.back() == 4, "a sum of host memory");
    require(much_of_all.front() == 4 && much_of_all.back() == 4, "gathered host memory");
  });
}

BOOST_AUTO_TEST_CASE(memory_of_another_gpu_is_rejected_by_name) {
  Job job(2);
  std::vector<DeviceArena> arenas;
  for (std::size_t gpu = 0; gpu < 2; ++gpu) {
    const detail::OnGpu current(gpu);
    arenas.emplace_back(400);
  }
  run_nccl(job, [&](NcclCommunicator<>& comm) {
    const std::span<float> data(reinterpret_cast<float*>(arenas[1 - comm.rank().value()].data()),
                                100);
    std::string said;
    try {
      comm.all_reduce(data, Sum{});
    } catch (const Error& error) {
      said = error.what();
    }
    const std::string here = std::to_string(comm.rank().value());
    require(said.find("this rank's GPU is " + here) != std::string::npos, "it said: " + said);
    void* pooled = nullptr;  // memory of a pool is as good as any
    check_cuda(cudaMallocAsync(&pooled, 400, comm.gpu().stream()), "cudaMallocAsync");
    const std::span<float> own(static_cast<float*>(pooled), 100);
    reduces(comm, own, Sum{}, [&](std::size_t i) { return sum_at(2, i); });
    check_cuda(cudaFreeAsync(pooled, comm.gpu().stream()), "cudaFreeAsync");
  });
}

BOOST_AUTO_TEST_CASE(a_communicator_uses_its_gpu_whichever_is_current) {
  Job job(4);
  run_nccl(job, [](NcclCommunicator<>& comm) {
    check_cuda(cudaSetDevice(0), "cudaSetDevice");
    const auto data = comm.allocate<BFloat16>(1000);
    reduces(comm, data, Average{}, [](std::size_t i) { return BFloat16(sum_at(4, i) / 4); });
    NcclCommunicator<> all = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), 4});
    const auto others = all.allocate<float>(1000);
    reduces(all, others, Max{}, [](std::size_t i) {
      float most = 0;
      for (std::size_t r = 0; r < 4; ++r) most = std::max(most, float((r * 5 + i) % 7));
      return most;
    });
  });
}

namespace {

struct Entry {
  float gradient = 0;
};

/// A model whose gradients are the batch: its parameters become minus their average.
struct Slope {
  using Parameters = ParameterList<Parameter<"w", float, 40>>;

  void initialize(auto&) {}
  void forward(auto& step, const Entry&) {
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
  void backward(auto& step, const Entry& entry) {
    auto* const to = step.grad("w"_p).data_handle();
    std::vector<std::remove_pointer_t<decltype(to)>> values(40);
    for (auto& value : values) value = std::remove_pointer_t<decltype(to)>(entry.gradient);
    check_cuda(cudaMemcpyAsync(to, values.data(), values.size() * sizeof values[0],
                               cudaMemcpyDefault, step.stream()),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(step.stream()), "cudaStreamSynchronize");
    step.ready("w"_p);
  }
};

template <class... Ps>
using SlopeDdp = detail::BasicDdp<Slope, CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Ps...>,
                                  NcclCommunicator<>>;

/// Every parameter, or gradient, is this number.
void require_all(auto& comm, const auto& view, float wanted, const char* what) {
  using T = std::remove_const_t<typename std::remove_cvref_t<decltype(view)>::value_type>;
  const std::span<T> data(const_cast<T*>(view.data_handle()), view.size());
  for (const T value : download(comm, data)) {
    require(static_cast<float>(value) == wanted,
            std::string(what) + " is " + exercise::text(value) + ", not " + exercise::text(wanted));
  }
}

}  // namespace

// The division by the number of ranks is the update's: in no pass of its own, and in no norm.
BOOST_AUTO_TEST_CASE(gradients_of_16_bits_are_averaged_exactly) {
  for (const std::size_t world : {3, 6}) {
    Job job(world);
    run_nccl(job, [&](NcclCommunicator<>& comm) {
      const float mean = static_cast<float>(world + 1) / 2;
      const Entry own{static_cast<float>(comm.rank().value() + 1)};
      // The norm of averages is below the limit, that of sums above.
      SlopeDdp<Precision<Mixed<BFloat16>>, Clip<30>> bits(comm);
      bits.optimizer().lr = 1;
      bits.step(own);
      bits.for_each_state([&](std::string_view, std::string_view, const auto& masters) {
        require_all(comm, masters, -mean, "a master weight after a step");
      });
      auto averaged = bits.forward(own).backward().reduce();
      require_all(comm, averaged.grad("w"_p), mean, "a gradient after reduce");
      std::move(averaged).update();
      require_all(comm, bits.param("w"_p), -2 * mean, "a parameter after phases");

      // The sum of these is beyond the range of half.
      SlopeDdp<Precision<Mixed<Half>>> halves(comm);
      halves.optimizer().lr = 65536;  // the first loss scale
      halves.step(Entry{60000});
      require_all(comm, halves.param("w"_p), -60000, "a parameter of half");
    });
  }
}

// Two hosts with two ranks each, and four hosts: every kind of call, more data than
// memory was taken for, and groups.
BOOST_AUTO_TEST_CASE(hierarchies_are_exact_and_allocate_between_calls_only) {
  for (const std::size_t world : {4, 8}) {
    Job job(world);
    run_hierarchy(job, [&](ThreadedNccl& comm) {
      // Of four ranks, the first call has several parts, and the others need more memory.
      const auto large = comm.allocate<double>(world == 4 ? (1 << 19) + 5 : 5001);
      const auto bits = comm.allocate<BFloat16>(1001);
      const auto own = comm.allocate<double>(world == 4 ? 132'001 : 1001);
      const auto all = comm.allocate<double>(own.size() * world);
      const auto sums = [&] {
        reduces(comm, large, Sum{}, [&](std::size_t i) { return double(sum_at(world, i)); });
      };
      const auto calls = [&] {
        reduces(comm, bits, Average{}, [&](std::size_t i) {
          return BFloat16(sum_at(world, i) / static_cast<float>(world));
        });
        upload(comm, numbers<double>(comm.rank(), own.size()), own);
        comm.all_gather(own, all);
        const std::vector<double> gathered = download(comm, all);
        for (std::size_t i = 0; i < gathered.size(); ++i) {
          const std::size_t wanted = (i / own.size() * 5 + i % own.size()) % 7;
          if (gathered[i] != double(wanted)) throw std::runtime_error("all_gather");
        }
        comm.broadcast(own, Rank{world - 1});
        comm.reduce_scatter(all, own, Sum{});
        comm.reduce(own.first(1001), Rank{1}, Max{});
        require(comm.all_reduce(std::size_t{1}) == world, "a number");
      };
      sums();
      calls();
      const int before = emulated::nccl::connections;
      require(job.allocations(comm.rank(),
                              [&] {
                                sums();
                                calls();
                              }) == 0,
              "CUDA was asked for memory");
      require(emulated::nccl::connections == before, "NCCL connects in a call");
      comm.reserve(5'000'000);
      require(job.allocations(comm.rank(), sums) == 0, "what was foreseen is not there");
      ThreadedNccl group = join_groups(comm, Grid<dynamic, dynamic>{comm.world_size(), 4});
      const auto some = group.allocate<float>(100);
      reduces(group, some, Sum{}, [](std::size_t i) { return sum_at(4, i); });
    });
  }
}

// Two hosts with two ranks each. A step allocates nothing, not even the first.
BOOST_AUTO_TEST_CASE(ddp_trains_on_a_hierarchy) {
  Job job(4);
  run_hierarchy(job, [&](ThreadedNccl& comm) {
    using Policies = CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Accumulate<2>>;
    for (int round = 0; round < 2; ++round) {
      detail::BasicDdp<Slope, Policies, ThreadedNccl> ddp(comm);
      ddp.optimizer().lr = 1;
      const Entry own{static_cast<float>(comm.rank().value() + 1)};
      const std::size_t found = job.allocations(comm.rank(), [&] {
        for (int batch = 0; batch < 4; ++batch) ddp.step(own);
        comm.synchronize();
      });
      require(found == 0, "CUDA was asked " + std::to_string(found) + " times for memory");
      require_all(comm, ddp.param("w"_p), -5, "a parameter after two updates");
    }
    job.together.arrive_and_wait();  // all have freed their memory
  });
}

// Every rank takes its time before each call, so that one allocates while others wait for it.
BOOST_AUTO_TEST_CASE(ranks_of_a_hierarchy_may_come_late) {
  Job job(4);
  run_hierarchy(job, [&](ThreadedNccl& comm) {
    check_cuda(cudaSetDevice(0), "cudaSetDevice");  // of three ranks, another's
    for (std::size_t round = 0; round < 6; ++round) {
      std::this_thread::sleep_for(std::chrono::milliseconds((comm.rank().value() * 7 + round) % 4));
      const auto data = comm.allocate<float>(1000 << round);
      reduces(comm, data, Sum{}, [&](std::size_t i) { return sum_at(4, i); });
      const auto all = comm.allocate<float>(4 * data.size());
      comm.all_gather(data, all);
    }
  });
}

// On a communicator and a stream of their own, while the rank adds numbers on its GPU.
BOOST_AUTO_TEST_CASE(ranks_are_fed_through_nccl_while_they_compute) {
  struct Both {
    NcclCommunicator<> work;
    NcclCommunicator<> feed;
    void barrier() { work.barrier(); }
  };
  Job job(4);
  job.run(
      [](const Membership& member, Store& store, std::shared_ptr<Gpu> gpu) {
        auto second = std::make_shared<Gpu>(gpu->rank(), gpu->index());
        NcclCommunicator<> work(member, store, "world", std::move(gpu));
        return Both{std::move(work), NcclCommunicator<>(member, store, "feed", std::move(second))};
      },
      [](Both& both) {
        const auto select = [&] { return detail::OnGpu(both.feed.gpu().index()); };
        using Sampler = DistributedSampler<Masked, TorchShuffle>;
        fed::check<Sampler>(both.feed, {{7}}, select);
        detail::FeedLine<NcclCommunicator<>&, decltype(select)> line(
            both.feed, fed::route_of(2, true, both.feed.world_size(), both.feed.rank()), select);
        const fed::Numbers numbers{90, line.reads()};
        Sampler sampler(90, both.feed.world_size(), both.feed.rank());
        DataLoader<fed::Numbers, Sampler, detail::FedBatches<fed::Numbers, Sampler, decltype(line)>>
            loader(numbers, sampler, {.batch_size = 4}, line);
        const auto sums = both.work.allocate<float>(1000);
        std::size_t k = 0;
        for (const fed::Rows& batch : loader) {
          for (const std::size_t sample : batch.samples)
            require(sample == sampler[k++], "another sample");
          both.work.all_reduce(sums, Sum{});
        }
        require(k == sampler.size(), "other samples");
      });
}

BOOST_AUTO_TEST_SUITE_END()
#endif
