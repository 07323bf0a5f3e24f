// SPDX-License-Identifier: Apache-2.0
// Every legal combination of policies, instantiated whole.
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <set>
#include <type_traits>

#include "lockstep/detail/data/dataset.hpp"
#include "lockstep/detail/hook/compress_to.hpp"
#include "lockstep/detail/hook/local_sgd.hpp"
#include "lockstep/detail/hook/power_sgd.hpp"
#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/trainer/trainer.hpp"

using namespace lockstep;

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
  static_assert(std::is_same_v<detail::Composed<Net, typename Job::template policy<axes::Backend>,
                                                typename Job::template policy<axes::Device>>,
                               detail::Composed<Net, typename Job::template policy<axes::Device>,
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
};

/// Instantiates what is legal, and nothing else may be wrong with the rest than `Faults`.
template <detail::Fault... Faults, class... Lists>
Count instantiate_product(Lists... lists) {
  Count count;
  for_each_product(
      [&]<class... Ps>() {
        constexpr detail::Fault fault = composition_fault<Net, Ps...>;
        static_assert(fault == detail::Fault::none || ((fault == Faults) || ...));
        if constexpr (fault == detail::Fault::none) {
          count.fingerprints.insert(instantiate<detail::Composed<Net, Ps...>>());
          ++count.legal;
        }
      },
      lists...);
  return count;
}

using Strategies = List<ParallelStrategy<DDP>, ParallelStrategy<DP>>;
using Devices = List<Device<Cpu>, Device<Cuda>>;
using Backends = List<Backend<Shm>, Backend<Gloo>, Backend<Nccl>, Backend<Hierarchical<Shm, Gloo>>,
                      Backend<Hierarchical<Shm, Nccl>>>;

/// The rules of composition once more, as a reader of the documents would put them.
template <class Strategy, class TheDevice, class TheBackend, class TheSharding, class Execution,
          class Unused, class TheSampler, class ThePrecision>
constexpr detail::Fault expected_fault() {
  constexpr bool cpu = std::is_same_v<TheDevice, Device<Cpu>>;
  constexpr bool dp = std::is_same_v<Strategy, ParallelStrategy<DP>>;
  if (cpu && (std::is_same_v<TheBackend, Backend<Nccl>> ||
              std::is_same_v<TheBackend, Backend<Hierarchical<Shm, Nccl>>>)) {
    return detail::Fault::nccl_on_cpu;
  }
  if (std::is_same_v<TheSharding, Sharding<HostShared>> &&
      !(cpu && (dp || std::is_same_v<TheBackend, Backend<Shm>>))) {
    return detail::Fault::shared_without_shm;
  }
  if (!std::is_same_v<ThePrecision, Precision<AsDeclared>> && cpu)
    return detail::Fault::mixed_on_cpu;
  if (std::is_same_v<Execution, CapturedStep>) {
    if (cpu) return detail::Fault::captured_on_cpu;
    if (std::is_same_v<Unused, UnusedParameters<Zero>>) return detail::Fault::captured_with_unused;
    if (!dp && std::is_same_v<TheSampler, Sampler<Distributed, Exact>>)
      return detail::Fault::captured_with_exact;
    if (!dp && !std::is_same_v<TheBackend, Backend<Shm>> &&
        !std::is_same_v<TheBackend, Backend<Nccl>>)
      return detail::Fault::captured_through_host;
  }
  return detail::Fault::none;
}

/// All parameters are float, which mixed precision wants.
struct Floats {
  using Parameters = ParameterList<Parameter<"w", float, 2>>;
};

}  // namespace

BOOST_AUTO_TEST_SUITE(instantiate_all)

