// SPDX-License-Identifier: Apache-2.0
// Sharding<ZeroRedundancy> and Sharding<FullyShard> on GPUs: ddp_zero --ranks N shm|nccl|gloo|hosts
// [CHECK], where `hosts` are two that ranks of one machine play, with Gloo between them.
#include <stdlib.h>

#include "gpu/ddp_checks.cuh"
#if LOCKSTEP_HAS_NCCL
#include "lockstep/nccl.cuh"
#endif
#if LOCKSTEP_HAS_GLOO
#include "lockstep/gloo.cuh"
#endif

namespace gpu_test {

using ZeRO = Sharding<ZeroRedundancy>;

/// Are sums of shards made in the order in which those of whole buckets are?
template <class Comm>
bool sums_alike(const Comm& comm) {
  return detail::JointlyCapturing<Comm> || comm.world_size().value() <= 2;
}

/// Are these two jobs the same, but for the order of sums?
template <class Comm>
void require_alike(const Comm& comm, const auto& got, const auto& wanted, const std::string& how) {
  require(got.second.size() == wanted.second.size(), how + ": other sizes");
  if (sums_alike(comm)) {
    require(got == wanted, how + ": other bits");
    return;
  }
  for (std::size_t s = 0; s < wanted.first.size(); ++s)
    require(close(got.first[s], wanted.first[s], 1e-3),
            how + ": the loss of step " + std::to_string(s) + " is " +
                std::to_string(got.first[s]) + ", replicated " + std::to_string(wanted.first[s]));
}

/// Replicas, shards and, on demand, shards in graphs; the same bits in a second run.
template <class... Ps>
void check_bits(auto& comm, const std::string& how) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  const auto shards = run_job<Optimizer<AdamW>, ZeRO, Ps...>(comm, 8, 3);
  require_alike(comm, shards, run_job<Optimizer<AdamW>, Ps...>(comm, 8, 3), how);
  require(run_job<Optimizer<AdamW>, ZeRO, Ps...>(comm, 8, 3) == shards, how + ": a second run");
  if constexpr (Capturing<Comm>)
    require(run_job<Optimizer<AdamW>, ZeRO, CapturedStep, Ps...>(comm, 8, 3) == shards,
            how + ": captured steps give other bits than steps call by call");
}

/// In 16 bits and with a norm over shards: close to replicas, whose norm may be rounded otherwise.
template <class Sharded, class... Ps>
void check_mixed_shards(auto& comm, const std::string& how) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  constexpr std::size_t steps = 20;
  const auto want = run_job<Optimizer<SGDMomentum>, Clip<1.0>, Ps...>(comm, steps);
  const auto got = run_job<Optimizer<SGDMomentum>, Clip<1.0>, Sharded, Ps...>(comm, steps);
  for (std::size_t s = 0; s < steps; ++s)
    require(close(got.first[s], want.first[s], 0.02),
            how + ": the loss of step " + std::to_string(s) + " is " +
                std::to_string(got.first[s]) + ", replicated " + std::to_string(want.first[s]));
  if constexpr (Capturing<Comm>)
    require(run_job<Optimizer<SGDMomentum>, Clip<1.0>, Sharded, CapturedStep, Ps...>(comm, steps) ==
                got,
            how + ": captured steps give other bits");
}

/// A rank keeps its share of the states, and 16 bytes of each bucket and state more at most.
void check_share(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<AdamW>> replicated(comm);
  Ddp<Network, Comm, Optimizer<AdamW>, ZeRO> shards(comm);
  const std::size_t share = replicated.state_bytes() / comm.world_size().value();
  require(shards.state_bytes() <= share + 2 * 16,
          "a rank keeps " + std::to_string(shards.state_bytes()) + " bytes of " +
              std::to_string(replicated.state_bytes()));
}

/// Parameters in slices train as gradients in slices do: the same sums.
void check_units(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using Fully = Sharding<FullyShard, Units<"fc1", "fc2">, GatheredUnits<2>>;
  const auto want = run_job<Optimizer<AdamW>, Sharding<ZeroRedundancy, Gradients>>(comm, 8, 3);
  const auto got = run_job<Optimizer<AdamW>, Fully>(comm, 8, 3);
  require_alike(comm, got, want, "units");
  require(run_job<Optimizer<AdamW>, Fully>(comm, 8, 3) == got, "units: a second run");
  if constexpr (Capturing<Comm>)
    require(run_job<Optimizer<AdamW>, Fully, CapturedStep>(comm, 8, 3) == got,
            "units: captured steps give other bits than steps call by call");
  Ddp<Network, Comm, Optimizer<AdamW>> replicated(comm);
  Ddp<Network, Comm, Optimizer<AdamW>, Fully> sharded(comm);
  require(sharded.state_bytes() <= replicated.state_bytes() / comm.world_size().value() + 8 * 16,
          "a rank keeps more states than its own");
}

