// SPDX-License-Identifier: Apache-2.0
// Sharding<ZeroRedundancy> and Sharding<FullyShard> on several GPUs that the host plays: what ranks
// divide exists once over all of them, and jobs train as replicated ones do.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/saved.hpp"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#if __has_include(<nccl.h>)
#include "gpu/emulated/nccl_ranks.hpp"
#endif

BOOST_AUTO_TEST_SUITE(gpu_played_zero)

namespace {

using namespace lockstep;
using namespace train;
using thread_ranks::expect_all_fine;
using thread_ranks::require;
using Network = GpuPlainMlp<float, 7, 9, 3>;
using Batch = LabelledBatch<float, std::int32_t>;

Batch batch_of(std::size_t s, std::size_t rank) {
  return labelled<float>(reference_batch(4, 7, 3, s % 2, rank));
}

template <class Comm, class... Ps>
using Ddp =
    detail::BasicDdp<Network, CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, Ps...>, Comm>;

template <class T>
std::vector<T> downloaded(const T* data, std::size_t count) {
  std::vector<T> values(count);
  check_cuda(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return values;
}

std::string all_bits(auto& ddp) {
  std::string bits;
  ddp.for_each_parameter([&](std::string_view, auto view) {
    const auto values = downloaded(view.data_handle(), view.size());
    bits.append(reinterpret_cast<const char*>(values.data()), view.size() * sizeof(values[0]));
  });
  return bits;
}

/// Trains for so many batches; returns losses and parameters as bits.
std::string train_bits(auto& ddp, std::size_t rank, std::size_t batches) {
  std::string bits;
  for (std::size_t s = 0; s < batches; ++s) {
    const double loss = ddp.step(batch_of(s, rank));
    bits.append(reinterpret_cast<const char*>(&loss), sizeof loss);
  }
  return bits + all_bits(ddp);
}

/// All that a step can have whose sums do not depend on who adds up what: no norm.
template <class Comm, class... Ps>
using Whole = Ddp<Comm, CapturedStep, Accumulate<2>, Frozen<"fc2.bias">, ParameterGroups<NoDecay<>>,
                  Buckets<BucketLimits{100, 300}>, Ps...>;

/// A rank keeps 1 / ranks of the states, and of each bucket at most one unit of 16 bytes more for
/// each of two states.
void require_share(const auto& zero, const auto& replicated, std::size_t ranks) {
  const std::size_t share = replicated.state_bytes() / ranks;
  require(zero.state_bytes() <= share + 4 * 2 * 16,
          "a rank keeps " + std::to_string(zero.state_bytes()) + " bytes of states, of " +
              std::to_string(replicated.state_bytes()));
}

void check_whole(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const std::size_t me = comm.rank().value();
  Whole<Comm> replicated(comm);
  Whole<Comm, Sharding<ZeroRedundancy>> zero(comm);
  const std::string want = train_bits(replicated, me, 14);
  require(train_bits(zero, me, 14) == want, "shards have other bits");
  require(zero.template captured_graphs<Batch>() >= 2, "nothing was captured");
  require_share(zero, replicated, comm.world_size().value());
  // A tail runs call by call, and its gathers overlap with what follows.
  for (auto step : {0, 1, 2}) {
    zero.step(batch_of(static_cast<std::size_t>(step), me));
    replicated.step(batch_of(static_cast<std::size_t>(step), me));
  }
  zero.step_tail();
  replicated.step_tail();
  const double loss = zero.evaluate(batch_of(0, me));
  require(loss == replicated.evaluate(batch_of(0, me)) && all_bits(zero) == all_bits(replicated),
          "a tail has other bits");
}

/// One gradient that is not a number, on one rank: the rank that owns it says which it is, and the
/// others fail with its words. It changes no parameter, on any rank.
void spoil_one(auto& comm, std::string_view parameter, std::size_t element) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Whole<Comm, Sharding<ZeroRedundancy>> ddp(comm);
  const std::size_t me = comm.rank().value();
  std::vector<std::span<const float>> parameters;
  ddp.for_each_parameter([&](std::string_view, auto view) {
    parameters.emplace_back(view.data_handle(), view.size());
  });
  for (std::size_t s = 0; s < 5; ++s) ddp.step(batch_of(s, me));
  if (me == 0) {
    ddp.for_each_gradient([&](std::string_view name, auto view) {
      if (name != parameter) return;
      const float nan = std::numeric_limits<float>::quiet_NaN();
      check_cuda(cudaMemcpy(view.data_handle() + element, &nan, sizeof nan, cudaMemcpyDefault),
                 "cudaMemcpy");
    });
  }
  try {
    for (std::size_t s = 5; s < 40; ++s) ddp.step(batch_of(s, me));
    ddp.require_finite();
  } catch (const Error&) {
    for (const std::span<const float> values : parameters) {
      std::vector<float> have(values.size());
      check_cuda(cudaMemcpy(have.data(), values.data(), values.size_bytes(), cudaMemcpyDefault),
                 "cudaMemcpy");
      for (const float value : have) require(std::isfinite(value), "it has reached a parameter");
    }
    throw;
  }
}

/// With masters, a scaled loss and a norm over shards: as replicated, but for the rounding of one
/// number. Not with Adam, which divides a wrong norm out again.
template <class Types, class Sharded = Sharding<ZeroRedundancy>>
void check_mixed(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Small = Buckets<BucketLimits{100, 300}>;
  const std::size_t me = comm.rank().value();
  const auto make = [&]<class... Ps>(std::type_identity<Ps>...) {
    using Job = detail::BasicDdp<Network,
                                 CanonicalPolicies<Device<Cuda>, Optimizer<SGDMomentum>,
                                                   Precision<Types>, Clip<0.05>, Small, Ps...>,
                                 Comm>;
    auto job = std::make_unique<Job>(comm);
    job->optimizer().lr = 0.5;
    return job;
  };
  const auto plain = make();
  const auto sharded = make(std::type_identity<Sharded>{});
  auto& replicated = *plain;
  auto& zero = *sharded;
  for (std::size_t s = 0; s < 10; ++s) {
    const double want = replicated.step(batch_of(s, me));
    const double got = zero.step(batch_of(s, me));
    require(std::abs(got - want) <= 1e-3 * std::abs(want), "the loss of step " + std::to_string(s));
  }
  require_share(zero, replicated, comm.world_size().value());
  std::size_t masters = 0;
  zero.for_each_state([&](std::string_view, std::string_view state, auto view, std::size_t) {
    if (state == "master") masters += view.size();
  });
  require(masters < 250, "a rank keeps all masters");
  comm.synchronize();
}

}  // namespace

