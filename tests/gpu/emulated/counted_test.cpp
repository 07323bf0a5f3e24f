// SPDX-License-Identifier: Apache-2.0
// Updates that leave parameters out, on GPUs that the host plays: kernels against loops, and jobs
// against PyTorch's figures.
#include "gpu/emulated/kernels.hpp"
//
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "gpu/emulated/machine.hpp"
#include "gpu/plain_mlp.cuh"
#include "gpu/thread_ranks.cuh"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/constants.cuh"
#include "lockstep/detail/trainer/cuda.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/filter_case.hpp"
#include "train/reference_case.hpp"

BOOST_AUTO_TEST_SUITE(gpu_played_counted)

namespace {

using namespace lockstep;
using namespace train;

template <class T>
std::vector<T> downloaded(const T* from, std::size_t count) {
  std::vector<T> values(count);
  check_cuda(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDefault), "cudaMemcpy");
  return values;
}
template <class T>
DeviceArena uploaded(const std::vector<T>& values) {
  DeviceArena arena(values.size() * sizeof(T));
  detail::copy_now(arena.data(), values.data(), arena.bytes());
  return arena;
}
template <class T>
T* as(const DeviceArena& arena) {
  return reinterpret_cast<T*>(arena.data());
}

}  // namespace

// Parameters of random lengths, some of them zero, one with a NaN, one with an element too small
// for its square; a piece of the arena that nobody has lies between two of them.
BOOST_AUTO_TEST_CASE(the_test_for_zero_finds_what_a_loop_finds) {
  const emulated::Machine machine(1);
  std::mt19937 random(11);
  for (int round = 0; round < 20; ++round) {
    const std::size_t parameters = random() % 6 + 1;
    std::vector<detail::TablePiece> pieces;
    std::vector<float> values;
    std::vector<std::uint8_t> want(parameters + 1);
    for (std::size_t p = 0; p != parameters; ++p) {
      const std::size_t count = (random() % 60 + 1) * 64 * (random() % 4 == 0 ? 20 : 1);
      const std::size_t first = values.size();
      values.resize(first + count, random() % 2 == 0 ? 0.0f : -0.0f);
      if (random() % 3 != 0) {
        const float some[] = {1, NAN, 1e-30f, -3};
        values[first + random() % count] = some[random() % 4];
        want[p] = 1;
      }
      pieces.push_back({values.size() * sizeof(float), p});
      if (p == 0) {  // whose elements are noticed apart
        values.resize(values.size() + 64, 7.0f);
        pieces.push_back({values.size() * sizeof(float), parameters});
        want[parameters] = 1;
      }
    }
    const DeviceArena gradients = uploaded(values);
    const DeviceArena table = uploaded(pieces);
    const DeviceArena used(parameters + 1);
    const DeviceArena sums(detail::most_norm_blocks * sizeof(double));
    const DeviceArena same_sums(sums.bytes());
    const detail::TablePieces where{as<detail::TablePiece>(table), pieces.size(), 0, sizeof(float)};
    const auto flags = [&] {
      auto found = downloaded(as<std::uint8_t>(used), parameters + 1);
      check_cuda(cudaMemset(used.data(), 0, used.bytes()), "cudaMemset");
      return found;
    };
    detail::launch_find_used(nullptr, as<float>(gradients), where, as<std::uint8_t>(used), nullptr,
                             values.size());
    BOOST_TEST(flags() == want, boost::test_tools::per_element());
    detail::launch_find_used(nullptr, as<float>(gradients), where, as<std::uint8_t>(used),
                             as<double>(sums), values.size());
    BOOST_TEST(flags() == want, boost::test_tools::per_element());
    detail::launch_squares(nullptr, as<float>(gradients), as<double>(same_sums), values.size());
    const auto bits = [&](const DeviceArena& arena) {
      return downloaded(as<std::uint64_t>(arena), detail::most_norm_blocks);
    };
    BOOST_TEST(bits(sums) == bits(same_sums), boost::test_tools::per_element());
    std::vector<std::uint8_t> given(5000);
    for (auto& flag : given) flag = random() % 2;
    const DeviceArena stored(given.size());
    detail::launch_store_flags(nullptr, as<std::uint8_t>(stored), given);
    BOOST_TEST(downloaded(as<std::uint8_t>(stored), given.size()) == given,
               boost::test_tools::per_element());
  }
}

