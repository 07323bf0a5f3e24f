// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The random numbers of one layer in one micro-batch, drawn by their places.

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "lockstep/core/hash.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/mix_bits.hpp"
#include "lockstep/core/name.hpp"

namespace lockstep {

/// What `step.random("noise"_p)` gives: a number for every place, in any order and as often as
/// wanted, so that backward draws again what forward drew and nothing is kept. Numbers are the same
/// bits on CPUs and GPUs.
class LayerRandom {
 public:
  constexpr LayerRandom() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit LayerRandom(std::uint64_t stream) : stream_(stream) {}

  /// 64 random bits for place i.
  LOCKSTEP_HOST_DEVICE constexpr std::uint64_t bits(std::uint64_t i) const {
    return detail::random_at(stream_, i);
  }
  /// A number in [0, 1) for place i; all multiples of 2^-24 (of 2^-53 for double) are equally
  /// likely.
  template <std::floating_point T = float>
  LOCKSTEP_HOST_DEVICE constexpr T uniform(std::uint64_t i) const {
    constexpr int digits = sizeof(T) == sizeof(float) ? 24 : 53;
    return static_cast<T>(bits(i) >> (64 - digits)) / static_cast<T>(std::uint64_t{1} << digits);
  }

 private:
  std::uint64_t stream_ = 0;
};

namespace detail {

/// A layer by the hash of its name.
struct LayerHash {
  std::uint64_t value = 0;
};

constexpr LayerHash layer_hash(LayerHash layer) { return layer; }
constexpr LayerHash layer_hash(std::string_view name) { return {hash_of(name)}; }
template <NameKey Key>
constexpr LayerHash layer_hash(Key) {
  return {std::integral_constant<std::uint64_t, hash_of(Key::name)>::value};
}

/// The numbers of a layer, from the key of a micro-batch.
LOCKSTEP_HOST_DEVICE constexpr LayerRandom layer_random(std::uint64_t key, LayerHash layer) {
  return LayerRandom(random_at(key, layer.value));
}

}  // namespace detail

}  // namespace lockstep
