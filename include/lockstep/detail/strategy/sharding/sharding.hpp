// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sharding axis: what a rank keeps of parameters and optimizer states.

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Sharding : WithName<"Sharding"> {};
struct Sharded : WithName<"Sharded"> {};
}  // namespace axes

/// Every rank keeps all parameters and states.
struct Replicated : Choice<axes::Sharding>, WithName<"Replicated"> {};

/// Parameters exist once per host; each rank keeps its slice's states, and updates the slice in the
/// pass that reduces it. The default where memory is shared.
struct HostShared : Choice<axes::Sharding>, WithName<"HostShared"> {};

/// ZeRO on any backend: each rank keeps and updates its share of what `Sharding<...>` names.
struct ZeroRedundancy : Choice<axes::Sharding>, WithName<"ZeroRedundancy"> {};

/// `ZeroRedundancy` of states and master weights, the default: every bucket is cut into equal
/// slices, one for each rank. Gradients stay whole (ZeRO-1).
struct States : Choice<axes::Sharded>, WithName<"States"> {};

/// The same slices, and a rank frees other gradients as soon as their bucket is reduced (ZeRO-2).
struct Gradients : Choice<axes::Sharded>, WithName<"Gradients"> {};

/// Left out, because ranks that own whole parameters were slower; the name gives a clear error.
struct ByTensor;

/// The policy for what each rank keeps and updates: `Sharding<Replicated>`, `Sharding<HostShared>`,
/// `Sharding<ZeroRedundancy>`, `Sharding<ZeroRedundancy, Gradients>`.
template <class How, class What = States>
struct Sharding : detail::ChoicePolicy<axes::Sharding, How> {
  using what = What;
  static constexpr bool well_formed =
      detail::ChoiceOf<How, axes::Sharding> && detail::ChoiceOf<What, axes::Sharded> &&
      (std::is_same_v<How, ZeroRedundancy> || std::is_same_v<What, States>);
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Sharding::name).text(How::name);
    if constexpr (!std::is_same_v<What, States>) hash.text(What::name);
  }
};

}  // namespace lockstep

namespace lockstep::detail {

/// Shards begin at multiples of so many bytes of the bucket's elements.
inline constexpr std::size_t shard_alignment = 16;
inline constexpr std::size_t most_shards = 4096;
/// The bytes behind every bucket that belong to no parameter: collectives of shards of equal length
/// exceed a bucket by less than one alignment unit for each rank.
inline constexpr std::size_t shard_room = most_shards * shard_alignment;
static_assert(shard_room % arena_alignment == 0);

/// The elements [begin, end) of a bucket that one rank owns. The last may be shorter or empty.
struct Shard {
  std::size_t begin = 0;
  std::size_t end = 0;
  constexpr std::size_t count() const { return end - begin; }
};

/// The length of the pieces of a collective, where a bucket of `count` elements of T has `shards`.
template <class T>
constexpr std::size_t shard_length(std::size_t count, std::size_t shards) {
  return align_up((count + shards - 1) / shards, shard_alignment / sizeof(T));
}

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
