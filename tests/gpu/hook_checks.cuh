// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What hooks do on GPUs, and updates that leave parameters out: as the host does them, as
/// PyTorch does, and captured as call by call. Every check throws what is wrong.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gpu/ddp_checks.cuh"
#include "train/filter_case.hpp"

namespace gpu_test {

// ---- Hooks, beside a job of the host's ranks

inline constexpr PowerSgdOptions from_third_step{2};

template <class Network>
Network hooked_network() {
  Network network;
  network.in = 24;
  network.hidden = 40;
  network.out = 5;
  return network;
}

template <class Ddp>
std::vector<double> train_hooked(Ddp& ddp, auto& comm, const auto& make_batch) {
  std::vector<double> numbers;
  for (std::size_t s = 0; s < 10; ++s)
    numbers.push_back(ddp.step(make_batch(reference_batch(6, 24, 5, s % 3, comm.rank().value()))));
  if constexpr (requires { comm.synchronize(); }) comm.synchronize();
  PlainMlp<1, 1, 1>::for_each_parameter(ddp, [&](const auto& view) {
    for (const auto value : downloaded(view)) numbers.push_back(static_cast<double>(value));
  });
  numbers.push_back(static_cast<double>(ddp.bytes_sent()));
  return numbers;
}

/// Ranks on GPUs end where ranks of the host end, to `tolerance`, and send as many bytes; captured
/// steps have the bits of others.
template <class... Hook>
void compare_hooks(auto& comm, auto& host, const char* what, double tolerance) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  using HostComm = std::remove_reference_t<decltype(host)>;
  using OnGpu = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  using OnCpu = PlainMlp<dynamic, dynamic, dynamic>;
  using Small = Buckets<BucketLimits{3000, 9000}>;
  const auto run = [&]<class... Ps>(std::type_identity<PolicyPack<Ps...>>) {
    Ddp<OnGpu, Comm, Optimizer<SGDMomentum>, Small, Hooks<Hook...>, Ps...> ddp(
        comm, hooked_network<OnGpu>());
    auto numbers = train_hooked(ddp, comm, [](const Samples& s) { return labelled<double>(s); });
    if constexpr (sizeof...(Ps) != 0) {
      require(ddp.template captured_graphs<LabelledBatch<double, std::int32_t>>() != 0,
              std::string(what) + ": nothing was captured");
    }
    return numbers;
  };
  const auto eager = run(std::type_identity<PolicyPack<>>{});
  detail::BasicDdp<OnCpu,
                   CanonicalPolicies<Backend<Shm>, Optimizer<SGDMomentum>, Small, Hooks<Hook...>>,
                   HostComm>
      cpu(host, hooked_network<OnCpu>());
  const auto want = train_hooked(cpu, host, [](const Samples& s) { return s; });
  for (std::size_t i = 0; i < want.size(); ++i) {
    require(close(eager[i], want[i], tolerance),
            std::string(what) + ": number " + std::to_string(i) + " is " +
                std::to_string(eager[i]) + ", ranks of the host have " + std::to_string(want[i]));
  }
  require(eager.back() == want.back(), std::string(what) + ": bytes");
  if constexpr (Capturing<Comm>) {
    require(run(std::type_identity<PolicyPack<CapturedStep>>{}) == eager,
            std::string(what) + ": captured steps give other bits");
  }
}

void check_hooks(auto& comm, auto& host) {
  compare_hooks<CompressTo<BFloat16>>(comm, host, "CompressTo<BFloat16>", 0.05);
  compare_hooks<CompressTo<Half>>(comm, host, "CompressTo<Half>", 0.01);
  compare_hooks<PowerSGD<2, from_third_step>>(comm, host, "PowerSGD", 1e-8);
  compare_hooks<PowerSGD<2, from_third_step>, CompressTo<float>>(comm, host, "PowerSGD in float",
                                                                 1e-3);
  compare_hooks<LocalSGD<3>>(comm, host, "LocalSGD", 1e-8);
}

/// In other types, after many steps: ranks have the same bits, and the loss has come down.
void check_hooked_types(auto& comm) {
  const auto learns = [&](const char* what, const auto& run) {
    double ends[] = {run.first.front(), run.first.back()};
    comm.all_reduce(ends, Average{});
    require(ends[1] < ends[0], std::string(what) + " does not learn: the mean loss goes from " +
                                   std::to_string(ends[0]) + " to " + std::to_string(ends[1]));
  };
  learns("PowerSGD in bfloat16", run_job<Optimizer<SGDMomentum>, Precision<Mixed<BFloat16>>,
                                         Hooks<PowerSGD<2, from_third_step>>, Clip<1.0>>(comm, 40));
  learns("PowerSGD in half", run_job<Optimizer<SGDMomentum>, Precision<Mixed<Half>>, Accumulate<2>,
                                     Hooks<PowerSGD<2, from_third_step>>>(comm, 80));
  learns("CompressTo in float",
         run_job<Optimizer<SGDMomentum>, Hooks<CompressTo<BFloat16>>>(comm, 40));
}

