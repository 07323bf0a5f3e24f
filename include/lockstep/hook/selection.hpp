// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The largest elements of a bucket: the passes of `TopK` on the host.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/device/device.hpp"
#include "lockstep/hook/hook_device.hpp"

namespace lockstep::detail {

/// The largest elements of one rank as words that travel: their places in the bucket, in ascending
/// order, and then their values.
template <class T>
struct SelectionPlan {
  std::size_t count = 0;     ///< elements of the bucket
  std::size_t selected = 0;  ///< how many of them travel

  constexpr std::size_t words() const {
    return selected + (selected * sizeof(T) + sizeof(std::uint32_t) - 1) / sizeof(std::uint32_t);
  }
};

/// The passes over a bucket, specialised for devices: the host's are here, a GPU's in
/// selection.cuh. `Device` is a `HookDevice`.
template <class T, class Device>
class Selection;

template <class T, class Comm>
class Selection<T, HookDevice<Cpu, Comm>> {
 public:
  using A = Accumulator<T>;

  Selection(HookDevice<Cpu, Comm>&, SelectionPlan<T> plan)
      : plan_(plan), residual_(plan.count), keys_(plan.count) {}

  const SelectionPlan<T>& plan() const { return plan_; }

  /// The residual takes the gradients in, and its largest elements leave it for `sent`.
  void select(std::span<const T> values, std::span<std::uint32_t> sent) {
    for (std::size_t i = 0; i != plan_.count; ++i) {
      residual_[i] += static_cast<A>(values[i]);
      keys_[i] = key(residual_[i]);
    }
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(plan_.selected) - 1;
    std::nth_element(keys_.begin(), last, keys_.end(), std::greater<>());
    const Key least = *last;
    // All above the least, and of those that equal it as many as are still wanted.
    auto equal = static_cast<std::size_t>(std::count(keys_.begin(), last + 1, least));
    std::byte* const numbers = reinterpret_cast<std::byte*>(sent.data() + plan_.selected);
    std::size_t at = 0;
    for (std::size_t i = 0; i != plan_.count; ++i) {
      const Key own = key(residual_[i]);
      if (own < least || (own == least && equal == 0)) continue;
      if (own == least) --equal;
      const auto value = static_cast<T>(residual_[i]);
      sent[at] = static_cast<std::uint32_t>(i);
      std::memcpy(numbers + at * sizeof(T), &value, sizeof(T));
      const A rest = residual_[i] - static_cast<A>(value);  // what rounding to T has left
      residual_[i] = rest - rest == 0 ? rest : A(0);
      ++at;
    }
  }

  /// values = the sum of what all ranks have sent, divided by their number.
  void add_up(std::span<const std::uint32_t> all, std::size_t ranks, std::span<T> values) {
    std::ranges::fill(values, T{});
    for (std::size_t w = 0; w != ranks; ++w) {
      const std::uint32_t* const places = all.data() + w * plan_.words();
      const auto* const numbers = reinterpret_cast<const std::byte*>(places + plan_.selected);
      for (std::size_t i = 0; i != plan_.selected; ++i) {
        T value;
        std::memcpy(&value, numbers + i * sizeof(T), sizeof(T));
        T& sum = values[places[i]];
        sum = static_cast<T>(static_cast<A>(sum) + static_cast<A>(value) / static_cast<A>(ranks));
      }
    }
  }

  std::span<A> residual() { return residual_; }

 private:
  using Key = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
  /// Orders numbers by their absolute value; a NaN is the largest, so that a broken gradient shows.
  static Key key(A value) {
    return static_cast<Key>(__builtin_bit_cast(Key, value) << 1);  // without the sign
  }

  SelectionPlan<T> plan_;
  std::vector<A> residual_;  // gradients that have not been sent
  std::vector<Key> keys_;
};

}  // namespace lockstep::detail
