// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Random numbers that are equal on every platform: a stream, seeds by rank, and by index.

#include <bit>
#include <cmath>
#include <limits>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/name.hpp"

namespace lockstep {

/// The result of `step.random("noise"_p)`: a random number for every index, in any order and
/// repeatable, so that backward can redraw those of forward. CPUs and GPUs get the same bits.
class LayerRandom {
 public:
  constexpr LayerRandom() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit LayerRandom(std::uint64_t stream) : stream_(stream) {}

  /// 64 random bits.
  LOCKSTEP_HOST_DEVICE constexpr std::uint64_t bits(std::uint64_t i) const {
    return detail::random_at(stream_, i);
  }
  /// A number in [0, 1); all multiples of 2^-24 (of 2^-53 for double) are equally likely.
  template <std::floating_point T = float>
  LOCKSTEP_HOST_DEVICE constexpr T uniform(std::uint64_t i) const {
    constexpr int digits = sizeof(T) == sizeof(float) ? 24 : 53;
    return static_cast<T>(bits(i) >> (64 - digits)) / static_cast<T>(std::uint64_t{1} << digits);
  }

 private:
  std::uint64_t stream_ = 0;
};

namespace detail {

/// The hash of a layer's name; a hash stays as it is.
constexpr std::uint64_t layer_hash(std::uint64_t hash) { return hash; }
constexpr std::uint64_t layer_hash(std::string_view name) { return hash_of(name); }
template <NameKey Key>
constexpr std::uint64_t layer_hash(Key) {
  return std::integral_constant<std::uint64_t, hash_of(Key::name)>::value;
}

/// The numbers of a layer under the key of a micro-batch.
LOCKSTEP_HOST_DEVICE constexpr LayerRandom layer_random(std::uint64_t key, std::uint64_t layer) {
  return LayerRandom(random_at(key, layer));
}

}  // namespace detail

/// A seed for each rank, such as for augmentation: distinct in a job, and for neighbouring seeds.
constexpr Seed rank_seed(Seed seed, Rank rank) {
  const std::uint64_t job = detail::mix_bits(seed.value() + detail::golden_step);
  return Seed{detail::mix_bits(job + rank.value() * detail::golden_step)};
}

/// SplitMix64, a `UniformRandomBitGenerator`: the n-th number is a function of the seed and n
/// alone, so a stream can skip, and a checkpoint stores only `position()`. Unlike the standard's,
/// these distributions give the same numbers everywhere: multiply-adds are explicit.
class RandomStream {
 public:
  using result_type = std::uint64_t;

  constexpr explicit RandomStream(Seed seed, std::uint64_t position = 0)
      : seed_(seed.value()), position_(position) {}

  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return std::numeric_limits<result_type>::max(); }

  constexpr result_type operator()() { return detail::random_at(seed_, position_++); }

  constexpr Seed seed() const { return Seed{seed_}; }
  /// How many numbers were drawn.
  constexpr std::uint64_t position() const { return position_; }
  constexpr void discard(std::uint64_t count) { position_ += count; }

  /// A number in [0, 1); all multiples of 2^-53 (of 2^-24 for float) are equally likely.
  template <std::floating_point T = double>
  constexpr T uniform() {
    return LayerRandom(seed_).uniform<T>(position_++);
  }

  /// A number in [low, high).
  template <std::floating_point T>
  T uniform(T low, T high) {
    const T x = std::fma(high - low, uniform<T>(), low);
    return x < high ? x : std::nextafter(high, low);  // rounding may reach `high`
  }

  /// An integer in [0, n), all equally likely.
  constexpr std::uint64_t below(std::uint64_t n) {
    detail::check(n > 0, "there is no number below 0: draw below 1 or more");
    const int unused = std::countl_zero(n - 1);
    for (;;) {
      const std::uint64_t x = unused == 64 ? 0 : (*this)() >> unused;
      if (x < n) return x;
    }
  }

  /// Standard normal by the ratio of uniforms (Kinderman, Monahan 1977): equal on all platforms.
  double normal() {
    constexpr double width = 1.7155277699214135;  // 2 * sqrt(2 / e)
    for (;;) {
      const double u = 1 - uniform();
      const double x = width * (uniform() - 0.5) / u;
      if (x * x <= -4 * std::log(u)) return x;
    }
  }
  double normal(double mean, double deviation) { return std::fma(deviation, normal(), mean); }

 private:
  std::uint64_t seed_;
  std::uint64_t position_;
};

/// `step.random("noise"_p)` on a GPU: the address of its key, so that replays draw new numbers.
///
///     __global__ void add_noise(DeviceLayerRandom random, float* x, std::size_t n) {
///       const LayerRandom numbers = random.numbers();
///       ... x[i] += numbers.uniform(i);
class DeviceLayerRandom {
 public:
  constexpr DeviceLayerRandom() = default;
  constexpr DeviceLayerRandom(const std::uint64_t* key, std::uint64_t layer)
      : key_(key), layer_(layer) {}

  /// For device code.
  LOCKSTEP_HOST_DEVICE LayerRandom numbers() const { return detail::layer_random(*key_, layer_); }

 private:
  const std::uint64_t* key_ = nullptr;
  std::uint64_t layer_ = 0;
};

}  // namespace lockstep
