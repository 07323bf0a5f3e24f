// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks with different numbers of batches on GPUs: a case of join.json, and whose buffers
/// are left in the end. What is wrong is thrown.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "gpu/plain_mlp.cuh"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "reference.hpp"
#include "require.hpp"

namespace joining {

using namespace lockstep;
using namespace train;

/// Its buffer is the mark of the batch that it saw last.
struct Marking : GpuPlainMlp<double, dynamic, dynamic, dynamic> {
  using Buffers = BufferList<Buffer<"mark", std::uint8_t, 1>>;
  std::uint8_t mark = 0;

  void forward(auto& step, const auto& batch) {
    check_cuda(cudaMemsetAsync(step.buffer("mark"_p).data_handle(), mark, 1, step.stream()),
               "cudaMemsetAsync");
    GpuPlainMlp::forward(step, batch);
  }
};

/// The mark of batch `s` of rank `r`.
inline std::uint8_t mark_of(std::size_t r, std::size_t s) {
  return static_cast<std::uint8_t>(1 + 32 * r + s);
}

template <class... Ps, class Comm>
void train_case(Comm& comm, const nlohmann::json& c) {
  const std::size_t in = c.at("dims").at(0), out = c.at("dims").at(2), rows = c.at("batch");
  const std::size_t me = comm.rank().value();
  const std::vector<std::size_t> batches = c.at("batches_per_rank");
  Marking network;
  network.in = in;
  network.hidden = c.at("dims").at(1);
  network.out = out;
  detail::BasicDdp<
      Marking,
      CanonicalPolicies<Device<Cuda>, Optimizer<SGD>, Buckets<BucketLimits{600, 1500}>, Ps...>,
      Comm>
      ddp(comm, std::move(network));
  ddp.optimizer().lr = c.at("lr");
  auto joined = ddp.join();
  for (std::size_t s = 0; s != batches[me]; ++s) {
    ddp.model().mark = mark_of(me, s);
    const auto batch = labelled<double>(reference_batch(rows, in, out, s, me));
    if ((s + me) % 2 == 0) {
      ddp.step(batch);
    } else {
      ddp.forward(batch).backward().reduce().update();
    }
  }
  joined.finish();
  comm.synchronize();
  constexpr std::array names{"fc1.weight", "fc1.bias",   "fc2.weight",
                             "fc2.bias",   "fc3.weight", "fc3.bias"};
  std::size_t p = 0;
  PlainMlp<1, 1, 1>::for_each_parameter(ddp, [&](const auto& view) {
    const std::string name = names[p++];
    const std::vector<double> want = c.at("params").at(name);
    std::vector<double> have(view.size());
    check_cuda(cudaMemcpy(have.data(), view.data_handle(), have.size() * sizeof(double),
                          cudaMemcpyDefault),
               "cudaMemcpy");
    require(have.size() == want.size(), "the size of " + name);
    for (std::size_t i = 0; i < want.size(); ++i)
      require(std::abs(have[i] - want[i]) <= 1e-9 * std::max(std::abs(want[i]), 1e-3),
              name + "[" + std::to_string(i) + "] is " + std::to_string(have[i]) +
                  ", PyTorch has " + std::to_string(want[i]));
  });
  const auto most = std::max_element(batches.begin(), batches.end());  // the lowest of these
  const std::uint8_t newest = mark_of(static_cast<std::size_t>(most - batches.begin()), *most - 1);
  std::uint8_t mark = 0;
  check_cuda(cudaMemcpy(&mark, ddp.buffer("mark"_p).data_handle(), 1, cudaMemcpyDefault),
             "cudaMemcpy");
  require(mark == newest, "the buffer is that of mark " + std::to_string(mark) + " instead of " +
                              std::to_string(newest));
}

/// The cases of a world, each divided as it says. `Ps` are given to those divided by live ranks.
/// Returns how many there are.
template <class... Ps>
std::size_t train_cases_of_world(auto& comm) {
  std::size_t cases = 0;
  for (const nlohmann::json& c : reference("join.json")) {
    if (c.at("world") != comm.world_size().value()) continue;
    ++cases;
    if (c.at("divide_by_initial_world_size")) {
      train_case<UnevenInputs<Join>>(comm, c);
    } else {
      train_case<UnevenInputs<Join, DivideByLive>, Ps...>(comm, c);
    }
  }
  return cases;
}

}  // namespace joining
