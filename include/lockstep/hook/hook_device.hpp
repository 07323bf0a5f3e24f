// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The device of hooks: memory, and passes over it that every hook can use.

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"

namespace lockstep::detail {

/// A device has `Memory<T>`, zeroed elements that it owns, and passes: `cast`, `scale`, `copy` and
/// `zero`. On the host they are done when the call returns; a GPU's has `stream()` and enqueues
/// everything there. The passes of a single hook stand beside it, and are specialised for devices
/// likewise. The device of the host is here, that of GPUs in hook_device.cuh.
template <class Device, class Comm>
class HookDevice;

/// Elements of host memory, zeroed at first.
template <class T>
class HostElements {
 public:
  HostElements() = default;
  explicit HostElements(std::size_t count) : values_(count) {}
  std::span<T> span() { return values_; }

 private:
  std::vector<T> values_;
};

/// The passes of the host, for which no communicator is needed.
struct HostHookDevice {
  template <class T>
  using Memory = HostElements<T>;

  template <class T>
  static Memory<T> allocate(std::size_t count) {
    return Memory<T>(count);
  }
  template <class To, class From>
  static void cast(std::span<To> to, std::span<From> from) {
    convert(to.data(), from.data(), to.size());
  }
  template <class T>
  static void scale(std::span<T> values, double factor) {
    using A = Accumulator<T>;
    for (T& value : values) value = static_cast<T>(static_cast<A>(value) * static_cast<A>(factor));
  }
  template <class T>
  static void copy(std::span<T> to, std::span<const T> from) {
    if (!from.empty()) std::memcpy(to.data(), from.data(), from.size_bytes());
  }
  template <class T>
  static void zero(std::span<T> values) {
    if (!values.empty()) std::memset(static_cast<void*>(values.data()), 0, values.size_bytes());
  }
};

template <class Comm>
class HookDevice<Cpu, Comm> : public HostHookDevice {
 public:
  constexpr explicit HookDevice(Comm&) {}
};

}  // namespace lockstep::detail