BOOST_AUTO_TEST_CASE(what_goes_together_is_what_the_rules_say) {
  // Two products: what a step is made of has no say in where parameters are, except which of two
  // faults is told.
  std::size_t legal = 0;
  for_each_product(
      [&]<class Strategy, class TheDevice, class TheBackend, class TheSharding,
          class ThePrecision>() {
        constexpr auto expected =
            expected_fault<Strategy, TheDevice, TheBackend, TheSharding, EagerStep,
                           UnusedParameters<Forbid>, Sampler<Distributed, Padding>, ThePrecision>();
        static_assert(
            composition_fault<Floats, Strategy, TheDevice, TheBackend, TheSharding, ThePrecision> ==
            expected);
        legal += expected == detail::Fault::none;
      },
      Strategies{}, Devices{}, Backends{}, List<Sharding<HostShared>, Sharding<Replicated>>{},
      List<Precision<AsDeclared>, Precision<Mixed<BFloat16>>>{});
  // On CPUs 10 of 12 strategies, backends and shardings; on GPUs 5 backends with their own
  // parameters, by 2 strategies and 2 precisions.
  BOOST_TEST(legal == 10u + 5 * 2 * 2);
  legal = 0;
  for_each_product(
      [&]<class Strategy, class TheDevice, class TheBackend, class... Step>() {
        constexpr auto expected =
            expected_fault<Strategy, TheDevice, TheBackend, Sharding<Replicated>, Step...,
                           Precision<AsDeclared>>();
        static_assert(composition_fault<Floats, Strategy, TheDevice, TheBackend,
                                        Sharding<Replicated>, Step...> == expected);
        legal += expected == detail::Fault::none;
      },
      Strategies{}, Devices{}, Backends{}, List<EagerStep, CapturedStep>{},
      List<UnusedParameters<Forbid>, UnusedParameters<Zero>>{},
      List<Sampler<Distributed, Padding>, Sampler<Distributed, Exact>>{});
  // By 4 on CPUs with 3 backends; on GPUs eager by 4, captured by 2 with DP through 5 backends, and
  // by 1 with DDP through two of them.
  BOOST_TEST(legal == 2u * 3 * 4 + 2 * 5 * 4 + 5 * 2 + 2);
}

namespace {

/// The same for hooks.
template <class Strategy, class TheSharding, class TheAnomaly, class TheHooks>
constexpr detail::Fault expected_hook_fault() {
  using detail::Fault;
  if (std::is_same_v<TheHooks, Hooks<>> || std::is_same_v<TheHooks, Hooks<SkipZeroGradients>>)
    return Fault::none;
  if (std::is_same_v<TheHooks, Hooks<PowerSGD<0>>>) return Fault::hook_out_of_range;
  if (std::is_same_v<TheHooks, Hooks<PowerSGD<1>, LocalSGD<2>>>) return Fault::hooks_out_of_order;
  if (std::is_same_v<Strategy, ParallelStrategy<DP>>) return Fault::for_ranks_alone;
  if (std::is_same_v<TheSharding, Sharding<HostShared>>) return Fault::hooks_with_host_shared;
  if (std::is_same_v<TheHooks, Hooks<LocalSGD<2>>>) {
    if (std::is_same_v<TheAnomaly, Anomaly<Skip>>) return Fault::local_sgd_with_skip;
    if (std::is_same_v<TheSharding, Sharding<ZeroRedundancy>>) return Fault::local_sgd_with_shards;
  }
  return Fault::none;
}

}  // namespace

BOOST_AUTO_TEST_CASE(hooks_go_with_what_the_rules_say) {
  std::size_t all = 0;
  for_each_product(
      [&]<class... Ps>() {
        static_assert(composition_fault<Floats, Ps...> == expected_hook_fault<Ps...>());
        ++all;
      },
      Strategies{}, List<Sharding<HostShared>, Sharding<Replicated>, Sharding<ZeroRedundancy>>{},
      List<Anomaly<Stop>, Anomaly<Skip>>{},
      List<Hooks<>, Hooks<SkipZeroGradients>, Hooks<CompressTo<Half>>, Hooks<LocalSGD<2>>,
           Hooks<PowerSGD<1>, LocalSGD<2>>, Hooks<CompressTo<BFloat16>, PowerSGD<1>>,
           Hooks<PowerSGD<0>>>{});
  BOOST_TEST(all == 2u * 3 * 2 * 7);
  // Two hooks of one name are not taken for one another, and where hooks want whole buckets ranks
  // do not share parameters unless told otherwise.
  BOOST_TEST((detail::Composed<Floats, Hooks<PowerSGD<1>>>::fingerprint() !=
              detail::Composed<Floats, Hooks<PowerSGD<2>>>::fingerprint()));
  static_assert(std::is_same_v<detail::Composed<Floats, Hooks<PowerSGD<1>>>::policy<axes::Sharding>,
                               Sharding<Replicated>>);
}

