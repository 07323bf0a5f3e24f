// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file An epoch under way as one line that fits the terminal.

#include <cstdint>
#include <string>

#include "lockstep/core/macros.hpp"
#include "lockstep/core/terminal.hpp"
#include "lockstep/observe/epoch_summary.hpp"

namespace lockstep::detail {

/// `epoch 3/10  [######      ]   812/1875  loss 0.4123  54321 samples/s  0:12 left`
///
/// `batches` is the number of steps of the epoch; if it is 0, not known, there is neither a bar nor
/// a time. A narrow terminal lacks the bar first, then rate, loss and time. Output that is no
/// terminal lacks only the bar.
std::string progress_line(const EpochSummary& now, std::uint64_t batches, const Terminal& terminal);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/observe/progress_line.ipp"
#endif
