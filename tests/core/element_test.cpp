// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/element.hpp"

#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "lockstep/core/half.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(core_element)

namespace {

/// Rounding by definition: of all halves, the nearest; of two equally near, the even one.
std::uint16_t nearest_half(double value) {
  std::uint16_t best = 0;
  double distance = std::numeric_limits<double>::infinity();
  for (std::uint32_t bits = 0; bits < 0x7c00; ++bits) {  // the finite ones, by magnitude
    const double candidate = static_cast<float>(Half::from_bits(static_cast<std::uint16_t>(bits)));
    const double d = std::abs(candidate - std::abs(value));
    if (d < distance || (d == distance && bits % 2 == 0)) {
      distance = d;
      best = static_cast<std::uint16_t>(bits);
    }
  }
  return static_cast<std::uint16_t>(best | (std::signbit(value) ? 0x8000 : 0));
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_half_survives_the_way_through_float) {
  for (std::uint32_t i = 0; i <= 0xffff; ++i) {
    const Half half = Half::from_bits(static_cast<std::uint16_t>(i));
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
    const auto wide = static_cast<float>(BFloat16::from_bits(static_cast<std::uint16_t>(i)));
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
