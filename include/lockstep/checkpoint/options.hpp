// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a job's checkpoints are: where, how often, how many; and the options of the command
/// line that say so.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"
#include "lockstep/launch/flags.hpp"

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

/// The options of a launched trainer that are about checkpoints.
inline constexpr Flag checkpoint_flags[] = {
    {"--checkpoint", "DIR", "save the job's state in this folder"},
    {"--checkpoint-every", "5m", "how often: 30s, 5m, 1h, or a number of updates (every epoch)"},
    {"--resume", "", "go on from the newest valid checkpoint in the folder, if there is one"},
    {"--keep", "N", "how many of the newest checkpoints stay, or all (3)"},
    {"--best", "SCORE", "keep a copy of the best by this score; wer:lower says which is better"},
};

/// What the command line says about checkpoints, which takes precedence over the program.
struct CheckpointFlags {
  /// `--checkpoint-every`: one of the two.
  struct Every {
    std::uint64_t steps = 0;
    std::chrono::milliseconds time{0};
    bool operator==(const Every&) const = default;
  };

  std::optional<std::string> folder{};
  std::optional<Every> every{};
  std::optional<std::size_t> keep{};
  std::optional<std::string> best_by{};
  std::optional<bool> higher_is_better{};
  bool resume = false;

  /// Is any of them given?
  bool any() const;

  /// The program's options with these in their place. Throws where there is no folder for them.
  CheckpointOptions over(CheckpointOptions options) const;
};

/// Takes the options about checkpoints out of those that are given. Other names are not looked at.
CheckpointFlags parse_checkpoint_flags(std::span<const CutArguments::Given> given);

/// `5m`, `300s`, `1.5h`, `2d`, or `100` for updates.
CheckpointFlags::Every parse_checkpoint_interval(std::string_view name, std::string_view text);

/// Throws unless the options can be meant: a program's numbers may be nonsense too.
void require_checkpoint_options(const CheckpointOptions& options);

}  // namespace detail

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/options.ipp"
#endif
