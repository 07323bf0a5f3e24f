// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/element.hpp"

#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "lockstep/detail/core/half.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_element)

namespace {

/// Rounding by definition: of all halves, the nearest; of two equally near, the even one.
std::uint16_t nearest_half(double value) {
  std::uint16_t best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // the finite ones, by magnitude
    const double candidate =
        static_cast<float>(std::bit_cast<Half>(static_cast<std::uint16_t>(bits)));
    const double d = std::abs(candidate - std::abs(value));
    if (d < distance || (d == distance && bits % 2 == 0)) {
      distance = d;
      best = static_cast<std::uint16_t>(bits);
    }
  }
  return static_cast<std::uint16_t>(best | (std::signbit(value) ? 0x8000 : 0));
}

/// The halves' conversions case by case, as they are written in textbooks.
float widened(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t rest = (bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | (rest + 0x70000000u));
  if ((bits & 0x7c00u) != 0) return std::bit_cast<float>(sign | (rest + 0x38000000u));
  return std::copysign(static_cast<float>(bits & 0x03ffu) * 0x1p-24f, std::bit_cast<float>(sign));
}
std::uint16_t rounded(std::uint32_t single) {
  const auto sign = static_cast<std::uint16_t>((single >> 16) & 0x8000u);
  const std::uint32_t magnitude = single & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;
  if (magnitude >= 0x38800000u) {
    const std::uint32_t even = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | static_cast<std::uint16_t>(even >> 13);
  }
  const double units = static_cast<double>(std::bit_cast<float>(magnitude)) * 0x1p24;
  return sign | static_cast<std::uint16_t>(std::nearbyint(units));
}

}  // namespace

// Conversions have no branches; every pattern comes out as if they had, also that of a NaN.
BOOST_AUTO_TEST_CASE(halves_are_converted_bit_by_bit_as_case_by_case) {
  std::uint32_t wrong = 0;
  const auto compare = [&](std::uint32_t single) {
    wrong += Half(std::bit_cast<float>(single)).bits() != rounded(single);
  };
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const auto wide = std::bit_cast<std::uint32_t>(static_cast<float>(std::bit_cast<Half>(bits)));
    wrong += wide != std::bit_cast<std::uint32_t>(widened(bits));
    // Around each half, and around the middle between it and the next one.
    for (const std::uint32_t middle : {0u, 0x1000u, 0x2000u})
      for (std::uint32_t by = 0; by < 5; ++by) compare(wide + middle + by - 2);
    compare((i << 16) | 1u);  // and all over the floats
    compare((i << 16) | 0xffffu);
  }
  std::mt19937 random(2);
  for (int i = 0; i < 1000000; ++i) compare(static_cast<std::uint32_t>(random()));
  BOOST_TEST(wrong == 0u);
  static_assert(Half(0x1p-24f).bits() == 1 &&
                static_cast<float>(std::bit_cast<Half>(std::uint16_t{1})) == 0x1p-24f);
}

BOOST_AUTO_TEST_CASE(every_half_survives_the_way_through_float) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const Half half = std::bit_cast<Half>(static_cast<std::uint16_t>(i));
    const auto wide = static_cast<float>(half);
    if (std::isnan(wide)) {
      BOOST_TEST_REQUIRE(((i & 0x7c00) == 0x7c00 && (i & 0x03ff) != 0));
      BOOST_TEST_REQUIRE(std::isnan(static_cast<float>(Half(wide))));
    } else {
      BOOST_TEST_REQUIRE(Half(wide).bits() == i);
      const double magnitude = (i & 0x7c00) == 0
                                   ? (i & 0x3ff) * 0x1p-24
                                   : std::ldexp(1024 + (i & 0x3ff), int((i >> 10) & 31) - 25);
      if ((i & 0x7c00) != 0x7c00) BOOST_TEST_REQUIRE(std::abs(wide) == magnitude);
    }
  }
}

BOOST_AUTO_TEST_CASE(floats_round_to_the_nearest_half_and_to_even) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::uniform_real_distribution<float> exponent(-26, 15.9f);
    const float value = (i % 2 ? -1.f : 1.f) * std::exp2(exponent(random));
    BOOST_TEST_REQUIRE(Half(value).bits() == nearest_half(value));
  }
  BOOST_TEST(Half(65504.f).bits() == 0x7bff);
  BOOST_TEST(Half(65519.99f).bits() == 0x7bff);
  BOOST_TEST(Half(65520.f).bits() == 0x7c00);  // halfway to the next power of two: infinity
  BOOST_TEST(Half(1.f + 0x1p-11f).bits() == Half(1.f).bits());          // a tie goes to even: down
  BOOST_TEST(Half(1.f + 3 * 0x1p-11f).bits() == Half(1.f).bits() + 2);  // and up
  BOOST_TEST(Half(0x1p-25f).bits() == 0);
  BOOST_TEST(Half(0x1.8p-25f).bits() == 1);
}

BOOST_AUTO_TEST_CASE(bfloat16_rounds_to_nearest_even_and_keeps_nan) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const auto wide = static_cast<float>(std::bit_cast<BFloat16>(static_cast<std::uint16_t>(i)));
    if (std::isnan(wide)) {
      BOOST_TEST_REQUIRE(std::isnan(static_cast<float>(BFloat16(wide))));
    } else {
      BOOST_TEST_REQUIRE(BFloat16(wide).bits() == i);
    }
  }
  BOOST_TEST(BFloat16(1.f + 0x1p-8f).bits() == BFloat16(1.f).bits());
  BOOST_TEST(BFloat16(1.f + 3 * 0x1p-8f).bits() == BFloat16(1.f).bits() + 2);
  BOOST_TEST(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7f800001u)))));
  BOOST_TEST(std::isinf(static_cast<float>(BFloat16(std::numeric_limits<float>::max()))));
}

BOOST_AUTO_TEST_CASE(kinds_types_and_sizes_agree) {
  const auto agree = []<std::size_t I>(std::integral_constant<std::size_t, I>) {
    using T = std::tuple_element_t<I, detail::ElementTypes>;
    BOOST_TEST((element_kind<T>() == static_cast<ElementKind>(I)));
    BOOST_TEST(detail::element_size(element_kind<T>()) == sizeof(T));
  };
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (agree(std::integral_constant<std::size_t, I + 1>{}), ...);
  }(std::make_index_sequence<detail::element_kinds - 1>{});
  static_assert(element_kind<long>() == element_kind<long long>());
  static_assert(element_kind<bool>() == ElementKind::unsupported);
  BOOST_TEST(detail::element_name(ElementKind::bf16) == "bfloat16");
  BOOST_TEST((detail::is_floating(ElementKind::f16) && !detail::is_floating(ElementKind::u8)));
}

BOOST_AUTO_TEST_SUITE_END()
