// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A function of an element's place that repeats, as a table.

#include <cstddef>

namespace ranks {

/// Without it, tests that compare millions of elements would spend their time in the reference:
/// they are not optimised, and sanitized.
template <class T, std::size_t Period>
class Repeating {
 public:
  template <class F>
  explicit Repeating(const F& at) {
    for (std::size_t i = 0; i != Period; ++i) all_[i] = at(i);
  }
  T operator()(std::size_t i) const { return all_[i % Period]; }

 private:
  T all_[Period];
};

}  // namespace ranks
