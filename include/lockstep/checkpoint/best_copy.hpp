// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `best.safetensors` and its score, which stay together whenever the job dies.
///
/// The score is in a file of its own, `best.score`, because the copy is a link to a checkpoint that
/// was written before its score was known. Two files cannot be replaced at once; so the score names
/// the checkpoint that it belongs to, and while the copy is replaced the file has both scores.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The score of `folder`'s best copy under this name, if it is known.
std::optional<double> read_best_score(const std::string& folder, std::string_view name);

/// Makes `checkpoint`, a file in `folder`, its best copy, with this score. Whoever reads the copy
/// finds the one before or this one.
void replace_best_copy(const std::string& folder, const std::string& checkpoint,
                       std::string_view name, double score);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/best_copy.ipp"
#endif
