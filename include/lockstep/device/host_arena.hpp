// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Plain aligned host memory, for the parameters and gradients of a single process.

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

#include "lockstep/core/bytes.hpp"

namespace lockstep {

/// Zeroed memory, aligned as bucket plans expect. Communicators allocate arenas of their own, from
/// the memory they communicate best.
class HostArena {
 public:
  explicit HostArena(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, alignment))), bytes_(bytes) {
    if (bytes != 0) std::memset(data_.get(), 0, bytes);
  }

  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::align_val_t alignment{arena_alignment};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, alignment); }
  };

  std::unique_ptr<std::byte, Free> data_;
  std::size_t bytes_;
};

}  // namespace lockstep