namespace {

using Network = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
template <class Model, class Comm, class... Ps>
using Ddp = detail::BasicDdp<
    Model,
    CanonicalPolicies<Device<Cuda>, Optimizer<AdamW>, Buckets<BucketLimits{600, 1500}>, Ps...>,
    Comm>;

template <class Model, class... Ps>
void train_case(const FilterCase& c, const auto& step) {
  const emulated::Machine machine(c.reference.world);
  thread_ranks::expect_all_fine(thread_ranks::run(c.reference.world, [&](auto& comm) {
    Ddp<Model, std::remove_reference_t<decltype(comm)>, Ps...> ddp(comm,
                                                                   c.reference.model<Model>());
    train_filtered(
        c, ddp, comm.rank().value(), [](const auto& samples) { return labelled<double>(samples); },
        step);
    comm.synchronize();
    require_parameters(c.reference, ddp, [](const auto& view) {
      return downloaded(view.data_handle(), view.size());
    });
  }));
}

}  // namespace

BOOST_AUTO_TEST_CASE(parameters_without_a_gradient_are_left_alone_as_pytorch_leaves_them) {
  using Sets = UnusedParameters<Subgraphs<SameOnAllRanks, WithoutFc2>>;
  const nlohmann::json all = reference("zero_filter.json");
  BOOST_TEST(all.size() != 0u);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const FilterCase c = filter_case(i, all[i]);
    if (c.filtered) {
      train_case<Network, Hooks<SkipZeroGradients>>(c, step_with_zeros);
      train_case<Network, UnusedParameters<Zero>>(c, step_without_gradient);
      train_case<GpuSubgraphMlp<double, dynamic, dynamic, dynamic>, Sets, CapturedStep>(
          c, step_of_subgraph);
    } else {
      train_case<Network>(c, step_with_zeros);
    }
  }
}

// Batches of zeros leave fc1.weight without a gradient, which only the device knows: captured steps
// leave it alone as those do that run call by call, clipped and skipped ones too.
BOOST_AUTO_TEST_CASE(captured_steps_find_zero_gradients) {
  constexpr std::size_t ranks = 2;
  const auto train = [&](bool captures) {
    std::vector<double> parameters;
    const emulated::Machine machine(ranks);
    thread_ranks::expect_all_fine(thread_ranks::run(ranks, [&](auto& comm) {
      Network network;
      network.in = 5;
      network.hidden = 8;
      network.out = 3;
      network.waits = !captures;
      Ddp<Network, std::remove_reference_t<decltype(comm)>, Hooks<SkipZeroGradients>, Clip<0.1>,
          Anomaly<Skip>, CapturedStep>
          ddp(comm, std::move(network));
      std::vector<double> before;
      for (std::size_t s = 0; s < 10; ++s) {
        auto samples = reference_batch(4, 5, 3, s % 2, comm.rank().value());
        const bool empty = s % 3 == 1;
        if (empty) samples.x.assign(samples.x.size(), 0);
        if (s == 8) samples.x[0] = NAN;
        ddp.step(labelled<double>(samples));
        comm.synchronize();
        const auto weight = ddp.param("fc1.weight"_p);
        const auto after = downloaded(weight.data_handle(), weight.size());
        const bool stays = empty || s == 8;
        thread_ranks::require(s == 0 || (before == after) == stays,
                              "fc1.weight after step " + std::to_string(s));
        before = after;
      }
      thread_ranks::require(ddp.skipped_steps() == 1, "one step was skipped");
      thread_ranks::require(
          (ddp.template captured_graphs<LabelledBatch<double, std::int32_t>>() != 0) == captures,
          "steps are captured where they can be");
      if (comm.rank() == Rank{0}) {
        PlainMlp<1, 1, 1>::for_each_parameter(ddp, [&](const auto& view) {
          const auto some = downloaded(view.data_handle(), view.size());
          parameters.insert(parameters.end(), some.begin(), some.end());
        });
      }
    }));
    return parameters;
  };
  BOOST_TEST(train(true) == train(false), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_SUITE_END()