/// A job with hooks goes on from a copy.
template <class... Ps>
void check_hooks_kept(auto& comm) {
  check_kept<Optimizer<AdamW>, Hooks<PowerSGD<2, from_third_step>>, Ps...>(comm, "PowerSGD");
  check_kept<Optimizer<AdamW>, Hooks<PowerSGD<1, from_third_step>>, Accumulate<2>, Ps...>(
      comm, "PowerSGD with accumulation");
  check_kept<Optimizer<AdamW>, Hooks<LocalSGD<3>>, Ps...>(comm, "LocalSGD");
  check_kept<Optimizer<AdamW>, Hooks<SkipZeroGradients>, ParameterGroups<NoDecay<>>, Ps...>(
      comm, "SkipZeroGradients");
}

// ---- Gradients of zero

template <class Model, class... Ps>
void train_zero_case(auto& comm, const FilterCase& c, const auto& step) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Model, Comm, Optimizer<AdamW>, Buckets<BucketLimits{600, 1500}>, Ps...> ddp(
      comm, c.reference.model<Model>());
  train_filtered(
      c, ddp, comm.rank().value(), [](const auto& samples) { return labelled<double>(samples); },
      step);
  comm.synchronize();
  require_parameters(c.reference, ddp, [](const auto& view) { return downloaded(view); });
}

/// Gradients of zero, none, and sub-graphs, all of which leave fc2 alone.
std::size_t check_zero_filter(auto& comm) {
  using Model = GpuPlainMlp<double, dynamic, dynamic, dynamic>;
  using Divided = GpuSubgraphMlp<double, dynamic, dynamic, dynamic>;
  using Union = UnusedParameters<Subgraphs<WithoutFc2>>;
  using Same = UnusedParameters<Subgraphs<SameOnAllRanks, WithoutFc2>>;
  std::size_t number = 0;
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("zero_filter.json")) {
    const FilterCase c = filter_case(number++, figures);
    if (c.reference.world != comm.world_size().value()) continue;
    ++cases;
    if (!c.filtered) {
      train_zero_case<Model>(comm, c, step_with_zeros);
      continue;
    }
    train_zero_case<Model, Hooks<SkipZeroGradients>>(comm, c, step_with_zeros);
    // A norm that clips nothing has the test for zero ride in its pass.
    train_zero_case<Model, Hooks<SkipZeroGradients>, Clip<1e9>>(comm, c, step_with_zeros);
    train_zero_case<Model, UnusedParameters<Zero>>(comm, c, step_without_gradient);
    train_zero_case<Divided, Union>(comm, c, step_of_subgraph);
    train_zero_case<Divided, Same>(comm, c, step_of_subgraph);
    if constexpr (Capturing<std::remove_reference_t<decltype(comm)>>)
      train_zero_case<Divided, Same, CapturedStep>(comm, c, step_of_subgraph);
    train_zero_case<Model, Hooks<SkipZeroGradients>, Sharding<ZeroRedundancy>>(comm, c,
                                                                               step_with_zeros);
  }
  return cases;
}

/// Batches of zeros leave fc1.weight without a gradient, which only the device knows.
template <class... Ps>
std::vector<std::string> train_with_zeros(auto& comm) {
  using Comm = std::remove_reference_t<decltype(comm)>;
  Ddp<Network, Comm, Optimizer<AdamW>, Hooks<SkipZeroGradients>, Ps...> ddp(comm);
  std::vector<std::string> seen;
  std::vector<float> before;
  for (std::size_t s = 0; s < 10; ++s) {
    auto batch = labelled<float>(reference_batch(6, 20, 4, s % 2, comm.rank().value()));
    const bool empty = s % 3 == 1;
    for (float& x : batch.inputs) x = empty ? 0 : x;
    ddp.step(batch);
    comm.synchronize();
    const auto after = downloaded(ddp.param("fc1.weight"_p));
    require(s == 0 || (before == after) == empty, "fc1.weight after step " + std::to_string(s));
    before = after;
    seen.push_back(all_parameters(ddp));
  }
  require_equal_replicas(comm, ddp, "zero gradients");
  return seen;
}

void check_zero_captured(auto& comm) {
  const auto compare = [&]<class... Ps>(std::type_identity<PolicyPack<Ps...>>, const char* what) {
    const auto eager = train_with_zeros<Ps...>(comm);
    if constexpr (Capturing<std::remove_reference_t<decltype(comm)>>) {
      require(train_with_zeros<Ps..., CapturedStep>(comm) == eager,
              std::string(what) + ": captured steps give other bits");
    }
  };
  compare(std::type_identity<PolicyPack<>>{}, "zero gradients");
  compare(std::type_identity<PolicyPack<Clip<0.5>, ParameterGroups<NoDecay<>>>>{},
          "zero gradients, clipped");
}

/// All of them, or those that are named. `host` is a communicator of the same ranks.
void run_hook_checks(auto& comm, auto& host, const std::string& name) {
  NamedChecks run(comm, name);
  run("hooks", [&] { check_hooks(comm, host); });
  run("hooked_types", [&] { check_hooked_types(comm); });
  run("zero_filter", [&] { return check_zero_filter(comm); });
  run("zero_captured", [&] { check_zero_captured(comm); });
  run("hooks_kept", [&] { check_hooks_kept<>(comm); });
  if constexpr (Capturing<std::remove_reference_t<decltype(comm)>>)
    run("hooks_kept_captured", [&] { check_hooks_kept<CapturedStep>(comm); });
  run.require_known();
}

}  // namespace gpu_test
