// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What whole programs and single includes cost the compiler, beside including PyTorch.

#include <filesystem>
#include <nlohmann/json.hpp>

namespace bench {

/// Prints a table and returns its rows for the results. PyTorch is where LOCKSTEP_TORCH says.
nlohmann::json measure_programs(const std::filesystem::path& folder);

}  // namespace bench
