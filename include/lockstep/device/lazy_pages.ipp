// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `lazy_pages.hpp`.

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/device/lazy_pages.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE LazyPages::LazyPages(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    fail("initialize", {bytes >> 20, " MiB of addresses: ", std::system_category().message(errno)},
         "check ulimit -v of this process");
  }
  data_ = static_cast<std::byte*>(mapped);
}

LOCKSTEP_INLINE LazyPages::~LazyPages() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

/// The pages that lie within a piece.
struct WholePages {
  std::size_t begin;
  std::size_t end;

  WholePages(std::size_t offset, std::size_t bytes) {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    begin = align_up(offset, page);
    end = (offset + bytes) & ~(page - 1);
  }
  bool are_none() const { return begin >= end; }
};

LOCKSTEP_INLINE void LazyPages::close(std::size_t offset, std::size_t bytes) {
  const WholePages pages(offset, bytes);
  if (pages.are_none()) return;
  ::madvise(data_ + pages.begin, pages.end - pages.begin, MADV_DONTNEED);
  ::mprotect(data_ + pages.begin, pages.end - pages.begin, PROT_NONE);
}

LOCKSTEP_INLINE void LazyPages::open(std::size_t offset, std::size_t bytes) {
  const WholePages pages(offset, bytes);
  if (pages.are_none()) return;
  if (::mprotect(data_ + pages.begin, pages.end - pages.begin, PROT_READ | PROT_WRITE) != 0) {
    fail("initialize",
         {bytes >> 20, " MiB of host memory: ", std::system_category().message(errno)},
         "use a host with more memory, or write fewer tensors before initial.flush()");
  }
}

}  // namespace lockstep::detail
