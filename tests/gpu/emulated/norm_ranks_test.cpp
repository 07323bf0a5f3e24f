// SPDX-License-Identifier: Apache-2.0
// Norms that take statistics over several GPUs, which the host plays, by call and in graphs; and
// buffers that are averaged there.
#if __has_include(<nccl.h>)
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/emulated/nccl_ranks.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_norm_ranks)

namespace {

using namespace lockstep;
using thread_ranks::require;

template <class T>
T downloaded(const T* from) {
  T value{};
  check_cuda(cudaMemcpy(&value, from, sizeof value, cudaMemcpyDefault), "cudaMemcpy");
  return value;
}

/// A layer that gathers a number of every rank in forward, and adds them up in backward.
struct Layer {
  using Parameters = ParameterList<Parameter<"w", double, 4>, Parameter<"v", double, 4>>;
  using Buffers = BufferList<Buffer<"last", double, 1>, Buffer<"mine", double, 1>,
                             Buffer<"count", std::int64_t, 1>>;
  static constexpr std::size_t most = 8;

  /// The rank's own number, all numbers, and their sum.
  std::shared_ptr<DeviceArena> memory = std::make_shared<DeviceArena>((most + 2) * sizeof(double));
  double* own() const { return reinterpret_cast<double*>(memory->data()); }
  double* all() const { return own() + 1; }
  double* sum() const { return own() + 1 + most; }

  void forward(auto& step, const auto&) {
    const auto& ranks = step.norm_ranks();
    if constexpr (std::remove_cvref_t<decltype(ranks)>::communicates) {
      ranks.all_gather(std::span<const double>(own(), 1), std::span(all(), ranks.world()));
      copy(step, step.buffer("last"_p).data_handle(), all() + ranks.world() - 1);
    } else {
      copy(step, step.buffer("last"_p).data_handle(), own());
    }
    copy(step, step.buffer("mine"_p).data_handle(), own());
    copy(step, step.loss(), own());
  }
  void backward(auto& step, const auto&) {
    set(step, "v"_p, own());
    const auto& ranks = step.norm_ranks();
    copy(step, sum(), own());
    if constexpr (std::remove_cvref_t<decltype(ranks)>::communicates)
      ranks.all_reduce(std::span(sum(), 1));
    set(step, "w"_p, sum());
  }

