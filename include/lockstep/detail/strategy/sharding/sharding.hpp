// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The sharding axis: what a rank keeps of parameters, gradients and optimizer states.

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Sharding : WithName<"Sharding"> {};
struct Sharded : WithName<"Sharded"> {};
struct ShardedUnits : WithName<"ShardedUnits"> {};
struct GatheredUnits : WithName<"GatheredUnits"> {};
struct ReshardAfterForward : WithName<"ReshardAfterForward"> {};
}  // namespace axes

/// Every rank keeps all parameters and states.
struct Replicated : Choice<axes::Sharding>, WithName<"Replicated"> {};

/// Parameters exist once per host; each rank keeps its slice's states, and updates the slice in the
/// pass that reduces it. The default where memory is shared.
struct HostShared : Choice<axes::Sharding>, WithName<"HostShared"> {};

/// ZeRO on any backend: each rank keeps and updates its share of what `Sharding<...>` names.
struct ZeroRedundancy : Choice<axes::Sharding>, WithName<"ZeroRedundancy"> {};

/// Each rank keeps its slice of all parameters, gradients and states (PyTorch's FSDP, ZeRO-3). The
/// parameters of a unit are gathered when a step asks for one of them, and released after use.
struct FullyShard : Choice<axes::Sharding>, WithName<"FullyShard"> {};

/// The units of `FullyShard`: the scopes and blocks whose names match, `Units<"embed", "blocks.*">`
/// with one unit for each block of `Repeat<"blocks", ...>`. Other parameters, and without `Units`
/// all, form units of a bucket's worth.
template <Name... Patterns>
struct Units : Choice<axes::ShardedUnits>, WithName<"Units">, detail::NamePatterns<Patterns...> {
  static constexpr void fingerprint(detail::Hash& hash) {
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

/// How many units of `FullyShard` are gathered at a time. With three, the default, views of a unit
/// are valid until the next unit but one is asked for; with two, until the next one is.
template <std::size_t Count>
struct GatheredUnits : Choice<axes::GatheredUnits>, WithName<"GatheredUnits"> {
  static constexpr std::size_t count = Count;
  static constexpr bool well_formed = Count >= 2;
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Count); }
};

/// Are the units of `FullyShard` released in forward and gathered again in backward, the default?
/// With `false` they stay gathered until the update: more memory, a third less traffic.
template <bool Reshards>
struct ReshardAfterForward : Choice<axes::ReshardAfterForward>, WithName<"ReshardAfterForward"> {
  static constexpr bool reshards = Reshards;
  static constexpr void fingerprint(detail::Hash& hash) { hash.number(Reshards ? 1 : 0); }
};

/// `ZeroRedundancy` of states and master weights, the default: every bucket is cut into equal
/// slices, one for each rank. Gradients stay whole (ZeRO-1).
struct States : Choice<axes::Sharded>, WithName<"States"> {};

/// The same slices, and a rank frees other gradients as soon as their bucket is reduced (ZeRO-2).
struct Gradients : Choice<axes::Sharded>, WithName<"Gradients"> {};

/// Left out, because ranks that own whole parameters were slower; the name gives a clear error.
struct ByTensor;

namespace detail {

/// The option of `FullyShard` that answers an axis, or `Default`.
template <class Axis, class Default, class...>
struct ShardingOption : std::type_identity<Default> {};
template <class Axis, class Default, class First, class... More>
struct ShardingOption<Axis, Default, First, More...>
    : std::conditional_t<ChoiceOf<First, Axis>, std::type_identity<First>,
                         ShardingOption<Axis, Default, More...>> {};

template <class Axis, class... Options>
inline constexpr std::size_t options_answering = ((ChoiceOf<Options, Axis> ? 1 : 0) + ... + 0);

template <class Option>
constexpr bool is_option_of_units() {
  constexpr bool answers = ChoiceOf<Option, axes::ShardedUnits> ||
                           ChoiceOf<Option, axes::GatheredUnits> ||
                           ChoiceOf<Option, axes::ReshardAfterForward>;
  if constexpr (requires { Option::well_formed; }) return answers && Option::well_formed;
  return answers || std::is_same_v<Option, States>;  // what `Sharding<FullyShard>` stands for
}
/// Are these options of `FullyShard`, each given once?
template <class... Options>
constexpr bool are_options_of_units() {
  return (is_option_of_units<Options>() && ...) &&
         options_answering<axes::ShardedUnits, Options...> <= 1 &&
         options_answering<axes::GatheredUnits, Options...> <= 1 &&
         options_answering<axes::ReshardAfterForward, Options...> <= 1;
}

}  // namespace detail

/// The policy for what each rank keeps and updates: `Sharding<Replicated>`, `Sharding<HostShared>`,
/// `Sharding<ZeroRedundancy>`, `Sharding<ZeroRedundancy, Gradients>`, `Sharding<FullyShard>` with
/// any of `Units<...>`, `GatheredUnits<N>` and `ReshardAfterForward<false>`.
template <class How, class What = States, class... More>
struct Sharding : detail::ChoicePolicy<axes::Sharding, How> {
  using what = What;
  template <class Axis, class Default>
  using option = typename detail::ShardingOption<Axis, Default, What, More...>::type;

  static constexpr bool well_formed = [] {
    if constexpr (std::is_same_v<How, FullyShard>) {
      return detail::are_options_of_units<What, More...>();
    } else {
      return sizeof...(More) == 0 && detail::ChoiceOf<How, axes::Sharding> &&
             detail::ChoiceOf<What, axes::Sharded> &&
             (std::is_same_v<How, ZeroRedundancy> || std::is_same_v<What, States>);
    }
  }();
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Sharding::name).text(How::name);
    if constexpr (!std::is_same_v<What, States>) detail::add_choice<What>(hash);
    (detail::add_choice<More>(hash), ...);
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
  fail("Sharding",
       {shards, " ranks are more than the ", most_shards, " that a bucket is divided among"},
       "use fewer ranks", me);
}

}  // namespace lockstep::detail
