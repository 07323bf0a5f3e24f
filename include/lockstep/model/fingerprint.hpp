// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file 64 bits over everything two ranks must agree on before they exchange a gradient.

#include <cstddef>
#include <cstdint>

#include "lockstep/core/hash.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

/// Adds names, element types and extents, in order. `tensors` is a layout: it has `infos()`, every
/// extent known, and `name(tensor)`.
constexpr void fingerprint(Hash& hash, const auto& tensors) {
  hash.number(tensors.infos().size());
  std::size_t tensor = 0;
  for (const TensorInfo& info : tensors.infos()) {
    hash.text(tensors.name(tensor++)).number(static_cast<std::uint64_t>(info.element));
    hash.number(info.rank);
    for (std::size_t j = 0; j != info.rank; ++j) hash.number(info.extents[j]);
    if (info.is_frozen) hash.text("frozen");
  }
}

/// The fingerprint of a model's tensors under canonical policies.
template <class Policies>
constexpr std::uint64_t fingerprint_of(const auto& parameters, const auto& buffers) {
  Hash hash;
  hash.text(version);
  fingerprint(hash, parameters);
  fingerprint(hash, buffers);
  fingerprint(hash, typename Policies::pack{});
  return hash.value();
}

}  // namespace lockstep::detail
