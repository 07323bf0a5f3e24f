// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A job as saving and loading see it, without its type: they are compiled once, for all
/// jobs. No code of models is included here, which may be compiled in another mode.

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "lockstep/bucket/kept_piece.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/optim/replica_progress.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/kept_shape.hpp"

namespace lockstep::detail {

/// Memory into which a device copies best.
struct SnapshotMemory {
  std::shared_ptr<void> owner;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// This rank's part of a job. The functions are the wrapper's; none but `synchronize_buffers` and
/// those of `ranks` communicates.
struct KeptJob {
  JointRanks ranks;
  KeptShape shape;
  bool is_one_process = false;    ///< are all replicas of this process?
  std::size_t micro_batches = 0;  ///< that are added up, and not yet used
  FunctionRef<std::vector<KeptPiece>(KeptFor)> pieces;
  FunctionRef<ReplicaProgress()> progress;
  FunctionRef<void(const ReplicaProgress&)> set_progress;
  FunctionRef<void()> synchronize_buffers;  ///< where one set of them is that of all ranks
  FunctionRef<SnapshotMemory(std::size_t)> make_memory;
  FunctionRef<void(std::span<const KeptCopy>)> copy_out;
  /// Waits for the latest copies, on any thread, while the wrapper lives.
  void (*await_copies)(void* wrapper);
  void* wrapper;
  FunctionRef<void(const KeptPiece&, const std::byte*)> copy_in;
  std::vector<NameAlias> aliases{};  ///< of parameters and buffers
};

}  // namespace lockstep::detail
