// SPDX-License-Identifier: Apache-2.0
// Hooks on GPUs that the host plays: their passes do what those of the host do, and captured steps
// what steps do that run call by call.
#include "gpu/emulated/kernels.hpp"
//
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/state.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_hooks)

namespace {

using namespace lockstep;
using namespace train;

template <class T>
std::vector<std::remove_const_t<T>> downloaded(std::span<T> from) {
  std::vector<std::remove_const_t<T>> values(from.size());
  check_cuda(cudaMemcpy(values.data(), from.data(), from.size_bytes(), cudaMemcpyDefault),
             "cudaMemcpy");
  return values;
}
template <class T>
void upload(std::span<T> to, const std::vector<T>& from) {
  detail::copy_now(to.data(), from.data(), to.size_bytes());
}

using Host = detail::HookDevice<Cpu>;

template <class T>
std::vector<T> random_values(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

template <class T>
void require_close(const std::vector<T>& got, std::span<const T> want, double tolerance,
                   const char* what) {
  using A = detail::Accumulator<T>;
  BOOST_REQUIRE(got.size() == want.size());
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(static_cast<A>(got[i])) -
                                     static_cast<double>(static_cast<A>(want[i]))));
  BOOST_TEST(worst <= tolerance, what << " differ by " << worst);
}

/// A bucket of matrices and vectors with gaps between them, and rows of more than a block's length.
detail::LowRankPlan make_plan(std::mt19937& random, std::size_t rank, bool feedback) {
  detail::LowRankPlan plan;
  plan.feedback = feedback;
  plan.seed = random();
  std::size_t first = 0;
  for (std::size_t t = 0; t != 5; ++t) {
    const std::size_t rows = random() % 40 + 1;
    const std::size_t columns = random() % (t == 3 ? 700 : 40) + 1;
    if (t % 2 == 0) {
      plan.add_whole({.first = first, .rows = rows});
      first += rows + 64;
    } else {
      plan.add_matrix({t, first, rows, columns}, rank);
      first += rows * columns + 32;
    }
  }
  return plan;
}

