// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Integers that must not be mistaken for each other: rank, world size, epoch, seed.

#include <compare>
#include <iosfwd>

#include "lockstep/core/standard.hpp"

namespace lockstep {

namespace detail {

/// An integer with a meaning. It is made explicitly, read with `value()`, compared only with its
/// own kind, and has no arithmetic: a rank plus a rank means nothing.
template <class Meaning, class Integer>
class Strong {
 public:
  using value_type = Integer;

  constexpr Strong() = default;
  constexpr explicit Strong(Integer value) : value_(value) {}

  constexpr Integer value() const { return value_; }

  friend constexpr auto operator<=>(const Strong&, const Strong&) = default;
  template <class Traits>
  friend std::basic_ostream<char, Traits>& operator<<(std::basic_ostream<char, Traits>& out,
                                                      const Strong& strong) {
    return out << strong.value_;
  }

 private:
  Integer value_{};
};

}  // namespace detail

/// A rank's number in the world, from 0.
struct Rank : detail::Strong<Rank, std::size_t> {
  using Strong::Strong;
};

/// How many ranks there are.
struct WorldSize : detail::Strong<WorldSize, std::size_t> {
  using Strong::Strong;
};

/// The number of one of a topology's groups, from 0.
struct GroupRank : detail::Strong<GroupRank, std::size_t> {
  using Strong::Strong;
};

/// A rank's place inside its group, from 0.
struct LocalGroupRank : detail::Strong<LocalGroupRank, std::size_t> {
  using Strong::Strong;
};

/// The number of an epoch, from 0. Samplers shuffle by seed + epoch.
struct Epoch : detail::Strong<Epoch, std::uint64_t> {
  using Strong::Strong;
};

/// The start of a stream of random numbers.
struct Seed : detail::Strong<Seed, std::uint64_t> {
  using Strong::Strong;
};

}  // namespace lockstep
