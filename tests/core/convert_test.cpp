// SPDX-License-Identifier: Apache-2.0
// Elements in another type, also where both lie in one memory.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/error.hpp"

using namespace lockstep;
using detail::convert_elements;

BOOST_AUTO_TEST_SUITE(converted_elements)

namespace {

template <class To, class From>
void check_pair() {
  constexpr std::size_t count = 1300;  // not a multiple of anything
  std::vector<From> from(count);
  for (std::size_t i = 0; i < count; ++i)
    from[i] = static_cast<From>(static_cast<detail::Accumulator<From>>(1.0 / (1.0 + 3.0 * i)));
  std::vector<To> want(count), got(count);
  detail::convert(want.data(), from.data(), count);
  const auto bytes = [](auto& values) { return reinterpret_cast<std::byte*>(values.data()); };
  convert_elements(bytes(got), element_kind<To>(), bytes(from), element_kind<From>(), count);
  BOOST_TEST(std::memcmp(got.data(), want.data(), count * sizeof(To)) == 0);
  if constexpr (sizeof(To) >= sizeof(From)) {
    std::vector<To> place(count);
    std::byte* const end = bytes(place) + count * (sizeof(To) - sizeof(From));
    std::memcpy(end, from.data(), count * sizeof(From));
    convert_elements(bytes(place), element_kind<To>(), end, element_kind<From>(), count);
    BOOST_TEST(std::memcmp(place.data(), want.data(), count * sizeof(To)) == 0);
  }
}

template <class... Ts>
void check_all_pairs() {
  const auto from = []<class From>(From) { (check_pair<Ts, From>(), ...); };
  (from(Ts{}), ...);
}

}  // namespace

BOOST_AUTO_TEST_CASE(floating_types_become_each_other) {
  check_all_pairs<double, float, Half, BFloat16>();
}

BOOST_AUTO_TEST_CASE(integers_stay_what_they_are) {
  const std::int64_t from[] = {1, (std::int64_t{1} << 60) + 1};
  std::int64_t to[2];
  convert_elements(reinterpret_cast<std::byte*>(to), ElementKind::i64,
                   reinterpret_cast<const std::byte*>(from), ElementKind::i64, 2);
  BOOST_TEST((to[0] == from[0] && to[1] == from[1]));
  BOOST_CHECK_THROW(convert_elements(reinterpret_cast<std::byte*>(to), ElementKind::i64,
                                     reinterpret_cast<const std::byte*>(from), ElementKind::f64, 2),
                    Error);
}

BOOST_AUTO_TEST_SUITE_END()
