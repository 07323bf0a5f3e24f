// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job's checkpoints are: where, how often, how many, and what is in them.

#include <atomic>
#include <limits>

#include "lockstep/checkpoint/values.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/launch/program_options.hpp"
#include "lockstep/observe/scores.hpp"

namespace lockstep {

/// What becomes of a checkpoint that is due while the one before it is still being written.
enum class WhenBusy : std::uint8_t {
  wait,  ///< the step waits until that one is written
  skip,  ///< the one that is due is left out
};

/// For `CheckpointOptions::keep`: nothing is ever deleted.
inline constexpr std::size_t keep_all = std::numeric_limits<std::size_t>::max();

/// Checkpoints of a job. Where neither `every_steps` nor `every_time` is set, there is one at the
/// end of every epoch.
struct CheckpointOptions {
  std::string folder{};                     ///< `--checkpoint DIR`; it is made where there is none
  std::uint64_t every_steps = 0;            ///< `--checkpoint-every 100`: updates of the parameters
  std::chrono::milliseconds every_time{0};  ///< `--checkpoint-every 5m`
  std::size_t keep = 3;  ///< `--keep N`, or `keep_all`: so many of the newest stay
  /// `--best SCORE`: the checkpoint with the best score of this name is also kept as
  /// best.safetensors.
  std::string best_by{};
  /// Is a higher score the better one? By default so, except for names with `loss`, `error` or
  /// `perplexity` in them.
  std::optional<bool> higher_is_better{};
  WhenBusy when_busy = WhenBusy::wait;
  bool resume = false;  ///< `--resume`: go on from the newest valid checkpoint, if there is one
  bool asynchronous = true;  ///< write beside training; the step waits for the copy only

  /// Is a higher score of `best_by` the better one?
  bool prefers_higher() const;
};

namespace detail {

/// When something may have to be saved: what a step compares, and nothing else.
struct SaveDue {
  static constexpr std::uint64_t never = ~std::uint64_t{0};
  std::uint64_t since = 0;            ///< the updates when it was last found out,
  std::uint64_t wait = 0;             ///< and how many more must be made; going back is due too
  bool is_waiting = false;            ///< a save has been asked for that waits for an update
  std::atomic<bool> at_once = false;  ///< a thread has failed to write
  bool operator()(std::uint64_t updates) const {
    return is_waiting || updates - since >= wait || at_once.load(std::memory_order_acquire);
  }
};

}  // namespace detail

/// What a checkpoint has beside parameters, buffers and the optimizer. All of it is optional, and
/// given back by `resume`.
struct SaveOptions {
  bool asynchronous = false;  ///< a thread writes; of a `Saver` only
  WhenBusy when_busy = WhenBusy::wait;
  /// One file that has everything, also where ranks keep parts of the states: rank 0 joins the
  /// ranks' files, through the disk.
  bool consolidated = false;
  /// One file of parameters and buffers and nothing else, which Python's
  /// `model.load_state_dict(load_file(path))` takes as it is, and from which no job can go on.
  bool parameters_only = false;
  std::uint64_t epoch = 0;                 ///< the epoch that is under way, from 0
  std::optional<double> best{};            ///< the best score so far
  std::optional<SamplerState> position{};  ///< `loader.state()` or `sampler.state()`
  Scores scores{};                         ///< of an evaluation of this model
  KeptValues values{};                     ///< the program's own, of each rank
  KeptValues common{};                     ///< the program's own; rank 0's are those of all
  /// Called on rank 0 when the file is there, by the thread that has written it.
  std::function<void()> written{};
};

struct LoadOptions {
  /// Must the file have exactly the names that the job has? Where it need not, what is missing
  /// keeps its value, and what is unexpected is left out; both are reported.
  bool strict = true;
  /// The name that a parameter or buffer of the file has in this job; an empty one leaves it out.
  std::function<std::string(std::string_view)> rename{};
  /// Are floating-point numbers of another type rounded to the job's? An error otherwise.
  bool convert = false;
  /// With `resume`: the program's values, which get back what this rank had, and what rank 0 had.
  /// A rank that the saved job did not have keeps its `values` as they are.
  KeptValues values{};
  KeptValues common{};
};

/// Names that the job and the file do not have in common, as `load_state_dict` reports them.
struct LoadReport {
  std::vector<std::string> missing{};     ///< the job has them, the file has not
  std::vector<std::string> unexpected{};  ///< the file has them, the job has not
};

/// Where a resumed job goes on.
struct Resumed {
  std::string path{};
  std::uint64_t epoch = 0;  ///< the epoch that was under way, from 0
  std::uint64_t step = 0;   ///< updates made so far
  std::optional<double> best{};
  std::optional<SamplerState> position{};
  Scores scores{};
  WorldSize world{};                 ///< of the job that saved
  LoadReport report{};               ///< with `.strict = false`
  std::vector<std::string> notes{};  ///< what is not as it was, in words
};

}  // namespace lockstep
