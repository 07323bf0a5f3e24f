// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file When a job saves, and where, whatever its type is.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/stop_request.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/trainer/checkpoint_calls.hpp"
#include "lockstep/trainer/joint_work.hpp"

namespace lockstep::detail {

class CheckpointFolder;

/// How many epochs of a resumed job have begun.
inline std::uint64_t begun_epochs(const Resumed& resumed) {
  return resumed.epoch + (resumed.position ? 1 : 0);
}

/// What is to be done after an update; all ranks want the same.
enum class WantedSave : std::uint8_t { none, save, stop };

/// When a job saves and where, whatever its type is.
class CheckpointPlan {
 public:
  explicit CheckpointPlan(CheckpointOptions options);

  const CheckpointOptions& options() const { return options_; }
  /// The file of a checkpoint after so many updates.
  std::string path_of(std::uint64_t updates) const;

  /// Rank 0 takes the folder; all ranks learn the best score in it. **Ranks** all. **Host** blocks.
  void open(const JointRanks& ranks);

  /// Is the job to go on from a checkpoint: because it was asked to, or was started again?
  bool resumes() const;
  /// The newest valid checkpoint in the folder. Rank 0 says which it has passed over, or that there
  /// is none. Throws where there are checkpoints and all of them are damaged. **Ranks** all.
  /// **Host** blocks.
  std::optional<std::string> find_newest(const JointRanks& ranks);
  /// The job goes on from there, or with nothing begins anew. Throws where the folder holds later
  /// checkpoints. **Ranks** all. **Host** blocks.
  void begin(const JointRanks& ranks, std::uint64_t updates, const Resumed* resumed);

  /// What is due when an update has ended. Now and then ranks tell each other whether their time is
  /// over or a signal has come. **Ranks** all. **Host** blocks now and then.
  WantedSave after_update(const JointRanks& ranks, std::uint64_t updates);
  /// What is due when an epoch has ended. **Ranks** all. **Host** blocks.
  WantedSave after_epoch(const JointRanks& ranks, bool is_best, bool is_last);

  /// The score that the best checkpoint is chosen by; throws where the scores have none.
  std::optional<double> score_in(const Scores& scores) const;
  /// Is it better than the best so far? NaN never is.
  bool is_better(double score) const;
  std::optional<double> best() const { return best_; }

  /// The newest checkpoint in the folder, and the best one, as this rank sees it.
  std::optional<std::string> latest() const;
  std::optional<std::string> best_path() const;

  /// Looks whether the folder is still there, and fills in what the plan says of a save. A score
  /// makes it the best. **Ranks** all. **Host** blocks.
  void prepare(const JointRanks& ranks, std::uint64_t updates, std::optional<double> score,
               SaveOptions& options);
  /// The signal that asks the job to stop; the state is saved.
  int stop();

 private:
  using Clock = std::chrono::steady_clock;

  bool look(const JointRanks& ranks);
  std::string told_best() const;
  void learn_best(const std::string& told);

  CheckpointOptions options_;
  std::shared_ptr<CheckpointFolder> folder_;  // of rank 0
  StopRequest stop_request_;
  std::optional<double> best_;
  std::uint64_t updates_ = 0;  // when this was last asked
  std::uint64_t until_look_ = 1;
  std::uint64_t updates_per_look_ = 1;
  int signal_ = 0;
  Clock::time_point looked_ = Clock::now();
  Clock::time_point saved_ = looked_;
};

/// The checkpoint that `where` names: the file, or the newest valid one in the folder. **Ranks**
/// all. **Host** blocks.
std::string checkpoint_at(const JointRanks& ranks, const std::string& where);

/// Has a trainer written this file, and said how far its loops were?
bool has_course(const std::string& path);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/checkpoint_plan.ipp"
#endif
