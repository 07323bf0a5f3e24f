// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Memory for permutations: not initialised, and in huge pages where there are some.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "lockstep/core/bytes.hpp"

namespace lockstep::detail {

/// A shuffle accesses memory at random: with pages of 4 KiB, finding the page takes as long as the
/// access itself. It writes all elements before it reads them, so `resize` does not initialise
/// them.
template <class T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <class U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: allocators convert

  T* allocate(std::size_t count) {
    const std::size_t bytes = saturating_product(count, sizeof(T));
    void* const memory = ::operator new(bytes, alignment(count));
    // only a hint: if it is refused, accesses are slower
    if (bytes >= huge_page) ::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) { ::operator delete(memory, alignment(count)); }

  /// Elements without a value stay uninitialised.
  template <class U>
  void construct(U* element) {
    ::new (static_cast<void*>(element)) U;
  }

  friend bool operator==(HugePageAllocator, HugePageAllocator) { return true; }

 private:
  static constexpr std::size_t huge_page = 2_MiB;
  static std::align_val_t alignment(std::size_t count) {
    return std::align_val_t{count * sizeof(T) >= huge_page ? huge_page : alignof(T)};
  }
};

/// Indices below 2^32.
using IndexList = std::vector<std::uint32_t, HugePageAllocator<std::uint32_t>>;

}  // namespace lockstep::detail
