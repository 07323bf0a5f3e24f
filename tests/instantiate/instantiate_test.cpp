// SPDX-License-Identifier: Apache-2.0
// Every legal combination of policies, instantiated whole.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <set>
#include <type_traits>

#include "lockstep/trainer/trainer.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(instantiate_all)

namespace {

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", double, 3>>;
  using Buffers = BufferList<Buffer<"mean", float, 3>>;
};

template <class... Ts>
struct List {};

/// Calls `f.template operator()<A, B, ...>()` for every choice of one type from each list.
template <class... Chosen>
void for_each_product(auto f) {
  f.template operator()<Chosen...>();
}
template <class... Chosen, class... Ts, class... Rest>
void for_each_product(auto f, List<Ts...>, Rest... rest) {
  (for_each_product<Chosen..., Ts>(f, rest...), ...);
}

/// The step's members are instantiated, not only declared.
template <class Job>
std::uint64_t instantiate() {
  using Step = typename Job::bare_step;
  static_assert(std::is_same_v<Composed<Net, typename Job::template policy<axes::Backend>,
                                        typename Job::template policy<axes::Device>>,
                               Composed<Net, typename Job::template policy<axes::Device>,
                                        typename Job::template policy<axes::Backend>>>);
  alignas(arena_alignment) static std::byte arena[Job::layout::plan().bytes];
  const Step step(Net{}, {arena, arena, arena});
  BOOST_TEST_REQUIRE(step.param("w"_p).data_handle() == step.grad("w"_p).data_handle());
  static_assert(decltype(step.grad("b"_p))::static_extent(0) == 3);
  static_assert(Job::layout::plan().bytes == 2 * arena_alignment);
  step.ready("b"_p);
  return Job::fingerprint();
}

struct Count {
  std::set<std::uint64_t> fingerprints;
  std::size_t legal = 0;
  std::size_t nccl_on_cpu = 0;
  std::size_t shared_without_shm = 0;
};

template <class... Lists>
Count instantiate_product(Lists... lists) {
  Count count;
  for_each_product(
      [&]<class... Ps>() {
        if constexpr (composition_fault<Net, Ps...> == Fault::none) {
          count.fingerprints.insert(instantiate<Composed<Net, Ps...>>());
          ++count.legal;
        } else if constexpr (composition_fault<Net, Ps...> == Fault::shared_without_shm) {
          ++count.shared_without_shm;
        } else {
          static_assert(composition_fault<Net, Ps...> == Fault::nccl_on_cpu);
          ++count.nccl_on_cpu;
        }
      },
      lists...);
  return count;
}

}  // namespace

BOOST_AUTO_TEST_CASE(strategies_devices_backends_samplers_and_worlds) {
  const Count count = instantiate_product(
      List<ParallelStrategy<DDP>, ParallelStrategy<DP>>{}, List<Device<Cpu>, Device<Cuda>>{},
      List<Backend<Shm>, Backend<Gloo>, Backend<Nccl>>{},
      List<Sampler<Distributed, Padding>, Sampler<Distributed, DropLast>,
           Sampler<Distributed, Exact>, Sampler<Distributed, Masked>>{},
      List<World<1>, World<4>, World<dynamic>>{});
  BOOST_TEST(count.legal == 2u * 5 * 4 * 3);
  BOOST_TEST(count.nccl_on_cpu == 2u * 1 * 4 * 3);
  BOOST_TEST(count.fingerprints.size() == count.legal);  // no two jobs are taken for one another
}

BOOST_AUTO_TEST_CASE(shardings_wherever_they_are_legal) {
  const Count count = instantiate_product(
      List<ParallelStrategy<DDP>, ParallelStrategy<DP>>{}, List<Device<Cpu>, Device<Cuda>>{},
      List<Backend<Shm>, Backend<Gloo>>{}, List<Sharding<HostShared>, Sharding<Replicated>>{},
      List<World<1>, World<dynamic>>{}, List<Clip<>, Clip<1.0>>{});
  BOOST_TEST(count.legal == (8u + 1) * 2 * 2);  // shared: DDP on the CPU through Shm only
  BOOST_TEST(count.shared_without_shm == 7u * 2 * 2);
  BOOST_TEST(count.fingerprints.size() == count.legal);
}

BOOST_AUTO_TEST_CASE(devices_optimizers_accumulation_clipping_and_buckets) {
  const Count count = instantiate_product(
      List<Device<Cpu>, Device<Cuda>>{}, List<Optimizer<SGD>, Optimizer<Adam>, Optimizer<AdamW>>{},
      List<Accumulate<1>, Accumulate<4>>{}, List<Clip<>, Clip<1.0>>{},
      List<Buckets<>, Buckets<BucketLimits{.first = 0, .cap = 0}>>{});
  BOOST_TEST(count.legal == 2u * 3 * 2 * 2 * 2);
  BOOST_TEST(count.fingerprints.size() == count.legal);
}

BOOST_AUTO_TEST_SUITE_END()
