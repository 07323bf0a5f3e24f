// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file LOCKSTEP_CHECKED, for debug builds: checks of views' indices and of complete gradients.

#if defined(LOCKSTEP_CHECKED)
#include <cstdio>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/standard.hpp"
#endif

namespace lockstep::detail {

// Files of both modes would break the one-definition rule; this symbol makes the linker fail.
#if defined(LOCKSTEP_CHECKED)
inline constexpr bool is_checked = true;
[[gnu::used]] inline thread_local char lockstep_checked_in_all_files_or_in_none = 0;
#else
inline constexpr bool is_checked = false;
#if !defined(LOCKSTEP_LIBRARY)  // The compiled library makes no views and links with both modes.
[[gnu::used]] inline char lockstep_checked_in_all_files_or_in_none = 0;
#endif
#endif

/// The index check of a view; empty unless the mode is on.
template <bool Checked>
class IndexCheck {};

#if defined(LOCKSTEP_CHECKED)
/// The view holds a copy of the tensor's name, because device code cannot read host memory.
template <>
class IndexCheck<true> {
 public:
  constexpr void set_name(std::string_view name) {
    std::size_t length = 0;
    for (; length != name.size() && length + 1 != sizeof name_; ++length)
      name_[length] = name[length];
    name_[length] = 0;
  }
  /// The view's memory may be released, which `releases` counts.
  constexpr void set_releases(const std::uint64_t& releases) {
    releases_ = &releases;
    releases_before_ = releases;
  }

 protected:
  template <class Index>
  LOCKSTEP_HOST_DEVICE constexpr void require_index(Index index, std::size_t axis,
                                                    std::size_t extent) const {
#if !defined(__CUDA_ARCH__)
    if (releases_ != nullptr && *releases_ != releases_before_) reject_released();
#endif
    // A negative index becomes a huge one.
    if (static_cast<std::size_t>(index) >= extent)
      reject(static_cast<long long>(index), axis, extent);
  }

 private:
  void reject_released() const {
    fail(name_, {"this view is read after its unit was released"},
         "ask for parameters again by step.param when a layer needs them, or keep more units by "
         "Sharding<FullyShard, GatheredUnits<N>>");
  }
  /// Device code cannot throw: it prints the message and traps.
  LOCKSTEP_HOST_DEVICE void reject(long long index, std::size_t axis, std::size_t extent) const {
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
  const std::uint64_t* releases_ = nullptr;
  std::uint64_t releases_before_ = 0;
};
#endif

}  // namespace lockstep::detail
