// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The policies of the layout of tensors: bucket sizes, frozen parameters, element types.

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Buckets : WithName<"Buckets"> {};
struct Frozen : WithName<"Frozen"> {};
}  // namespace axes

/// A bucket closes when it holds at least this many bytes, with 0 after every parameter. The first
/// is small, so that communication starts early in backward (PyTorch's defaults).
struct BucketLimits {
  std::size_t first = 1_MiB;
  std::size_t cap = 25_MiB;
};

/// The policy of bucket sizes.
template <BucketLimits Limits = BucketLimits{}>
struct Buckets : detail::ValuePolicy<axes::Buckets> {
  static constexpr BucketLimits limits = Limits;
  using frozen = detail::NamePatterns<>;  // parameters outside of all buckets
  using units = detail::NamePatterns<>;   // scopes with a bucket of their own
  static constexpr std::size_t room = 0;  // padding bytes behind every bucket
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Buckets::name).number(Limits.first).number(Limits.cap);
  }
};

/// The policy of frozen parameters: `Frozen<"embed.*", "head.bias">`, where `*` stands for any
/// characters. They are broadcast initially, but have no gradient, bucket or optimizer state.
template <Name... Patterns>
struct Frozen : detail::ValuePolicy<axes::Frozen>, detail::NamePatterns<Patterns...> {
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Frozen::name);
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

namespace detail {

/// Floating tensors have type T, unless it is void; the others have their declared type.
template <class T>
struct FloatingAs {
  static constexpr ElementKind of(ElementKind declared) {
    return std::is_void_v<T> || !is_floating(declared) ? declared : element_kind<T>();
  }
};
using DeclaredTypes = FloatingAs<void>;

/// A bucket policy with frozen parameters, units, and padding behind every bucket.
template <class Limits, class Still, class Scopes, std::size_t Room>
struct LayoutRules : Limits {
  using frozen = Still;
  using units = Scopes;
  static constexpr std::size_t room = Room;
};

/// The layout rules of parameters: the bucket policy itself if there is nothing to add.
template <class Limits, class Still, class Scopes = NamePatterns<>, std::size_t Room = 0>
using PlanRules =
    std::conditional_t<Still::patterns.empty() && Scopes::patterns.empty() && Room == 0, Limits,
                       LayoutRules<Limits, Still, Scopes, Room>>;

/// The unit of a parameter: the shortest part of its name, up to a dot, that a pattern matches, or
/// an empty name.
constexpr std::string_view unit_of(const auto& patterns, std::string_view name) {
  for (std::size_t end = 1; end <= name.size(); ++end) {
    if ((end == name.size() || name[end] == '.') && patterns.match(name.substr(0, end)))
      return name.substr(0, end);
  }
  return "";
}

/// The unit of a tensor under layout rules; an empty name if they have none.
template <class Rules>
constexpr std::string_view unit_in([[maybe_unused]] std::string_view name) {
  if constexpr (Rules::units::patterns.empty()) return "";
  return unit_of(typename Rules::units{}, name);
}

template <class Rules>
inline constexpr bool freezes_some = !Rules::frozen::patterns.empty();

}  // namespace detail

}  // namespace lockstep
