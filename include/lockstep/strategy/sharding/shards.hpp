// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The slices of a bucket, one for each rank: the arithmetic of `Sharding<ZeroRedundancy>`.

#include <algorithm>
#include <cstddef>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// Shards begin at multiples of so many bytes of the bucket's elements.
inline constexpr std::size_t shard_alignment = 16;
/// The most shards of a bucket.
inline constexpr std::size_t most_shards = 4096;
/// Collectives of shards of equal length reach beyond the end of a bucket by less than one
/// alignment unit for each rank. The plan leaves so many bytes behind every bucket, which belong to
/// no parameter.
inline constexpr std::size_t shard_room = most_shards * shard_alignment;
static_assert(shard_room % arena_alignment == 0);

/// The elements [begin, end) of a bucket that are one rank's. The last shards may be shorter than
/// the others, or empty.
struct Shard {
  std::size_t begin = 0;
  std::size_t end = 0;
  constexpr std::size_t count() const { return end - begin; }
};

/// The length of the pieces that collectives move, where a bucket of `count` elements of T is cut
/// into `shards`.
template <class T>
constexpr std::size_t shard_length(std::size_t count, std::size_t shards) {
  return align_up((count + shards - 1) / shards, shard_alignment / sizeof(T));
}

/// Shard `shard` of a bucket of `count` elements of T.
template <class T>
constexpr Shard shard_of(std::size_t count, std::size_t shard, std::size_t shards) {
  const std::size_t length = shard_length<T>(count, shards);
  return {std::min(shard * length, count), std::min((shard + 1) * length, count)};
}

/// Throws unless the room behind buckets is enough for so many shards.
inline void require_shards(std::size_t shards, Rank me) {
  if (shards <= most_shards) return;
  fail("Sharding<ZeroRedundancy>",
       {shards, " ranks are more than the ", most_shards, " that a bucket is divided among"},
       "use fewer ranks", me);
}

}  // namespace lockstep::detail
