// SPDX-License-Identifier: Apache-2.0
// What jobs keep on GPUs that the host plays: copied out between two steps while steps go on,
// converted where types differ, and copied into a job made anew.
#include "gpu/emulated/kernels.hpp"
//
#include <barrier>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/comm/loopback.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/state.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_kept)

namespace {

using namespace lockstep;
using namespace train;

using Network = GpuPlainMlp<float, 7, 9, 3>;
using ShapedNetwork = GpuPlainMlp<float, dynamic, dynamic, dynamic>;

template <class Net>
Net network() {
  Net net;
  net.in = 7;
  net.hidden = 9;
  net.out = 3;
  return net;
}

auto batch_of(std::size_t s, std::size_t rank, std::size_t rows = 4) {
  return labelled<float>(reference_batch(rows, 7, 3, s % 2, rank));
}

/// Ranks of DDP that are threads, on as many GPUs.
template <class Net, class... Ps>
void ranks_case(std::size_t world, std::size_t before) {
  const emulated::Machine machine(world);
  thread_ranks::expect_all_fine(thread_ranks::run(world, [&](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job = detail::BasicDdp<Net, CanonicalPolicies<Device<Cuda>, Ps...>, Comm>;
    const std::string wrong = go_on(
        [&] { return std::make_unique<Job>(comm, network<Net>()); },
        [&](Job& job, std::size_t s) { job.step(batch_of(s, comm.rank().value())); }, before, 5);
    thread_ranks::require(wrong.empty(), wrong);
  }));
}

/// A model that keeps tensors in types other than those that it declares.
struct Kinds {
  static constexpr std::size_t many = 2'200'000;  // more than a window of 16-bit elements
  using Parameters = ParameterList<Parameter<"still", float, many>, Parameter<"trained", float, 5>>;
  using Buffers = BufferList<Buffer<"mean", float, 3>, Buffer<"count", std::int64_t, 2>,
                             Buffer<"wide", Half, 4>>;
  void initialize(auto& initial) const {
    for (std::size_t i = 0; i < many; ++i) initial.param("still"_p)(i) = number(i);
    for (std::size_t i = 0; i < 5; ++i) initial.param("trained"_p)(i) = 1.0f / number(i);
    for (std::size_t i = 0; i < 3; ++i) initial.buffer("mean"_p)(i) = number(i);
    for (std::size_t i = 0; i < 2; ++i)
      initial.buffer("count"_p)(i) = (std::int64_t{1} << 60) + static_cast<std::int64_t>(i);
    for (std::size_t i = 0; i < 4; ++i) initial.buffer("wide"_p)(i) = Half(number(i));
  }
  /// Exact in 16 bits.
  static float number(std::size_t i) { return static_cast<float>(i % 200 + 1); }
  void forward(auto&, const int&) {}
  void backward(auto& step, const int&) { step.ready("trained"_p); }
};

template <class T>
std::vector<T> downloaded(const void* data, std::size_t count) {
  std::vector<T> values(count);
  check_cuda(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return values;
}

}  // namespace

BOOST_AUTO_TEST_CASE(captured_ranks_with_masters_go_on) {
  for (const std::size_t before : {0, 4, 6})
    ranks_case<Network, Optimizer<AdamW>, Precision<Mixed<BFloat16>>, CapturedStep, Accumulate<2>,
               Frozen<"fc2.*">>(2, before);
}

BOOST_AUTO_TEST_CASE(scaled_losses_and_counts_of_single_parameters_go_on) {
  for (const std::size_t before : {3, 6})
    ranks_case<ShapedNetwork, Optimizer<AdamW>, Precision<Mixed<Half>>, UnusedParameters<Zero>,
               ParameterGroups<NoDecay<>>, Accumulate<3>>(2, before);
}

BOOST_AUTO_TEST_CASE(replicas_on_several_gpus_go_on) {
  for (const std::size_t gpus : {1, 2}) {
    const emulated::Machine machine(gpus);
    using Job = DataParallel<Network, Device<Cuda>, Optimizer<AdamW>, CapturedStep, Accumulate<2>>;
    const std::string wrong =
        go_on([&] { return std::make_unique<Job>(DpOptions{.replicas = gpus}); },
              [](Job& job, std::size_t s) { job.step(batch_of(s, 0, 5)); }, 6, 5);
    BOOST_TEST(wrong == "");
  }
}

BOOST_AUTO_TEST_CASE(files_have_declared_types_whatever_is_held) {
  const emulated::Machine machine(1);
  thread_ranks::expect_all_fine(thread_ranks::run(1, [](auto& comm) {
    using thread_ranks::require;
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job = detail::BasicDdp<Kinds,
                                 CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Frozen<"still">,
                                                   Precision<Mixed<BFloat16, BFloat16, float>>>,
                                 Comm>;
    Job job(comm);
    std::vector<detail::StateEntry> pieces;
    job.list_state(detail::StateUse::saving, pieces);
    require(pieces.size() == 5, "two parameters and three buffers");
    const auto memory = job.make_state_memory(bytes_of(pieces));
    const auto copies = copies_to(memory.data(), pieces);
    job.copy_out(copies);
    job.await_copies();
    const auto kept = [&]<class T>(std::size_t k, T) {
      require(pieces[k].whole.element == element_kind<T>(), "another type in the file");
      return std::vector<T>(reinterpret_cast<const T*>(copies[k].to),
                            reinterpret_cast<const T*>(copies[k].to) + pieces[k].count);
    };
    const auto still = kept(0, 0.0f);
    for (std::size_t i = 0; i < Kinds::many; ++i)
      if (still[i] != Kinds::number(i)) require(false, "number " + std::to_string(i) + " of still");
    require(pieces[0].held == ElementKind::bf16 && pieces[0].derived == nullptr, "still");
    require(kept(1, 0.0f)[2] == 1.0f / 3, "a master has all its bits");
    require(pieces[1].derived_kind == ElementKind::bf16, "trained");
    require(kept(2, 0.0f)[2] == 3, "mean");
    require(kept(3, std::int64_t{0})[1] == (std::int64_t{1} << 60) + 1, "count");
    require(pieces[4].held == ElementKind::f32, "wide is held in float");
    require(static_cast<float>(kept(4, Half{})[3]) == 4, "wide");

    // Others into the same job.
    std::vector<float> others(Kinds::many);
    for (std::size_t i = 0; i < Kinds::many; ++i) others[i] = -Kinds::number(i + 1);
    const auto bytes = [](const auto& values) {
      return reinterpret_cast<const std::byte*>(values.data());
    };
    job.copy_in(pieces[0], bytes(others));
    const std::vector<float> thirds{1.0f / 3, 2.0f / 3, 1, 4.0f / 3, 5.0f / 3};
    job.copy_in(pieces[1], bytes(thirds));
    const std::vector<Half> halves{Half(9.0f), Half(8.0f), Half(7.0f), Half(6.0f)};
    job.copy_in(pieces[4], bytes(halves));
    const auto held = downloaded<BFloat16>(pieces[0].data, Kinds::many);
    for (std::size_t i = 0; i < Kinds::many; ++i)
      require(static_cast<float>(held[i]) == others[i], "still was written");
    require(downloaded<float>(pieces[1].data, 5) == thirds, "masters were written");
    require(static_cast<float>(downloaded<BFloat16>(pieces[1].derived, 5)[1]) ==
                static_cast<float>(BFloat16(2.0f / 3)),
            "the parameter that the model uses was written");
    require(downloaded<float>(pieces[4].data, 4)[1] == 8, "wide was written");
  }));
}

BOOST_AUTO_TEST_CASE(threads_that_wait_for_the_same_copies_convert_them_once) {
  const emulated::Machine machine(1);
  thread_ranks::expect_all_fine(thread_ranks::run(1, [](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job = detail::BasicDdp<Kinds,
                                 CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Frozen<"still">,
                                                   Precision<Mixed<BFloat16, BFloat16, float>>>,
                                 Comm>;
    Job job(comm);
    std::vector<detail::StateEntry> pieces;
    job.list_state(detail::StateUse::saving, pieces);
    const auto memory = job.make_state_memory(bytes_of(pieces));
    const auto copies = copies_to(memory.data(), pieces);
    for (int round = 0; round < 3; ++round) {
      job.copy_out(copies);
      std::barrier together(3);
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i)
        threads.emplace_back([&] {
          together.arrive_and_wait();
          job.await_copies();
        });
      for (std::thread& thread : threads) thread.join();
      const auto* const still = reinterpret_cast<const float*>(copies[0].to);
      for (std::size_t i = 0; i < Kinds::many; ++i)
        if (still[i] != Kinds::number(i))
          thread_ranks::require(false, "number " + std::to_string(i));
    }
  }));
}

BOOST_AUTO_TEST_CASE(meters_go_on) {
  const emulated::Machine machine(1);
  thread_ranks::expect_all_fine(thread_ranks::run(1, [](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    detail::DeviceLossMeter<Comm, false> meter(comm);
    meter.set_totals({2.5, 4});
    const detail::LossTotals totals = meter.totals();
    thread_ranks::require(totals.sum == 2.5 && totals.samples == 4, "other totals");
  }));
}

BOOST_AUTO_TEST_SUITE_END()