namespace {

/// The same for exhausted ranks before others.
template <class Strategy, class TheSharding, class Uneven, class TheHooks>
constexpr detail::Fault expected_join_fault() {
  using detail::Fault;
  constexpr bool dp = std::is_same_v<Strategy, ParallelStrategy<DP>>;
  constexpr bool shared = std::is_same_v<TheSharding, Sharding<HostShared>>;
  if (!std::is_same_v<Uneven, UnevenInputs<Even>>) {
    if (dp) return Fault::for_ranks_alone;
    if (shared) return Fault::join_with_shared;
    if (std::is_same_v<TheHooks, Hooks<PowerSGD<1>>>) return Fault::join_with_hooks;
  }
  if (std::is_same_v<TheHooks, Hooks<>>) return Fault::none;
  return dp ? Fault::for_ranks_alone : shared ? Fault::hooks_with_host_shared : Fault::none;
}

/// And for groups of ranks.
template <class Strategy, class TheWorld, class TheGroups>
constexpr detail::Fault expected_groups_fault() {
  using detail::Fault;
  if (std::is_same_v<TheGroups, Groups<>>) return Fault::none;
  if (std::is_same_v<Strategy, ParallelStrategy<DP>>) return Fault::for_ranks_alone;
  constexpr std::size_t ranks = TheWorld::static_size;
  constexpr bool fits = std::is_same_v<TheGroups, Groups<Grid<dynamic, 3>>>
                            ? ranks == dynamic || ranks == 6
                            : ranks == dynamic || ranks == 4;
  return fits ? Fault::none : Fault::groups_of_other_world;
}

/// And for norms that ranks take together.
template <class Strategy, class TheNorms, class Uneven, class TheGroups, class Unused>
constexpr detail::Fault expected_norms_fault() {
  using detail::Fault;
  constexpr bool dp = std::is_same_v<Strategy, ParallelStrategy<DP>>;
  constexpr bool joins = std::is_same_v<Uneven, UnevenInputs<Join>>;
  constexpr bool in_groups = !std::is_same_v<TheGroups, Groups<>>;
  if (joins && dp) return Fault::for_ranks_alone;
  if (in_groups && dp) return Fault::for_ranks_alone;
  if (std::is_same_v<TheNorms, Norms<Local>>) return Fault::none;
  if (std::is_same_v<TheNorms, Norms<Synced, WithinGroup>> && !in_groups)
    return Fault::norms_without_groups;
  if (joins) return Fault::norms_with_join;
  if (!dp && !std::is_same_v<Unused, UnusedParameters<Zero>>) return Fault::norms_with_union;
  return Fault::none;
}

/// And for ranks that read for others.
template <class Strategy, class TheFeed, class Uneven, class TheGroups>
constexpr detail::Fault expected_feed_fault() {
  using detail::Fault;
  constexpr bool dp = std::is_same_v<Strategy, ParallelStrategy<DP>>;
  constexpr bool joins = std::is_same_v<Uneven, UnevenInputs<Join>>;
  constexpr bool in_groups = !std::is_same_v<TheGroups, Groups<>>;
  if (joins && dp) return Fault::for_ranks_alone;
  if (in_groups && dp) return Fault::for_ranks_alone;
  if (std::is_same_v<TheFeed, Feed<Own>>) return Fault::none;
  if (dp) return Fault::for_ranks_alone;
  if (!in_groups) return Fault::feed_without_groups;
  return joins ? Fault::feed_with_join : Fault::none;
}

}  // namespace

