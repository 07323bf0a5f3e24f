// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the tests of checkpoints share: a model with buffers, and the bits of a job.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "message_of.hpp"
#include "train/checkpoint_files.hpp"
#include "train/sheet.hpp"

namespace checkpoints {

using namespace train;

/// A sheet of two element types that counts its batches in a buffer.
struct Ledger : Sheet<float, float, double> {
  using Buffers = BufferList<Buffer<"seen", double, 2>>;
  double forward(auto& step, const Entry& entry) {
    step.buffer("seen"_p)(0) += 1;
    step.buffer("seen"_p)(1) += entry.loss;
    return Sheet::forward(step, entry);
  }
  double forward(auto& step, const Entries& share) { return forward(step, share.all.at(0)); }

  using Sheet::backward;
  void backward(auto& step, const Entries& share) { Sheet::backward(step, share.all.at(0)); }
};

/// The jobs of more than one test, because every job takes the compiler seconds.
using SharedAdam = DistributedDataParallel<Ledger, Optimizer<AdamW>, Accumulate<2>>;
using OwnBuffers =
    DistributedDataParallel<Ledger, Sharding<Replicated>, Optimizer<SGDMomentum>, Accumulate<3>,
                            Schedule<StepDecay>, Buffers<Local>, Buckets<BucketLimits{100, 200}>>;

inline Entry entry_of(std::size_t rank, std::size_t step) {
  const auto r = static_cast<double>(rank);
  const auto s = static_cast<double>(step);
  return {.gradient = {0.5 + 0.25 * r - 0.125 * s, 0.75 - 0.5 * r * s, 0.25 * s - 0.3},
          .loss = s + 0.125 * r};
}

/// A hash of all that this rank keeps: parameters, buffers, states, counts, numbers.
std::uint64_t bits_of(auto& ddp) {
  lockstep::detail::Hash hash;
  const auto add = [&](std::string_view name, const auto& view) {
    const auto* const bytes = reinterpret_cast<const char*>(view.data_handle());
    hash.text(name).text({bytes, view.size() * sizeof(*view.data_handle())});
  };
  ddp.for_each_parameter(add);
  ddp.for_each_buffer(add);
  ddp.for_each_state(
      [&](std::string_view name, std::string_view state, const auto& view, std::size_t) {
        hash.text(state);
        add(name, view);
      });
  hash.number(ddp.updates());
  for (const auto& number : ddp.progress().numbers)
    std::visit([&](auto value) { hash.text(number.name).text(std::to_string(value)); },
               number.value);
  return hash.value();
}

inline void require_words(const std::string& have, const std::string& want) {
  require(have.find(want) != std::string::npos, "no \"" + want + "\" in \"" + have + "\"");
}

}  // namespace checkpoints
