// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file IDX files, the format of MNIST and similar sets, plain or compressed with gzip. Programs
/// that read them link zlib (`-lz`).

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/data/shared_bytes.hpp"

namespace lockstep {

/// An array of bytes, row-major.
struct IdxArray {
  std::vector<std::size_t> extents;
  SharedBytes bytes;
};

/// Reads an IDX file of unsigned bytes, and checks its number of dimensions if one is given. A
/// plain file is mapped, and read when its bytes are; a compressed one is unpacked into memory.
IdxArray read_idx(const std::string& path, std::optional<std::size_t> dimensions = std::nullopt);

}  // namespace lockstep

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/idx.ipp"
#endif
