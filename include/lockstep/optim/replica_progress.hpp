// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How far a job has come: what one that goes on from it must know beside tensors.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/optim/loss_scale.hpp"
#include "lockstep/optim/named_numbers.hpp"

namespace lockstep::detail {

/// It is the same on all ranks.
struct ReplicaProgress {
  std::uint64_t updates = 0;      ///< begun, with those that were skipped
  std::uint64_t counted = 0;      ///< by the optimizer's rule, which counts no skipped ones
  std::uint64_t skipped = 0;      ///< because gradients were not finite
  std::uint64_t epoch = 0;        ///< that the schedule was told
  bool knows_epoch = false;       ///< was it told one?
  std::uint64_t curve_ahead = 0;  ///< the schedule's step less `updates`, modulo 2^64
  std::optional<LossScale> loss_scale;
  /// From which the model's layers draw random numbers, where they do.
  std::optional<std::uint64_t> random_seed;
  /// The rank whose buffers all ranks get next, where that is not rank 0.
  std::optional<std::uint64_t> newest_buffers;
  /// The options of the optimizer ("optimizer/lr", of the groups that have their own
  /// "optimizer/1/lr") and of the schedule ("schedule/warmup").
  std::vector<NamedNumber> numbers;
};

}  // namespace lockstep::detail