/// Both do the same with the same gradients, as if the ranks' average were what this rank sends.
template <class T>
void compare_low_rank(std::size_t rank, bool feedback, double tolerance) {
  std::mt19937 random(static_cast<unsigned>(3 * rank + feedback));
  const detail::LowRankPlan plan = make_plan(random, rank, feedback);
  LoopbackCommunicator alone;
  Host device(alone);
  detail::LowRank<T, Host> host(device, plan);
  detail::HookDevice<Cuda> on_gpu(cudaStream_t{});
  detail::LowRank<T, detail::HookDevice<Cuda>> gpu(on_gpu, plan);
  const std::size_t count = 30000;
  detail::DeviceElements<T> memory(count), first_memory(plan.first_round()),
      second_memory(plan.q_count);
  const std::span<T> values = memory, first = first_memory, second = second_memory;
  std::vector<T> host_first(plan.first_round()), host_second(plan.q_count);
  for (std::uint64_t step = 5; step != 8; ++step) {
    std::vector<T> gradients = random_values<T>(random, count);
    upload(values, gradients);
    if (step == 7) {
      host.forget_q();
      gpu.forget_q();
    }
    host.project(gradients, host_first, step);
    gpu.project(values, first, step);
    require_close(downloaded(first), std::span<const T>(host_first), 40 * tolerance, "P");
    // What the host has sent has come: rounding does not pile up over steps.
    upload(first, host_first);
    host.project_back(gradients, host_first, host_second);
    gpu.project_back(values, first, second);
    require_close(downloaded(second), std::span<const T>(host_second), 40 * tolerance, "Q");
    upload(second, host_second);
    host.restore(gradients, host_first, host_second);
    gpu.restore(values, first, second);
    require_close(downloaded(values), std::span<const T>(gradients), 20 * tolerance, "gradients");
    for (const auto& matrix : plan.matrices) {
      if (feedback)
        require_close(downloaded(gpu.residual_of(matrix)),
                      std::span<const typename decltype(host)::A>(host.residual_of(matrix)),
                      20 * tolerance, "residuals");
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(low_rank_passes_do_what_the_hosts_do) {
  const emulated::Machine machine(1);
  for (const std::size_t rank : {1, 2, 3, 11}) {
    compare_low_rank<float>(rank, true, 1e-4);
    compare_low_rank<BFloat16>(rank, rank % 2 == 0, 2e-2);
  }
  compare_low_rank<double>(2, false, 1e-12);
}

namespace {

using Network = GpuPlainMlp<double, dynamic, dynamic, dynamic>;

struct Result {
  std::vector<double> numbers;  // losses, parameters and bytes of all ranks
  friend bool operator==(const Result&, const Result&) = default;
};

template <class Comm, class... Hook>
using Job = detail::BasicDdp<Network,
                             CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, CapturedStep,
                                               Buckets<BucketLimits{600, 1500}>, Hooks<Hook...>>,
                             Comm>;

Network make_network() {
  Network network;
  network.in = 12;
  network.hidden = 16;
  network.out = 5;
  return network;
}
auto batch_of(std::size_t s, std::size_t rank) {
  return labelled<double>(reference_batch(6, 12, 5, s % 3, rank));
}

/// Ten steps; the network may forbid that they are captured.
template <class... Hook>
Result train_hooked(bool captures) {
  constexpr std::size_t ranks = 2;
  Result result;
  std::vector<std::vector<double>> all(ranks);
  const emulated::Machine machine(ranks);
  thread_ranks::expect_all_fine(thread_ranks::run(ranks, [&](auto& comm) {
    Network network = make_network();
    network.waits = !captures;
    Job<std::remove_reference_t<decltype(comm)>, Hook...> ddp(comm, std::move(network));
    std::vector<double>& numbers = all[comm.rank().value()];
    for (std::size_t s = 0; s < 10; ++s)
      numbers.push_back(ddp.step(batch_of(s, comm.rank().value())));
    comm.synchronize();
    PlainMlp<1, 1, 1>::for_each_parameter(ddp, [&](const auto& view) {
      const auto some = downloaded(std::span<const double>(view.data_handle(), view.size()));
      numbers.insert(numbers.end(), some.begin(), some.end());
    });
    numbers.push_back(static_cast<double>(ddp.bytes_sent()));
    const bool captured = ddp.template captured_graphs<LabelledBatch<double, std::int32_t>>() != 0;
    thread_ranks::require(captured == captures, "steps are captured where they can be");
  }));
  for (const auto& numbers : all)
    result.numbers.insert(result.numbers.end(), numbers.begin(), numbers.end());
  return result;
}

/// A job that goes on from a copy of another ends with its bits, hooks and all.
template <class... Hook>
void go_on_hooked() {
  const emulated::Machine machine(2);
  thread_ranks::expect_all_fine(thread_ranks::run(2, [&](auto& comm) {
    using Own = Job<std::remove_reference_t<decltype(comm)>, Hook...>;
    const std::string wrong =
        go_on([&] { return std::make_unique<Own>(comm, make_network()); },
              [&](Own& job, std::size_t s) { job.step(batch_of(s, comm.rank().value())); }, 7, 6);
    thread_ranks::require(wrong.empty(), wrong);
  }));
}

constexpr PowerSgdOptions early{2};

}  // namespace

BOOST_AUTO_TEST_CASE(captured_steps_of_hooks_have_the_bits_of_others) {
  using Power = PowerSGD<2, early>;
  BOOST_TEST((train_hooked<Power, CompressTo<float>>(true) ==
              train_hooked<Power, CompressTo<float>>(false)));
  BOOST_TEST((train_hooked<LocalSGD<3>>(true) == train_hooked<LocalSGD<3>>(false)));
}

BOOST_AUTO_TEST_CASE(captured_jobs_with_hooks_go_on) {
  go_on_hooked<PowerSGD<2, early>, CompressTo<float>>();
  go_on_hooked<LocalSGD<3>>();
}

BOOST_AUTO_TEST_SUITE_END()
