// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The checked mode, LOCKSTEP_CHECKED: views check their indices, and gradients are checked
/// for being written whole. It is for debug builds, and all files of a program are compiled with it
/// or none.

#if defined(LOCKSTEP_CHECKED)
#include <cstdio>

#include "lockstep/core/error.hpp"
#include "lockstep/core/standard.hpp"
#endif

namespace lockstep::detail {

// A program whose files disagree about the mode would have two versions of one function. So they
// have a symbol in common that is thread-local in one mode only, which a linker refuses.
#if defined(LOCKSTEP_CHECKED)
inline constexpr bool is_checked = true;
[[gnu::used]] inline thread_local char lockstep_checked_in_all_files_or_in_none = 0;
#else
inline constexpr bool is_checked = false;
#if !defined(LOCKSTEP_LIBRARY)  // The compiled library makes no view, and goes with both modes.
[[gnu::used]] inline char lockstep_checked_in_all_files_or_in_none = 0;
#endif
#endif

/// What a view needs to check its indices: nothing, unless the mode is on.
template <bool Checked>
class IndexCheck {};

#if defined(LOCKSTEP_CHECKED)
/// The name of the tensor is kept in the view, because device code cannot read the host's memory.
template <>
class IndexCheck<true> {
 public:
  /// Names that are too long are cut.
  constexpr void set_name(std::string_view name) {
    std::size_t length = 0;
    for (; length != name.size() && length + 1 != sizeof name_; ++length)
      name_[length] = name[length];
    name_[length] = 0;
  }

 protected:
  template <class Index>
  LOCKSTEP_HOST_DEVICE constexpr void require_index(Index index, std::size_t axis,
                                                    std::size_t extent) const {
    // A negative index becomes a huge one.
    if (static_cast<std::size_t>(index) >= extent)
      refuse(static_cast<long long>(index), axis, extent);
  }

 private:
  /// Device code cannot throw: it prints the sentence and ends the kernel.
  LOCKSTEP_HOST_DEVICE void refuse(long long index, std::size_t axis, std::size_t extent) const {
#if defined(__CUDA_ARCH__)
    printf("lockstep: %s: index %lld of axis %d is out of range, its extent is %llu\n", name_,
           index, static_cast<int>(axis), static_cast<unsigned long long>(extent));
    __trap();
#else
    fail(name_, {"index ", index, " of axis ", axis, " is out of range, its extent is ", extent},
         "count indices from 0, and end loops at view.extent(axis)");
#endif
  }

  char name_[64] = "view";
};
#endif

}  // namespace lockstep::detail
