// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Integers that must not be mistaken for each other: rank, world size, epoch, seed.

#include <compare>
#include <iosfwd>

#include "lockstep/detail/core/standard.hpp"

namespace lockstep {

namespace detail {

/// An integer with a meaning: compared with its own type only, and without arithmetic.
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

/// The number of ranks.
struct WorldSize : detail::Strong<WorldSize, std::size_t> {
  using Strong::Strong;
};

/// The index of a group in its topology, from 0.
struct GroupRank : detail::Strong<GroupRank, std::size_t> {
  using Strong::Strong;
};

/// A rank's number inside its group, from 0.
struct LocalGroupRank : detail::Strong<LocalGroupRank, std::size_t> {
  using Strong::Strong;
};

/// The epoch's number, from 0.
struct Epoch : detail::Strong<Epoch, std::uint64_t> {
  using Strong::Strong;
};

/// The seed of a stream of random numbers.
struct Seed : detail::Strong<Seed, std::uint64_t> {
  using Strong::Strong;
};

}  // namespace lockstep
