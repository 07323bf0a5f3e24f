// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/trainer/trainer.hpp"

#include <boost/test/unit_test.hpp>
#include <set>
#include <type_traits>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(trainer)

namespace {

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
};

template <class... Ps>
using PolicyOfBackend = typename detail::Composed<Net, Ps...>::template policy<axes::Backend>;

template <class... Ps>
using PolicyOfSharding = typename detail::Composed<Net, Ps...>::template policy<axes::Sharding>;

}  // namespace

BOOST_AUTO_TEST_CASE(any_order_of_policies_is_the_same_type) {
  using A = Trainer<Net, ParallelStrategy<DDP>, Backend<Shm>, World<4>, Optimizer<AdamW>>;
  using B = Trainer<Net, Optimizer<AdamW>, World<4>, Backend<Shm>, ParallelStrategy<DDP>>;
  using C = Trainer<Net, World<4>, Backend<Shm>, Optimizer<AdamW>>;  // DDP is the default
  static_assert(std::is_same_v<A, B> && std::is_same_v<A, C>);
  static_assert(!std::is_same_v<A, Trainer<Net, World<5>, Backend<Shm>, Optimizer<AdamW>>>);
  BOOST_TEST(A::fingerprint() == B::fingerprint());
}

BOOST_AUTO_TEST_CASE(defaults_fill_what_is_not_given) {
  using Job = Trainer<Net>;
  static_assert(std::is_same_v<Job::policy<axes::ParallelStrategy>, ParallelStrategy<DDP>>);
  static_assert(std::is_same_v<Job::policy<axes::Device>, Device<Cpu>>);
  static_assert(std::is_same_v<Job::policy<axes::World>, World<dynamic>>);
  static_assert(std::is_same_v<Job::policy<axes::Sampler>, Sampler<Distributed, Padding>>);
  static_assert(Job::policy<axes::Accumulate>::micro_batches == 1);
  static_assert(!Job::policy<axes::Clip>::clips);
  static_assert(std::is_same_v<Job::memory, HostMemory>);
}

BOOST_AUTO_TEST_CASE(the_default_backend_follows_the_device) {
  static_assert(std::is_same_v<PolicyOfBackend<>, Backend<Shm>>);
  static_assert(std::is_same_v<PolicyOfBackend<Device<Cuda>>, Backend<Nccl>>);
  static_assert(std::is_same_v<PolicyOfBackend<Device<Cuda>, Backend<Shm>>, Backend<Shm>>);
  static_assert(std::is_same_v<PolicyOfBackend<Device<Cuda>, ParallelStrategy<DP>>, Backend<Shm>>);
  static_assert(std::is_same_v<detail::Composed<Net, Device<Cuda>>::memory, DeviceMemory>);
}

BOOST_AUTO_TEST_CASE(parameters_are_shared_where_memory_is) {
  using Shared = Sharding<HostShared>;
  using Copies = Sharding<Replicated>;
  static_assert(std::is_same_v<PolicyOfSharding<>, Shared>);
  static_assert(std::is_same_v<PolicyOfSharding<World<4>>, Shared>);
  static_assert(std::is_same_v<PolicyOfSharding<Sharding<Replicated>>, Copies>);
  static_assert(std::is_same_v<PolicyOfSharding<Backend<Gloo>>, Copies>);
  static_assert(std::is_same_v<PolicyOfSharding<Device<Cuda>>, Copies>);
  static_assert(std::is_same_v<PolicyOfSharding<ParallelStrategy<DP>>, Shared>);
  static_assert(std::is_same_v<PolicyOfSharding<ParallelStrategy<DP>, Backend<Gloo>>, Shared>);
  static_assert(std::is_same_v<PolicyOfSharding<ParallelStrategy<DP>, Device<Cuda>>, Copies>);
  BOOST_TEST((Trainer<Net>::fingerprint() == Trainer<Net, Sharding<HostShared>>::fingerprint()));
  BOOST_TEST((Trainer<Net>::fingerprint() != Trainer<Net, Sharding<Replicated>>::fingerprint()));
}

