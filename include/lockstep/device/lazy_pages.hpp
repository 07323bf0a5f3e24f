// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Host memory that is there when it is touched, and can be given back piece by piece.

#include <cstddef>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Zeroed pages at fixed addresses. They take memory when they are first touched, so that a model's
/// tensors can have addresses on the host without memory for all of them.
class LazyPages {
 public:
  explicit LazyPages(std::size_t bytes);
  ~LazyPages();
  LazyPages(const LazyPages&) = delete;
  LazyPages& operator=(const LazyPages&) = delete;

  std::byte* data() const { return data_; }

  /// Gives back the memory of all pages that lie within a piece. A touch of them, by somebody who
  /// has kept a pointer, ends the program: what it wrote would be lost without a word.
  void close(std::size_t offset, std::size_t bytes);
  /// Lets a closed piece be touched again; its pages are zero.
  void open(std::size_t offset, std::size_t bytes);

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace lockstep::detail

#ifndef LOCKSTEP_COMPILED
#include "lockstep/device/lazy_pages.ipp"
#endif
