// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file IDX files, the format of MNIST and similar sets, plain or compressed with gzip. Programs
/// that read them link zlib (`-lz`).

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep {

/// An array of bytes, row-major.
struct IdxArray {
  std::vector<std::size_t> extents;
  std::vector<std::uint8_t> bytes;
};

/// Reads an IDX file of unsigned bytes, and checks its number of dimensions if one is given.
IdxArray read_idx(const std::string& path, std::optional<std::size_t> dimensions = std::nullopt);

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/idx.ipp"
#endif
