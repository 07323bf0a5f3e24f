// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file By what tensors are laid out: the bucket axis, which says how many bytes of gradients
/// travel together, the axis of frozen parameters, which have none, and the tensors' types.

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/name.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Buckets : WithName<"Buckets"> {};
struct Frozen : WithName<"Frozen"> {};
}  // namespace axes

/// A bucket closes when it holds at least this many bytes: a small first one, so that communication
/// starts early in backward, and large ones after. PyTorch's numbers. A limit of 0 closes a bucket
/// after every parameter.
struct BucketLimits {
  std::size_t first = 1_MiB;
  std::size_t cap = 25_MiB;
};

/// The policy that says how large buckets are.
template <BucketLimits Limits = BucketLimits{}>
struct Buckets : detail::ValuePolicy<axes::Buckets> {
  static constexpr BucketLimits limits = Limits;
  using frozen = detail::NamePatterns<>;  // parameters that lie in no bucket
  static constexpr std::size_t room = 0;  // bytes behind every bucket that belong to no tensor
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Buckets::name).number(Limits.first).number(Limits.cap);
  }
};

/// The policy that says which parameters stay as they are: `Frozen<"embed.*", "head.bias">`, where
/// `*` stands for any characters. A frozen parameter has initial values like any other and all
/// ranks get rank 0's, but it has no gradient, lies in no bucket and has no state of the optimizer.
template <Name... Patterns>
struct Frozen : detail::ValuePolicy<axes::Frozen>, detail::NamePatterns<Patterns...> {
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Frozen::name);
    detail::NamePatterns<Patterns...>::fingerprint_patterns(hash);
  }
};

namespace detail {

/// Every tensor in the type in which the model declares it.
struct DeclaredTypes {
  static constexpr ElementKind of(ElementKind declared) { return declared; }
};

/// Floating tensors in type T, such as BFloat16; the others as declared.
template <class T>
struct FloatingAs {
  static constexpr ElementKind of(ElementKind declared) {
    return is_floating(declared) ? element_kind<T>() : declared;
  }
};

/// A bucket policy that knows which parameters lie in no bucket, and leaves room behind every one.
template <class Limits, class Still, std::size_t Room>
struct LayoutRules : Limits {
  using frozen = Still;
  static constexpr std::size_t room = Room;
};

/// By what parameters are laid out, with `Room` bytes behind every bucket. Without frozen ones and
/// without room it is the bucket policy itself.
template <class Limits, class Still, std::size_t Room = 0>
using PlanRules = std::conditional_t<Room == 0 && Still::patterns.empty(), Limits,
                                     LayoutRules<Limits, Still, Room>>;

/// Do these rules freeze a parameter?
template <class Rules>
inline constexpr bool freezes_some = !Rules::frozen::patterns.empty();

}  // namespace detail

}  // namespace lockstep