/// `Every` is false where nothing can be run and the same code is compiled elsewhere.
template <bool Every>
void run_zero_checks(auto& comm, const std::string& name) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  constexpr bool captures = Capturing<Comm>;
  NamedChecks run(comm, name);
  run("parity", [&] { return check_parity<ZeRO>(comm); });
  run("bits", [&] {
    check_share(comm);
    check_bits<>(comm, "shards");
    if constexpr (Every) check_bits<Buckets<BucketLimits{600, 1500}>>(comm, "many shards");
  });
  if constexpr (Every) {
    if constexpr (captures) {
      run("parity_captured", [&] { return check_parity<ZeRO, CapturedStep>(comm); });
      run("captured", [&] {
        check_tail<ZeRO, CapturedStep>(comm);
        check_skip<ZeRO, CapturedStep>(comm);
        check_mixed_sets<ZeRO, CapturedStep>(comm);
        check_saved<ZeRO, CapturedStep>(comm);
        check_listed<ZeRO, CapturedStep>(comm);
      });
    }
    run("mixed", [&] {
      check_mixed_shards<ZeRO, Precision<Mixed<Half>>>(comm, "half");
      check_mixed_shards<ZeRO, Precision<Mixed<BFloat16, float>>, Accumulate<2>>(
          comm, "bfloat16, reduced in float");
      check_mixed_shards<ZeRO, Precision<Mixed<float, BFloat16>>>(comm,
                                                                  "float, reduced in bfloat16");
    });
    run("sets", [&] {
      check_sets<ZeRO>(comm);
      check_sets<ZeRO, Clip<0.5>>(comm);
      check_mixed_sets<ZeRO>(comm);
    });
    run("unused", [&] {
      check_unused<ZeRO>(comm);
      check_sets<ZeRO, UnusedParameters<Zero>>(comm);
    });
    run("numbers", [&] {
      check_cpu<ZeRO>(comm);
      check_tail<ZeRO>(comm);
      check_skip<ZeRO>(comm);
    });
    run("kept", [&] {
      check_kept<Optimizer<AdamW>, Clip<0.5>, Accumulate<2>, ZeRO>(comm, "in float");
      check_kept<Optimizer<AdamW>, Precision<Mixed<Half>>, Frozen<"fc2.*">,
                 ParameterGroups<NoDecay<>>, ZeRO>(comm, "with a scaled loss");
    });
    run("saved", [&] { check_saved<ZeRO>(comm); });
    run("units", [&] {
      check_units(comm);
      check_parity<Sharding<FullyShard>>(comm);
      check_mixed_shards<Sharding<FullyShard>, Precision<Mixed<BFloat16, float>>>(comm, "units");
    });
    run.ending("anomaly", [&] { check_anomaly<ZeRO>(comm); });
  }
  run.require_known();
}

}  // namespace gpu_test

int main(int argc, char** argv) {
  using namespace lockstep;
  if (detail::visible_gpus() == 0) {
    std::puts("compiled and linked; not run: no CUDA device here");
    return 0;
  }
  const auto wants = [&](const std::string& backend) {
    for (int i = 1; i < argc; ++i)
      if (argv[i] == backend) return true;
    return false;
  };
  const auto check = [](const Session& session) {
    return session.arguments().size() > 2 ? session.arguments()[2] : std::string("all");
  };
#if LOCKSTEP_HAS_NCCL
  if (wants("nccl")) {
    return launch(argc, argv, [&](Session& session) {
      auto comm = make_nccl_communicator(session.membership(), session.store());
      gpu_test::run_zero_checks<LOCKSTEP_RUNS_ON_GPU>(comm, check(session));
    });
  }
#endif
#if LOCKSTEP_HAS_GLOO
  if (wants("gloo")) {
    return launch(argc, argv, [&](Session& session) {
      auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                           make_gloo_communicator<>);
      gpu_test::run_zero_checks<LOCKSTEP_RUNS_ON_GPU>(comm, check(session));
    });
  }
  if (wants("hosts")) {
    return launch(argc, argv, [&](Session& session) {
      const std::size_t world = session.world().value();
      const std::size_t on_each = world % 2 == 0 ? world / 2 : 1;
      ::setenv("LOCKSTEP_HOST", std::to_string(session.rank().value() / on_each).c_str(), 1);
      auto comm = make_staged_communicator(session.membership(), session.store(), "world",
                                           make_hierarchical_communicator);
      gpu_test::run_zero_checks<false>(comm, check(session));
    });
  }
#endif
  if (wants("shm")) {
    return launch_threads(argc, argv, [&](Session& session) {
      auto comm = make_thread_communicator(session.membership(), session.store());
      gpu_test::run_zero_checks<true>(comm, check(session));
    });
  }
  std::puts("usage: ddp_zero --ranks N shm|nccl|gloo|hosts [CHECK], of what it was built with");
  return 2;
}
