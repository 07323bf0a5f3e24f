// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Options of saving and loading: folder, interval, retention and contents of checkpoints.

#include "lockstep/detail/checkpoint/values.hpp"
#include "lockstep/detail/data/sampler.hpp"
#include "lockstep/detail/launch/program_options.hpp"
#include "lockstep/detail/observe/scores.hpp"

namespace lockstep {

/// For `CheckpointOptions::keep`: nothing is ever deleted.
inline constexpr std::size_t keep_all = std::numeric_limits<std::size_t>::max();

/// Without `every_steps` and `every_time`, a checkpoint is saved at the end of every epoch.
struct CheckpointOptions {
  std::string folder{};                     ///< `--checkpoint DIR`; created if needed
  std::uint64_t every_steps = 0;            ///< `--checkpoint-every 100`: updates of the parameters
  std::chrono::milliseconds every_time{0};  ///< `--checkpoint-every 5m`
  std::size_t keep = 3;  ///< `--keep N`, or `keep_all`: how many of the newest stay
  /// `--best SCORE`: the checkpoint with the best score of this name is kept as best.safetensors.
  std::string best_by{};
  /// By default true, except for names that contain `loss`, `error` or `perplexity`.
  std::optional<bool> higher_is_better{};
  bool resume = false;       ///< `--resume`: from the newest valid checkpoint, if any
  bool asynchronous = true;  ///< write in the background; a step waits for the copy only

  /// `higher_is_better`, or its default for the name `best_by`.
  bool prefers_higher() const;
};

namespace detail {

/// The condition that a step checks before it calls the code that saves.
struct SaveDue {
  static constexpr std::uint64_t never = ~std::uint64_t{0};
  std::uint64_t since = 0;            ///< updates at the last check
  std::uint64_t wait = 0;             ///< updates until the next one; a decrease is due too
  bool is_waiting = false;            ///< a requested save waits for the next update
  std::atomic<bool> at_once = false;  ///< the writer thread has failed
  bool operator()(std::uint64_t updates) const {
    return is_waiting || updates - since >= wait || at_once.load(std::memory_order_acquire);
  }
};

}  // namespace detail

/// What a checkpoint has beside parameters, buffers and the optimizer; `resume` restores it.
struct SaveOptions {
  bool asynchronous = false;  ///< write in the background; for a `Saver`
  /// One file instead of one per rank: rank 0 joins the ranks' files, through the disk.
  bool consolidated = false;
  /// One file of parameters and buffers only, for Python's `load_file`; no job can resume from it.
  bool parameters_only = false;
  std::uint64_t epoch = 0;                 ///< the current epoch, from 0
  std::optional<double> best{};            ///< the best score so far
  std::optional<SamplerState> position{};  ///< `loader.state()` or `sampler.state()`
  Scores scores{};                         ///< of an evaluation of this model
  StateValues values{};                    ///< the program's own, per rank
  StateValues common{};                    ///< the program's own, of rank 0 for all ranks
  /// Called on rank 0 by the writing thread, after the file was renamed to its path.
  std::function<void()> written{};
};

/// How a checkpoint is loaded.
struct LoadOptions {
  /// Must the file have exactly the job's names? Otherwise missing ones keep their values,
  /// unexpected ones are ignored, and both are reported.
  bool strict = true;
  /// Maps a parameter or buffer name of the file to the job's; an empty result skips it.
  std::function<std::string(std::string_view)> rename{};
  /// Round floating-point elements of another type to the job's; otherwise an error.
  bool convert = false;
  /// For `resume`: values to restore. A rank that the saved job lacked keeps its `values`.
  StateValues values{};
  StateValues common{};
};

/// Names as `load_state_dict` reports them.
struct LoadReport {
  std::vector<std::string> missing{};     ///< in the job or module and not in the file
  std::vector<std::string> unexpected{};  ///< in the file and not in the job or module
};

/// Where a resumed job goes on.
struct Resumed {
  std::string path{};
  std::uint64_t epoch = 0;  ///< the epoch in progress, from 0
  std::uint64_t step = 0;   ///< updates made so far
  std::optional<double> best{};
  std::optional<SamplerState> position{};
  Scores scores{};
  WorldSize world{};                 ///< of the job that saved
  LoadReport report{};               ///< with `.strict = false`
  std::vector<std::string> notes{};  ///< differences from the saved job, as messages
};

}  // namespace lockstep
