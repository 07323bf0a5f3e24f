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
  /// over or a signal has come: `gather(text)` gives every rank's text, by rank. It is a template
  /// because steps come here, which call nothing through a pointer. **Ranks** all, of which there
  /// are `world`. **Host** blocks now and then.
  template <class Gather>
  WantedSave after_update(std::uint64_t updates, std::size_t world, const Gather& gather) {
    const std::uint64_t every = options_.every_steps;
    bool is_due = every != 0 && updates / every != updates_ / every;
    updates_ = updates;
    if (--until_look_ == 0) is_due = look(world, gather) || is_due;
    if (signal_ != 0) return WantedSave::stop;
    return is_due ? WantedSave::save : WantedSave::none;
  }
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

  /// What a rank tells the others now and then.
  struct RanksLook {
    std::int32_t signal = 0;
    std::uint32_t is_due = 0;
    std::uint64_t updates_per_look = 1;
  };

  template <class Gather>
  bool look(std::size_t world, const Gather& gather) {
    RanksLook all = own_look(world);
    if (world != 1) {
      const std::string mine(reinterpret_cast<const char*>(&all), sizeof all);
      for (const std::string& told : gather(mine)) add_look(all, told);
    }
    return take_look(all);
  }
  RanksLook own_look(std::size_t world);
  static void add_look(RanksLook& all, const std::string& told);
  bool take_look(const RanksLook& all);
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

/// Has a trainer written this file, and said how far its loops were? **Ranks** all. **Host**
/// blocks.
bool has_course(const JointRanks& ranks, const std::string& path);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/checkpoint_plan.ipp"
#endif
