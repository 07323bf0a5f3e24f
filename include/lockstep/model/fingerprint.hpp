// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file 64 bits over everything two ranks must agree on before they exchange a gradient.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lockstep/core/hash.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_table.hpp"
#include "lockstep/policy/pack.hpp"
#include "lockstep/version.hpp"

namespace lockstep {

/// Adds names, element types and extents, in order.
template <std::size_t Count, std::size_t Characters>
constexpr void fingerprint(Hash& hash, const TensorTable<Count, Characters>& table,
                           const std::array<TensorInfo, Count>& infos) {
  hash.number(Count);
  for (std::size_t i = 0; i != Count; ++i) {
    hash.text(table.name(i)).number(static_cast<std::uint64_t>(infos[i].element));
    hash.number(infos[i].rank);
    for (std::size_t j = 0; j != infos[i].rank; ++j) hash.number(infos[i].extents[j]);
  }
}

/// The fingerprint of a model under canonical policies. The infos have every extent known: those of
/// the tables for a static model, those given at construction for a dynamic one.
template <class Model, class Policies>
constexpr std::uint64_t fingerprint_of(
    const std::array<TensorInfo, parameter_table<Model>.size()>& parameters,
    const std::array<TensorInfo, buffer_table<Model>.size()>& buffers) {
  Hash hash;
  hash.text(version);
  fingerprint(hash, parameter_table<Model>, parameters);
  fingerprint(hash, buffer_table<Model>, buffers);
  fingerprint(hash, Policies{});
  return hash.value();
}

}  // namespace lockstep
