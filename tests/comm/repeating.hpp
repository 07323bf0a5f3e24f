// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Elements that repeat themselves: written and compared many at a time. Tests that compare
/// millions would otherwise spend their time in the reference: they are not optimised, and
/// sanitized.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

namespace ranks {

/// A function of an element's position that repeats after `Period` places, as a table.
template <class T, std::size_t Period>
class Repeating {
 public:
  template <class F>
  explicit Repeating(const F& at) {
    for (std::size_t i = 0; i != Period; ++i) all_[i] = at(i);
  }
  T operator()(std::size_t i) const { return all_[i % Period]; }

  /// The same from position `first` on.
  Repeating from(std::size_t first) const {
    return Repeating([&](std::size_t i) { return (*this)(first + i); });
  }

 private:
  T all_[Period];
};

/// Writes `at(i)`, which repeats after `Period` places.
template <std::size_t Period, class T, class F>
void fill_repeating(std::span<T> values, const F& at) {
  std::size_t done = std::min(values.size(), Period);
  for (std::size_t i = 0; i != done; ++i) values[i] = at(i);
  while (done != values.size()) {  // a multiple of the period
    const std::size_t more = std::min(done, values.size() - done);
    std::memcpy(static_cast<void*>(values.data() + done), values.data(), more * sizeof(T));
    done += more;
  }
}

/// The first element that is not `at(i)` to the last bit, where `at` repeats after `Period` places;
/// the number of elements if there is none.
template <std::size_t Period, class T, class F>
std::size_t find_difference(std::span<const T> values, const F& at) {
  const auto differs = [&](std::size_t i) {
    const T wanted = at(i);
    return std::memcmp(&values[i], &wanted, sizeof(T)) != 0;
  };
  const std::size_t size = values.size();
  for (std::size_t i = 0; i != std::min(size, Period); ++i)
    if (differs(i)) return i;
  // The first are right. So are all, if each is what stands a period before it.
  if (size <= Period ||
      std::memcmp(values.data(), values.data() + Period, (size - Period) * sizeof(T)) == 0)
    return size;
  std::size_t i = Period;
  while (i != size && !differs(i)) ++i;
  return i;
}

}  // namespace ranks
