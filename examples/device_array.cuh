// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements in device memory, by their pointer.

#include <cstddef>

#include "lockstep/lockstep.cuh"

/// Zeroed at first. Goes wherever a pointer to its elements does.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : arena_(count * sizeof(T)) {}
  operator T*() const { return reinterpret_cast<T*>(arena_.data()); }  // NOLINT

 private:
  lockstep::DeviceArena arena_;
};
