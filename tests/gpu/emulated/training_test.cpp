// SPDX-License-Identifier: Apache-2.0
// Jobs on several GPUs that the host plays: ranks of DDP that are threads, and replicas of DP,
// train like one process on the CPU with the whole batch.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.hpp"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_training)

namespace {

using namespace lockstep;
using namespace train;
using Batch = LabelledBatch<double, std::int32_t>;
using Numbers = std::vector<double>;

constexpr std::size_t in = 7, hidden = 9, out = 3, steps = 8;

template <class Network>
Network network() {
  Network network;
  network.in = in;
  network.hidden = hidden;
  network.out = out;
  return network;
}

/// The batch of a step, for `rows` samples; every fourth is smaller, as the last of an epoch is.
Samples whole_batch(std::size_t rows, std::size_t step) {
  return reference_batch(step % 4 == 3 ? (rows + 1) / 2 : rows, in, out, step % 2, 0);
}

Numbers all_numbers(auto& job) {
  Numbers all;
  PlainMlp<1, 1, 1>::for_each_parameter(job, [&](const auto& view) {
    std::vector<double> some(view.size());
    check_cuda(cudaMemcpy(some.data(), view.data_handle(), some.size() * sizeof(double),
                          cudaMemcpyDefault),
               "cudaMemcpy");
    all.insert(all.end(), some.begin(), some.end());
  });
  return all;
}

/// What one process on the CPU makes of all batches: the losses, then the parameters.
template <class... Ps>
Numbers on_cpu(std::size_t rows) {
  using Network = PlainMlp<dynamic, dynamic, dynamic>;
  LoopbackCommunicator alone;
  detail::BasicDdp<Network, CanonicalPolicies<World<1>, Ps...>, LoopbackCommunicator> cpu(
      alone, network<Network>());
  Numbers numbers;
  for (std::size_t s = 0; s < steps; ++s) numbers.push_back(cpu.step(whole_batch(rows, s)));
  const Numbers parameters = all_numbers(cpu);
  numbers.insert(numbers.end(), parameters.begin(), parameters.end());
  return numbers;
}

/// Empty, or the first number that is not the CPU's.
std::string difference(const Numbers& got, const Numbers& want) {
  if (got.size() != want.size()) return "there are " + std::to_string(got.size()) + " numbers";
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::abs(got[i] - want[i]) <= 1e-9 * std::max(std::abs(want[i]), 1e-3)) continue;
    return "number " + std::to_string(i) + " is " + std::to_string(got[i]) + ", the CPU has " +
           std::to_string(want[i]);
  }
  return {};
}

/// Replicas over shares of the batch, on as many GPUs.
template <class Network, class... Ps>
void train_replicas(std::size_t gpus, std::size_t rows) {
  const emulated::Machine machine(gpus);
  DataParallel<Network, Device<Cuda>, Ps...> dp({.replicas = gpus}, network<Network>());
  Numbers numbers;
  for (std::size_t s = 0; s < steps; ++s) {
    numbers.push_back(dp.step(labelled<double>(whole_batch(rows, s))));
    dp.evaluate(labelled<double>(whole_batch(rows, s)));
  }
  dp.synchronize();
  const Numbers parameters = all_numbers(dp);
  numbers.insert(numbers.end(), parameters.begin(), parameters.end());
  BOOST_TEST(difference(numbers, on_cpu<Optimizer<AdamW>>(rows)) == "");
  if constexpr ((std::is_same_v<Ps, CapturedStep> || ...))
    BOOST_TEST(dp.template captured_graphs<Batch>() >= 2u);
}

}  // namespace

// The first batch of a shape runs call by call, the second is captured, others are replayed.
BOOST_AUTO_TEST_CASE(ranks_of_ddp_on_several_gpus_train_like_the_cpu) {
  using Network = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  for (const auto& [gpus, ranks] :
       {std::pair<std::size_t, std::size_t>{2, 2}, {4, 4}, {8, 8}, {2, 4}}) {
    const std::size_t share = 4;
    const Numbers want = on_cpu<Optimizer<AdamW>, Clip<0.5>>(ranks * share);
    const emulated::Machine machine(gpus);
    thread_ranks::expect_all_fine(thread_ranks::run(ranks, [&](auto& comm) {
      using Comm = std::remove_reference_t<decltype(comm)>;
      detail::BasicDdp<Network,
                       CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, Clip<0.5>, CapturedStep,
                                         Buckets<BucketLimits{300, 700}>>,
                       Comm>
          ddp(comm, network<Network>());
      Numbers numbers;
      for (std::size_t s = 0; s < steps; ++s) {
        const Samples whole = whole_batch(ranks * share, s);
        const std::size_t rows = whole.size() / ranks;
        if (rows * ranks != whole.size()) throw std::runtime_error("shares are not equal");
        Samples mine;
        whole.slice(comm.rank().value() * rows, rows, mine);
        double loss[] = {ddp.step(labelled<double>(mine))};
        comm.all_reduce(loss, Average{});
        numbers.push_back(loss[0]);
      }
      comm.synchronize();
      const Numbers parameters = all_numbers(ddp);
      numbers.insert(numbers.end(), parameters.begin(), parameters.end());
      const std::string wrong = difference(numbers, want);
      thread_ranks::require(wrong.empty(), wrong);
      thread_ranks::require(ddp.template captured_graphs<Batch>() >= 1, "nothing was captured");

      // The ranks have the same parameters, until a byte of one rank's changes.
      ddp.check_replicas();
      if (comm.rank() == Rank{1}) {
        ddp.for_each_parameter([](std::string_view, const auto& view) {
          void* const data = const_cast<void*>(static_cast<const void*>(view.data_handle()));
          check_cuda(cudaMemset(data, 0x5a, 1), "cudaMemset");
        });
        // The default stream sets the byte; the ranks' own streams do not wait for it.
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      }
      std::string said;
      try {
        ddp.check_replicas();
      } catch (const Error& error) {
        said = error.what();
      }
      thread_ranks::require(said.find("ranks have different parameters: rank 0 has \"parameter ") !=
                                    std::string::npos &&
                                said.find(" and rank 1 has ") != std::string::npos,
                            "a byte that differs is not named: " + said);
    }));
  }
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_on_several_gpus_train_like_the_cpu) {
  using Network = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  train_replicas<Network, Optimizer<AdamW>>(2, 9);
  train_replicas<Network, Optimizer<AdamW>>(4, 3);  // fewer samples than replicas
  train_replicas<Network, Optimizer<AdamW>>(8, 21);
}

// The loss is one kernel on the output device, and every replica's outputs get there.
BOOST_AUTO_TEST_CASE(replicas_of_dp_with_a_loss_of_all_outputs_train_like_the_cpu) {
  using Network = GpuSplitMlp<double, dynamic, dynamic, dynamic>;
  for (const std::size_t gpus : {2, 4, 8})
    train_replicas<Network, Optimizer<AdamW>, CapturedStep>(gpus, 2 * gpus + 3);
}

BOOST_AUTO_TEST_SUITE_END()
