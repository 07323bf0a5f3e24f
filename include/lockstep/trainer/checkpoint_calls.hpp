// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What calls that save and load are given, and what they give back.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/checkpoint/options.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/observe/scores.hpp"
#include "lockstep/trainer/kept_values.hpp"

namespace lockstep {

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