BOOST_AUTO_TEST_CASE(join_and_groups_go_with_what_the_rules_say) {
  std::set<std::uint64_t> fingerprints;
  std::size_t legal = 0;
  const auto note = [&]<class... Ps>(detail::Fault expected) {
    constexpr detail::Fault fault = composition_fault<Floats, Ps...>;
    BOOST_TEST((fault == expected));
    if constexpr (fault == detail::Fault::none) {
      fingerprints.insert(detail::Composed<Floats, Ps...>::fingerprint());
      ++legal;
    }
  };
  for_each_product(
      [&]<class... Ps>() { note.template operator()<Ps...>(expected_join_fault<Ps...>()); },
      Strategies{}, List<Sharding<HostShared>, Sharding<Replicated>, Sharding<ZeroRedundancy>>{},
      List<UnevenInputs<Even>, UnevenInputs<Join>, UnevenInputs<Join, DivideByLive>>{},
      List<Hooks<>, Hooks<CompressTo<Half>>, Hooks<PowerSGD<1>>>{});
  for_each_product(
      [&]<class... Ps>() { note.template operator()<Ps...>(expected_groups_fault<Ps...>()); },
      Strategies{}, List<World<4>, World<6>, World<dynamic>>{},
      List<Groups<>, Groups<Grid<4, 2>>, Groups<Grid<dynamic, 3>>>{});
  // One job is in both products: of the default policies in a world of any size.
  BOOST_TEST(legal == 18u + 10);
  BOOST_TEST(fingerprints.size() == legal - 2);
  fingerprints.clear();
  legal = 0;
  for_each_product(
      [&]<class... Ps>() { note.template operator()<Ps...>(expected_norms_fault<Ps...>()); },
      Strategies{}, List<Norms<Local>, Norms<Synced>, Norms<Synced, WithinGroup>>{},
      List<UnevenInputs<Even>, UnevenInputs<Join>>{}, List<Groups<>, Groups<Grid<dynamic, 3>>>{},
      List<UnusedParameters<Zero>, UnusedParameters<Subgraphs<Subgraph<"all", "w">>>>{});
  // Of DDP, 8 with local norms and 3 with synced ones; of DP, 2 of each without groups.
  BOOST_TEST(legal == 8u + 3 + 2 + 2);
  BOOST_TEST(fingerprints.size() == legal);
  fingerprints.clear();
  legal = 0;
  for_each_product(
      [&]<class... Ps>() { note.template operator()<Ps...>(expected_feed_fault<Ps...>()); },
      Strategies{}, List<Feed<Own>, Feed<LeaderOfGroup>, Feed<ScatterThenBroadcast>>{},
      List<UnevenInputs<Even>, UnevenInputs<Join>>{}, List<Groups<>, Groups<Grid<dynamic, 3>>>{});
  BOOST_TEST(legal == 1u + 4 + 2);  // of DP, of DDP without and with feeding
  BOOST_TEST(fingerprints.size() == legal);
  static_assert(std::is_same_v<detail::Composed<Floats, UnevenInputs<Join>>::policy<axes::Sharding>,
                               Sharding<Replicated>>);
}

BOOST_AUTO_TEST_CASE(strategies_devices_backends_and_worlds) {
  const Count count = instantiate_product<detail::Fault::nccl_on_cpu>(
      Strategies{}, Devices{}, Backends{}, List<World<1>, World<4>, World<dynamic>>{});
  BOOST_TEST(count.legal == 2u * 8 * 3);
  BOOST_TEST(count.fingerprints.size() == count.legal);  // no two jobs are taken for one another
}

BOOST_AUTO_TEST_CASE(samplers_with_either_strategy) {
  const Count count = instantiate_product(
      Strategies{}, Devices{},
      List<Sampler<Distributed, Padding>, Sampler<Distributed, DropLast>,
           Sampler<Distributed, Exact>, Sampler<Distributed, Masked>,
           Sampler<Distributed, Padding, KeyedShuffle>, Sampler<Distributed, Exact, InOrder>,
           Sampler<Distributed, Padding, BlockShuffle<8, 2>>,
           Sampler<Distributed, Padding, BlockShuffle<2, 8>>>{});
  BOOST_TEST(count.legal == 2u * 2 * 8);
  BOOST_TEST(count.fingerprints.size() == count.legal);
}

BOOST_AUTO_TEST_CASE(shardings_wherever_they_are_legal) {
  const Count count = instantiate_product<detail::Fault::shared_without_shm>(
      Strategies{}, Devices{}, List<Backend<Shm>, Backend<Gloo>>{},
      List<Sharding<HostShared>, Sharding<Replicated>>{}, List<Clip<>, Clip<1.0>>{});
  BOOST_TEST(count.legal == (8u + 3) * 2);  // shared: on the CPU, through Shm or with DP
  BOOST_TEST(count.fingerprints.size() == count.legal);
}

BOOST_AUTO_TEST_CASE(optimizers_accumulation_clipping_and_buckets) {
  const Count count =
      instantiate_product(Strategies{},
                          List<Optimizer<SGD>, Optimizer<SGDMomentum>, Optimizer<SGDNesterov>,
                               Optimizer<Adam>, Optimizer<AdamW>>{},
                          List<Accumulate<1>, Accumulate<4>>{}, List<Clip<>, Clip<1.0>>{});
  BOOST_TEST(count.legal == 2u * 5 * 2 * 2);
  BOOST_TEST(count.fingerprints.size() == count.legal);
  const Count of_buckets =
      instantiate_product(Strategies{}, List<Accumulate<1>, Accumulate<4>>{},
                          List<Buckets<>, Buckets<BucketLimits{.first = 0, .cap = 0}>>{},
                          List<LossOnOutput, LossOnReplica>{});
  BOOST_TEST(of_buckets.legal == 2u * 2 * 2 * 2);
  BOOST_TEST(of_buckets.fingerprints.size() == of_buckets.legal);
}

