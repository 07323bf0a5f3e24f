// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Saves a wrapped model with its optimizer to a file, at once or while training goes on.

#include <string>

#include "lockstep/comm/call.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/kept_job.hpp"
#include "lockstep/trainer/rejected.hpp"
#include "lockstep/trainer/saver_core.hpp"
#include "lockstep/trainer/with_kept_job.hpp"

namespace lockstep {

/// Writes checkpoints of one job, one after the other; its memory and thread serve all of them. It
/// must not outlive the wrapper.
///
///     Saver saver;
///     for (const auto& batch : loader) {
///       ddp.step(batch);
///       if (ddp.updates() % 1000 == 0) saver.save(ddp, path, {.asynchronous = true});
///     }
///     saver.finish(ddp);
class Saver {
 public:
  /// Saves the job as it is now: parameters, buffers, which are synchronised first, the optimizer
  /// and what the options have. The file is replaced as a whole or stays as it is. An asynchronous
  /// save returns when all that is saved was copied. False where it was skipped. An error between
  /// the micro-batches of a step, whose gradients are no part of a checkpoint.
  ///
  /// What goes wrong on one rank is the same error on all, and the job may go on. An error of an
  /// asynchronous save is thrown by the next `save`, `finish` or `rethrow`.
  ///
  /// **Ranks** all, with the same path. **Host** blocks, as said. **Stream** after all steps so
  /// far.
  template <class Wrapper>
  bool save(Wrapper& wrapped, const std::string& path, const SaveOptions& options = {}) {
    if constexpr (detail::is_rejected<Wrapper>) {
      return false;
    } else {
      bool is_saved = false;
      detail::with_kept_job(wrapped, detail::JobCall::save, [&](const detail::KeptJob& job) {
        is_saved = core_.save(job, path, options);
      });
      return is_saved;
    }
  }

  /// Waits until all is written. **Ranks** all. **Host** blocks.
  template <class Wrapper>
  void finish(Wrapper& wrapped) {
    if constexpr (!detail::is_rejected<Wrapper>) {
      detail::with_joint_ranks(wrapped, detail::JobCall::save,
                               [&](const detail::JointRanks& ranks) { core_.finish(ranks); });
    }
  }

  /// Throws the failure of an asynchronous save of this rank that has ended.
  void rethrow() { core_.rethrow(); }
  /// Is this rank's part of a save still being written?
  bool is_busy() const { return core_.is_busy(); }

 private:
  detail::SaverCore core_;
};

/// Saves a wrapped model with its optimizer: `save(ddp, "model.safetensors", {.epoch = epoch})`.
/// **Ranks** all, with the same path. **Host** blocks until the file is written.
template <class Wrapper>
void save(Wrapper& wrapped, const std::string& path, const SaveOptions& options = {}) {
  Saver saver;
  saver.save(wrapped, path, options);
  saver.finish(wrapped);
}

}  // namespace lockstep
