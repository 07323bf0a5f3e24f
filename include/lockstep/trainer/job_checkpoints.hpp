// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checkpoints of a trainer: what its loops ask of them, and what a program may. What the
/// latter does is in job_saves.hpp, which comes with lockstep/checkpoint.hpp.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep {

class Checkpoints;

}  // namespace lockstep

namespace lockstep::detail {

/// Defined where <lockstep/checkpoint.hpp> is included.
template <class Job>
struct JobSaving;

/// When a trainer's loops turn to its checkpoints.
enum class SaveMoment : std::uint8_t {
  first_epochs,  ///< the first call of `epochs`: the job goes on from a checkpoint, if it is to
  first_step,    ///< the same, without `epochs`
  due,           ///< something may have to be saved
  end_of_epoch,
  end_of_last_epoch,
  finish,
};

/// What a job does then, or null. A program that never mentions the checkpoints of a job has no
/// such function, and nothing of what it needs is compiled for it. Whoever saves sets it, before
/// `main`.
template <class Job>
inline void (*checkpoint_hook)(Job&, SaveMoment) = nullptr;

/// A program that does not save was told to.
[[noreturn, gnu::cold]] void refuse_checkpoint_flags(Rank rank);

/// `Checkpoints` of a trainer, which knows by itself where its loops are: a base of `Job`, which it
/// asks for its wrapper (`wrapped_`) and for how far it is (`progress_`, `course()`,
/// `data_position()`). A program that calls a public member, wherever, has the hook through which
/// the job's loops come back here.
template <class Job>
class JobCheckpoints {
 public:
  /// Checkpoints have the value of this variable of the program, each rank's own, and `resume`
  /// gives it back: a number, a bool, a text, a vector of numbers, a `RandomStream`. The variable
  /// must outlive the job's last step. To be called before anything is resumed.
  template <class T>
  void keep(std::string_view name, T& value) {
    saving().keep(name, value);
  }

  /// Saves the job as it is: between two batches of a loop, it goes on with the second. Between the
  /// micro-batches of a step the save is carried out after its update, when the loop's body has
  /// ended; the values of the options must live until then. **Ranks** all, with the same path.
  /// **Host** blocks until the file is written, or with `.asynchronous` until all that is saved was
  /// copied.
  void save(const std::string& path, SaveOptions options = {}) {
    saving().save(path, std::move(options));
  }

  /// Loads parameters, buffers and the optimizer with its numbers, schedule and loss scale. The
  /// epochs of this job begin as they would have. **Ranks** all. **Host** blocks.
  LoadReport load(const std::string& path, const LoadOptions& options = {}) {
    return saving().load(path, options);
  }
  /// Loads parameters and buffers from any safetensors file. **Ranks** all. **Host** blocks.
  LoadReport load_parameters(const std::string& path, const LoadOptions& options = {}) {
    return saving().load_parameters(path, options);
  }

  /// Goes on where a checkpoint was saved, or the newest valid one of a folder: loads all that
  /// `load` does and the values that are kept; the next calls of `epochs` go on with the first
  /// batch that was not stepped. **Ranks** all. **Host** blocks.
  Resumed resume(const std::string& where, const LoadOptions& options = {}) {
    return saving().resume(where, options);
  }
  /// The same from the job's own folder, now and not in the first call of `epochs`, if the job is
  /// to go on: after `--resume`, or when its launcher has started it again. Nothing where it is
  /// not, or where there is no checkpoint; an error where all are damaged. **Ranks** all. **Host**
  /// blocks.
  std::optional<Resumed> resume() { return saving().resume(); }

  /// Saves into a folder from now on, now and then; the options of the command line
  /// (`--checkpoint`, `--checkpoint-every`, `--keep`, `--best`, `--resume`) have precedence over
  /// these. **Ranks** all, before `epochs`. **Host** blocks.
  void checkpoints(const CheckpointOptions& options) { saving().checkpoints(options); }
  /// The folder: `latest()`, `best()`. Null where the job saves into none.
  Checkpoints* checkpoints() { return saving().checkpoints(); }

  /// Waits until all checkpoints are written, and throws what went wrong; `launch` calls it when
  /// the program is done. **Ranks** all. **Host** blocks.
  void finish_saves() {
    [[maybe_unused]] const auto on = job().enter("save");
    if (job().saves_) checkpoint_hook<Job>(job(), SaveMoment::finish);
  }

 protected:
  /// The first call of `epochs` comes after the program has set its numbers and kept its values:
  /// the job goes on from a checkpoint if it is to.
  void resume_if_wanted() {
    if (!has_begun_) begin(SaveMoment::first_epochs);
  }

  /// Comes after every step of jobs that save. In a loop over data it is not yet time to: the
  /// loop's body may have more to do with its batch.
  [[gnu::cold, gnu::noinline]] void after_step() {
    if (!has_begun_) begin(SaveMoment::first_step);
    if (!job().progress_.is_in_loop()) save_if_due();
  }

  /// Comes between two batches of a loop, and after each update of a rank that is through. Nothing
  /// is called through a pointer until something may be due.
  void save_if_due() {
    if (job().saves_ && (*job().saves_)(job().wrapped_.updates())) [[unlikely]]
      run_due();
  }
  /// Comes at the end of a loop over data, whose last update may be that of its tail.
  void save_after_loop() {
    if (job().saves_ && job().saves_->is_waiting) run_due();
  }

  /// Comes at the end of every epoch.
  void save_epoch(bool is_last) {
    if (job().saves_)
      checkpoint_hook<Job>(job(),
                           is_last ? SaveMoment::end_of_last_epoch : SaveMoment::end_of_epoch);
  }

 private:
  friend struct JobSaving<Job>;
  Job& job() { return static_cast<Job&>(*this); }
  /// What takes calls behind the sentence of `saving`, so that nothing else is wrong with them.
  struct HeaderMissing {
    void keep(std::string_view, auto&);
    void save(const std::string&, SaveOptions);
    LoadReport load(const std::string&, const LoadOptions&);
    LoadReport load_parameters(const std::string&, const LoadOptions&);
    Resumed resume(const std::string&, const LoadOptions&);
    std::optional<Resumed> resume();
    void checkpoints(const CheckpointOptions&);
    Checkpoints* checkpoints();
  };
  auto saving() {
    constexpr bool is_included = requires { sizeof(JobSaving<Job>); };
    static_assert(is_included,
                  "lockstep: a job that saves or resumes needs #include <lockstep/checkpoint.hpp>, "
                  "or <lockstep/lockstep.hpp>, which has everything");
    if constexpr (is_included) {
      return JobSaving<Job>{job()};
    } else {
      return HeaderMissing{};
    }
  }

  [[gnu::cold, gnu::noinline]] void run_due() { checkpoint_hook<Job>(job(), SaveMoment::due); }
  [[gnu::cold, gnu::noinline]] void begin(SaveMoment moment) {
    has_begun_ = true;
    if (checkpoint_hook<Job> != nullptr) {
      checkpoint_hook<Job>(job(), moment);
    } else if (job().options_.checkpoint.any()) {
      refuse_checkpoint_flags(job().rank());
    }
  }

  bool has_begun_ = false;  // the first epochs or step have come
};

}  // namespace lockstep::detail
