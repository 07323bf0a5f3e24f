// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A `Saver` without the types of jobs.

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/background.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/kept_job.hpp"

namespace lockstep::detail {

struct RankFile;

/// A `Saver` without the types of jobs.
class SaverCore {
 public:
  SaverCore();
  /// **Host** blocks until the save under way is written; where an exception drives this object out
  /// of its scope, rank 0 waits for no other rank's part.
  ~SaverCore();
  SaverCore(const SaverCore&) = delete;
  SaverCore& operator=(const SaverCore&) = delete;

  bool save(const KeptJob& job, const std::string& path, const SaveOptions& options);
  void finish(const JointRanks& ranks);
  void rethrow() {
    if (writer_) writer_->rethrow();
  }
  bool is_busy() const { return writer_ && writer_->is_busy(); }

 private:
  std::shared_ptr<RankFile> collect(const KeptJob& job, const std::string& path,
                                    const SaveOptions& options,
                                    const std::vector<std::string>& told);
  void add_tensors(const KeptJob& job, bool copies_all, RankFile& file);
  void write_now(const KeptJob& job, RankFile& file);
  void write_later(const KeptJob& job, const std::shared_ptr<RankFile>& file);
  void give_up();

  std::optional<BackgroundWriter> writer_;
  SnapshotMemory snapshot_;
  std::atomic<bool> is_given_up_ = false;  // nobody needs the file that is being written
  int exceptions_;                         // that were under way when this object was made
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/saver_core.ipp"
#endif
