// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file In which types a model's tensors are laid out: as declared, or the floating ones in
/// another.

#include "lockstep/core/element.hpp"

namespace lockstep::detail {

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

}  // namespace lockstep::detail
