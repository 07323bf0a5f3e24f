// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What it costs to include everything, beside including all of PyTorch.

#include <filesystem>
#include <nlohmann/json.hpp>

namespace bench {

/// Prints a table and returns the row for the results. PyTorch is where LOCKSTEP_TORCH says.
nlohmann::json measure_includes(const std::filesystem::path& folder);

}  // namespace bench
