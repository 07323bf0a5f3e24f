// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The bucket axis: how many bytes of gradients travel together, and in which types tensors
/// are laid out.

#include <cstddef>
#include <string_view>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Buckets : WithName<"Buckets"> {};
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
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Buckets::name).number(Limits.first).number(Limits.cap);
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

}  // namespace detail

}  // namespace lockstep