BOOST_AUTO_TEST_CASE(captured_shards_on_several_gpus_have_the_bits_of_replicas) {
  for (const auto& [gpus, ranks] : {std::pair<std::size_t, std::size_t>{2, 2}, {4, 4}, {2, 3}}) {
    const emulated::Machine machine(gpus);
    expect_all_fine(thread_ranks::run(ranks, [](auto& comm) { check_whole(comm); }));
  }
}

// Slices of micro-batches are added up after they were averaged: another order of sums.
BOOST_AUTO_TEST_CASE(gradients_that_a_rank_gives_away_train_as_replicas_do) {
  const emulated::Machine machine(2);
  expect_all_fine(thread_ranks::run(2, [](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    const std::size_t me = comm.rank().value();
    Whole<Comm> replicated(comm);
    Whole<Comm, Sharding<ZeroRedundancy, Gradients>> zero(comm);
    for (std::size_t s = 0; s < 12; ++s) {
      const double want = replicated.step(batch_of(s, me));
      const double got = zero.step(batch_of(s, me));
      require(std::abs(got - want) <= 1e-5 * std::abs(want), "the loss of " + std::to_string(s));
    }
    require(zero.template captured_graphs<Batch>() >= 2, "nothing was captured");
  }));
}

// Captured, with micro-batches and evaluations between them, each of which begins without units.
BOOST_AUTO_TEST_CASE(captured_units_on_several_gpus_have_the_bits_of_scattered_gradients) {
  for (const std::size_t world : {2, 4, 8}) {
    const emulated::Machine machine(world);
    expect_all_fine(thread_ranks::run(world, [](auto& comm) {
      using Comm = std::remove_reference_t<decltype(comm)>;
      const std::size_t me = comm.rank().value();
      Whole<Comm, Sharding<ZeroRedundancy, Gradients>> zero(comm);
      Whole<Comm, Sharding<FullyShard, Units<"fc2">, GatheredUnits<2>>> fully(comm);
      require(all_bits(fully) == all_bits(zero), "other initial values");
      for (std::size_t s = 0; s < 12; ++s) {
        const double want = zero.step(batch_of(s, me));
        const double got = fully.step(batch_of(s, me));
        require(std::abs(got - want) <= 1e-5 * std::abs(want), "the loss of " + std::to_string(s));
        const double tested = fully.evaluate(batch_of(s, me));
        require(std::abs(tested - zero.evaluate(batch_of(s, me))) <= 1e-5 * tested, "evaluation");
      }
      require(fully.template captured_graphs<Batch>() >= 2, "nothing was captured");
      require(fully.parameter_bytes() < zero.parameter_bytes(), "a rank keeps all parameters");
    }));
  }
}