BOOST_AUTO_TEST_CASE(the_buckets_policy_reaches_the_plan) {
  using Small = Trainer<Net, Buckets<BucketLimits{.first = 4, .cap = 4}>>;
  static_assert(Trainer<Net>::layout::plan().bucket_count == 1);
  static_assert(Small::layout::plan().bucket_count == 2);
}

BOOST_AUTO_TEST_CASE(every_policy_changes_the_fingerprint) {
  const std::uint64_t all[] = {
      Trainer<Net>::fingerprint(),
      Trainer<Net, ParallelStrategy<DP>>::fingerprint(),
      Trainer<Net, ParallelStrategy<DP>, LossOnReplica>::fingerprint(),
      detail::Composed<Net, Backend<Gloo>>::fingerprint(),
      detail::Composed<Net, Backend<Hierarchical<Shm, Gloo>>>::fingerprint(),
      detail::Composed<Net, Device<Cuda>, Backend<Hierarchical<Shm, Nccl>>>::fingerprint(),
      detail::Composed<Net, Device<Cuda>, Backend<Shm>>::fingerprint(),
      detail::Composed<Net, Device<Cuda>>::fingerprint(),
      Trainer<Net, World<1>>::fingerprint(),
      Trainer<Net, World<2>>::fingerprint(),
      Trainer<Net, Sampler<Distributed, Exact>>::fingerprint(),
      Trainer<Net, Optimizer<Adam>>::fingerprint(),
      Trainer<Net, Accumulate<2>>::fingerprint(),
      Trainer<Net, Clip<1.0>>::fingerprint(),
      Trainer<Net, Clip<2.0>>::fingerprint(),
      Trainer<Net, Buckets<BucketLimits{.cap = 1_MiB}>>::fingerprint(),
  };
  BOOST_TEST(std::set<std::uint64_t>(std::begin(all), std::end(all)).size() == std::size(all));
  static_assert(Trainer<Net>::fingerprint() == Trainer<Net, ParallelStrategy<DDP>>::fingerprint());
}

BOOST_AUTO_TEST_CASE(tools_can_ask_what_is_wrong_without_an_error) {
  static_assert(composition_fault<Net> == detail::Fault::none);
  static_assert(composition_fault<Net, World<0>> == detail::Fault::world_of_zero);
  static_assert(composition_fault<Net, Backend<Shm>, Backend<Shm>> ==
                detail::Fault::policy_given_twice);
  static_assert(composition_fault<Net, Backend<Nccl>> == detail::Fault::nccl_on_cpu);
  static_assert(composition_fault<Net, int> == detail::Fault::unknown_policy);
  using Shared = Sharding<HostShared>;
  static_assert(composition_fault<Net, Shared> == detail::Fault::none);
  static_assert(composition_fault<Net, Shared, Backend<Gloo>> == detail::Fault::shared_without_shm);
  static_assert(composition_fault<Net, Shared, Device<Cuda>> == detail::Fault::shared_without_shm);
  static_assert(composition_fault<Net, Shared, ParallelStrategy<DP>, Backend<Gloo>> ==
                detail::Fault::none);
  static_assert(composition_fault<Net, Shared, ParallelStrategy<DP>, Device<Cuda>> ==
                detail::Fault::shared_without_shm);
  static_assert(composition_fault<Net, Sharding<ZeroRedundancy>> == detail::Fault::none);
  static_assert(composition_fault<Net, Sharding<ZeroRedundancy, Gradients>, Backend<Gloo>> ==
                detail::Fault::none);
  static_assert(composition_fault<Net, Sharding<ZeroRedundancy, ByTensor>> ==
                detail::Fault::wrong_choice);
  static_assert(composition_fault<Net, Sharding<Replicated, Gradients>> ==
                detail::Fault::wrong_choice);
}

BOOST_AUTO_TEST_SUITE_END()