BOOST_AUTO_TEST_CASE(schedules_buffers_unused_parameters_and_progress) {
  const Count count = instantiate_product(
      Strategies{}, List<Schedule<Constant>, Schedule<StepDecay>, Schedule<Cosine>>{},
      List<Buffers<Broadcast>, Buffers<Local>, Buffers<Synced>>{});
  BOOST_TEST(count.legal == 2u * 3 * 3);
  BOOST_TEST(count.fingerprints.size() == count.legal);
  const Count of_unused =
      instantiate_product(Strategies{}, List<Buffers<Broadcast>, Buffers<Synced>>{},
                          List<UnusedParameters<Forbid>, UnusedParameters<Zero>>{},
                          List<Progress<Callers>, Progress<HelperThread>>{});
  BOOST_TEST(of_unused.legal == 2u * 2 * 2 * 2);
  BOOST_TEST(of_unused.fingerprints.size() == of_unused.legal);
}

BOOST_AUTO_TEST_SUITE_END()

// ---- Whole trainers, of both strategies: a few, each with many policies that are not the default.

namespace {

using Numbers = LabelledBatch<float, float>;

/// Its loss is the sum of what it is given, whatever its parameters are.
struct Summing {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", double, 3>>;
  using Buffers = BufferList<Buffer<"mean", float, 3>>;
  using Output = OutputOf<float>;

  float forward(auto& step, const Numbers& batch) {
    step.buffer("mean"_p)(0) += 1;
    return static_cast<float>(batch.size());
  }
  void backward(auto& step, const Numbers&) { mark(step); }
  void predict(auto& step, const Numbers& batch, auto outputs) {
    step.buffer("mean"_p)(0) += 1;
    for (std::size_t i = 0; i < batch.size(); ++i) outputs(i) = 1;
  }
  float loss(auto&, const Numbers& batch, auto outputs, auto gradients) {
    for (std::size_t i = 0; i < batch.size(); ++i) gradients(i) = outputs(i);
    return static_cast<float>(batch.size());
  }
  void backward(auto& step, const Numbers&, auto) { mark(step); }

 private:
  static void mark(auto& step) {
    for (std::size_t i = 0; i < 3; ++i) step.grad("b"_p)(i) = step.grad("w"_p)(i, 0) = 0;
    step.ready("b"_p);
    step.ready("w"_p);
  }
};

template <class... Ps>
void train_once(std::size_t replicas) {
  using Job = Trainer<Summing, Ps...>;
  Session session = detail::join_alone();
  TrainerOptions options;
  if constexpr (Job::is_one_process) options.replicas = replicas;
  Job job(session, {}, options);
  const InMemoryDataset<float, float> data({1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 5, 6});
  for (auto epoch : job.epochs(1)) {
    for (const auto& batch : epoch.batches(data, 3)) job.step(batch);
    job.evaluate(data, 4);
    job.barrier();
  }
  BOOST_TEST(job.position().epoch == Epoch{0});
}

}  // namespace

BOOST_AUTO_TEST_SUITE(instantiate_trainers)

BOOST_AUTO_TEST_CASE(trainers_of_either_strategy_run) {
  train_once<ParallelStrategy<DDP>>(1);
  train_once<ParallelStrategy<DP>, World<2>, Norms<Synced>, lockstep::Buffers<Synced>>(2);
  train_once<ParallelStrategy<DP>, LossOnReplica, Sharding<Replicated>, UnusedParameters<Zero>,
             lockstep::Buffers<Local>, Accumulate<2>, Clip<1.0>, Optimizer<AdamW>, Schedule<Cosine>,
             Sampler<Distributed, Exact, KeyedShuffle>, Progress<HelperThread>>(3);
  train_once<ParallelStrategy<DP>, World<1>, Optimizer<SGDNesterov>, Accumulate<2>>(1);
}

BOOST_AUTO_TEST_SUITE_END()