BOOST_AUTO_TEST_CASE(the_owner_of_a_gradient_that_is_not_finite_names_it) {
  for (const auto& [parameter, element] : {std::pair<const char*, std::size_t>{"fc1.weight", 60},
                                           {"fc1.weight", 1},
                                           {"fc3.bias", 2}}) {
    const emulated::Machine machine(2);
    const auto ends =
        thread_ranks::run(2, [&](auto& comm) { spoil_one(comm, parameter, element); });
    const std::string words = "step 3: the gradient of " + std::string(parameter) +
                              " is not finite at element " + std::to_string(element);
    for (const std::string& end : ends)
      BOOST_TEST(end.find(words) != std::string::npos, "'" << words << "' is not in: " << end);
  }
}

BOOST_AUTO_TEST_CASE(shards_in_two_types_train_as_replicas_do) {
  const emulated::Machine machine(3);
  expect_all_fine(thread_ranks::run(3, [](auto& comm) {
    check_mixed<Mixed<Half>>(comm);
    check_mixed<Mixed<float, BFloat16>>(comm);  // slices are cut by the smaller type
    check_mixed<Mixed<BFloat16, float>, Sharding<FullyShard>>(comm);
  }));
}

BOOST_AUTO_TEST_CASE(captured_shards_with_masters_are_saved_while_they_go_on_and_resumed) {
  const checkpoints::Folder folder;
  const emulated::Machine machine(2);
  expect_all_fine(thread_ranks::run(2, [&](auto& comm) {
    using Comm = std::remove_reference_t<decltype(comm)>;
    using Job = Ddp<Comm, Precision<Mixed<BFloat16>>, CapturedStep, Accumulate<2>, Frozen<"fc2.*">,
                    Sharding<FullyShard>>;
    checkpoints::check_saved<Job, checkpoints::HostNetwork<7, 9, 3>>(
        comm, folder.path, [&](std::size_t s) { return batch_of(s, comm.rank().value()); });
  }));
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_own_shards) {
  const emulated::Machine machine(3);
  const auto train = []<class Dp>(std::type_identity<Dp>) {
    Dp dp({.replicas = 3});
    std::string bits;
    for (std::size_t s = 0; s < 6; ++s) {
      const double loss = dp.step(batch_of(s, 0));
      bits.append(reinterpret_cast<const char*>(&loss), sizeof loss);
    }
    dp.synchronize();
    return bits + all_bits(dp);
  };
  using Plain = DataParallel<Network, Device<Cuda>, Optimizer<AdamW>>;
  using Zero = DataParallel<Network, Device<Cuda>, Optimizer<AdamW>, Sharding<ZeroRedundancy>>;
  BOOST_TEST((train(std::type_identity<Zero>{}) == train(std::type_identity<Plain>{})));
}

#if __has_include(<nccl.h>)
BOOST_AUTO_TEST_CASE(captured_shards_through_nccl_train_as_replicas_do) {
  for (const std::size_t world : {2, 4}) {
    nccl_ranks::Job job(world);
    nccl_ranks::run_nccl(job, [](auto& comm) { check_whole(comm); });
  }
}
#endif

BOOST_AUTO_TEST_SUITE_END()