  static void copy(auto& step, double* to, const double* from) {
    check_cuda(cudaMemcpyAsync(to, from, sizeof(double), cudaMemcpyDeviceToDevice, step.stream()),
               "copy");
  }
  static void set(auto& step, auto key, const double* from) {
    const auto gradient = step.grad(key);
    check_cuda(
        cudaMemsetAsync(gradient.data_handle(), 0, gradient.size() * sizeof(double), step.stream()),
        "cudaMemsetAsync");
    copy(step, gradient.data_handle(), from);
    step.ready(key);
  }
};

/// A rank's number in a step.
double number(std::size_t rank, std::size_t step) {
  return static_cast<double>((rank + 1) * (step + 2));
}

/// The sum of all ranks' numbers.
double sum_of(std::size_t world, std::size_t step) {
  double sum = 0;
  for (std::size_t r = 0; r < world; ++r) sum += number(r, step);
  return sum;
}

template <class T>
void upload(T* to, const T& value) {
  check_cuda(cudaMemcpy(to, &value, sizeof value, cudaMemcpyDefault), "cudaMemcpy");
}

void zero(auto& initial) { initial.param("w"_p)(0) = 0; }

/// Trains with statistics over groups of `group` ranks, and averages buffers after every step.
template <class... Ps, class Comm>
void train_ranks(Comm& comm, std::size_t group) {
  const std::size_t world = comm.world_size().value();
  const std::size_t me = comm.rank().value();
  const std::size_t last = me / group * group + group - 1;
  detail::BasicDdp<Layer,
                   CanonicalPolicies<Device<Cuda>, Buckets<BucketLimits{0, 0}>,
                                     lockstep::Buffers<Synced>, Ps...>,
                   Comm>
      ddp(comm);
  ddp.initialize([](auto& initial) { zero(initial); });
  ddp.optimizer().lr = 1;
  double w = 0;
  for (std::size_t s = 0; s < 6; ++s) {
    const std::string step = "step " + std::to_string(s) + ": ";
    const auto look = [&](auto view) {
      comm.synchronize();
      return downloaded(view.data_handle());
    };
    const double mine = number(me, s);
    upload(ddp.model().own(), mine);
    upload(ddp.buffer("count"_p).data_handle(), static_cast<std::int64_t>(7 + me));
    const double loss = ddp.step(0);
    require(loss == mine, step + "the loss is another");
    w -= static_cast<double>(group) / static_cast<double>(world) * sum_of(world, s);
    require(look(ddp.param("w"_p)) == w, step + "the parameter is another");
    require(look(ddp.buffer("last"_p)) == number(last, s), step + "the group's last is another");
    require(look(ddp.buffer("mine"_p)) == mine, step + "a step has averaged");
    ddp.synchronize_buffers();
    require(look(ddp.buffer("mine"_p)) == sum_of(world, s) / static_cast<double>(world),
            step + "no average");
    require(look(ddp.buffer("count"_p)) == static_cast<std::int64_t>(6 + world),
            step + "not the largest count");
    if (me != 0) continue;  // an evaluation communicates nothing
    const double evaluated = ddp.evaluate(0);
    require(evaluated == mine, step + "the evaluation is another");
    require(look(ddp.buffer("last"_p)) == mine, step + "an evaluation has met others");
  }
  if constexpr ((std::is_same_v<Ps, CapturedStep> || ...))
    require(ddp.template captured_graphs<int>() == 1, "nothing was captured");
}

template <class F>
void run_nccl(std::size_t world, const F& f) {
  nccl_ranks::Job job(world);
  nccl_ranks::run_nccl(job, f);
}

}  // namespace

BOOST_AUTO_TEST_CASE(norms_of_threads_are_taken_in_captured_steps) {
  for (const std::size_t world : {2, 4}) {
    const emulated::Machine machine(world);
    thread_ranks::expect_all_fine(thread_ranks::run(
        world, [&](auto& comm) { train_ranks<Norms<Synced>, CapturedStep>(comm, world); }));
  }
}

BOOST_AUTO_TEST_CASE(norms_are_taken_over_nccl_by_call_and_within_groups_in_graphs) {
  for (const std::size_t world : {1, 2})
    run_nccl(world, [&](auto& comm) { train_ranks<Norms<Synced>>(comm, world); });
  run_nccl(4, [](auto& comm) {
    train_ranks<Norms<Synced, WithinGroup>, Groups<Grid<dynamic, 2>>, CapturedStep>(comm, 2);
  });
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_take_norms_over_their_gpus) {
  for (const std::size_t gpus : {2, 4}) {
    const emulated::Machine machine(gpus);
    DataParallel<Layer, Device<Cuda>, Norms<Synced>, lockstep::Buffers<Synced>> dp(
        {.replicas = gpus});
    dp.initialize([](auto& initial) { zero(initial); });
    dp.optimizer().lr = 1;
    double w = 0;
    for (std::size_t s = 0; s < 3; ++s) {
      std::size_t replica = 0;
      dp.for_each_model([&](Layer& layer) { upload(layer.own(), number(replica++, s)); });
      dp.step(train::labelled<double>(train::reference_batch(gpus, 3, 2, s, 0)));
      dp.synchronize();
      w -= sum_of(gpus, s);
      BOOST_TEST(downloaded(dp.param("w"_p).data_handle()) == w);
      BOOST_TEST(downloaded(dp.buffer("last"_p).data_handle()) == number(gpus - 1, s));
      BOOST_TEST(downloaded(dp.buffer("mine"_p).data_handle()) == number(0, s));
      dp.synchronize_buffers();
      dp.synchronize();
      BOOST_TEST(downloaded(dp.buffer("mine"_p).data_handle()) ==
                 sum_of(gpus, s) / static_cast<double>(gpus));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
#endif
