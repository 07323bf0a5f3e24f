// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The precision axis: the types in which parameters are used and gradients travel.

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/policy/policy.hpp"

namespace lockstep {

namespace axes {
struct Precision {
  static constexpr std::string_view name = "Precision";
};
}  // namespace axes

/// Parameters, gradients and buffers have the types that the model declares.
struct AsDeclared : Choice<axes::Precision> {
  static constexpr std::string_view name = "AsDeclared";
  using parameter_types = detail::DeclaredTypes;
  using buffer_types = detail::DeclaredTypes;
  /// The type in which gradients of T are reduced.
  template <class T>
  using reduced = T;
  static constexpr bool keeps_masters = false;
  static constexpr bool scales_loss = false;
};

/// Types of their own for parameters with their gradients, for gradients in a reduction, and for
/// buffers. The model declares float and sees `Parameters`; the optimizer keeps master weights in
/// float. Where a type is `Half`, the loss is scaled as PyTorch's GradScaler does.
template <class Parameters, class Reduction = Parameters, class Buffers = float>
struct Mixed : Choice<axes::Precision> {
  static constexpr std::string_view name = "Mixed";
  using parameter_types = detail::FloatingAs<Parameters>;
  using buffer_types = detail::FloatingAs<Buffers>;
  template <class>
  using reduced = Reduction;
  static constexpr bool keeps_masters = !std::is_same_v<Parameters, float>;
  static constexpr bool scales_loss =
      std::is_same_v<Parameters, Half> || std::is_same_v<Reduction, Half>;
};

/// Types as the model declares them, and a loss that is scaled as PyTorch's GradScaler does: for
/// models that compute in half precision by themselves, such as LibTorch modules under `Autocast`.
/// The model multiplies its loss by `step.loss_scale()`; `TorchModel` does.
struct ScaledLoss : AsDeclared {
  static constexpr std::string_view name = "ScaledLoss";
  static constexpr bool scales_loss = true;
};

template <class Types>
struct Precision : detail::ChoicePolicy<axes::Precision, Types> {};

/// The policy that says in which types a model is trained: `Precision<Mixed<BFloat16>>`. Two
/// mixtures differ in their types, not in their name.
template <class P, class R, class B>
struct Precision<Mixed<P, R, B>> : detail::ChoicePolicy<axes::Precision, Mixed<P, R, B>> {
  static constexpr void fingerprint(detail::Hash& hash) {
    hash.text(axes::Precision::name).text("Mixed");
    for (const ElementKind kind : {element_kind<P>(), element_kind<R>(), element_kind<B>()})
      hash.number(static_cast<std::uint64_t>(kind));
  }
};

}  // namespace lockstep
