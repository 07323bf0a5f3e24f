// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/json.hpp"

#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "lockstep/detail/core/random_stream.hpp"

using namespace lockstep;
using nlohmann::json;

BOOST_AUTO_TEST_SUITE(observe_json_line)

namespace {

/// What a reader gets back from a line with one member, `x`.
template <class T>
json read_back(const T& value) {
  const std::string text = JsonLine().add("x", value).text();
  BOOST_TEST(text.find('\n') == std::string::npos);
  return json::parse(text).at("x");
}

std::string utf8(std::string_view text) { return read_back(text).get<std::string>(); }

}  // namespace

BOOST_AUTO_TEST_CASE(members_stay_in_order) {
  BOOST_TEST(JsonLine().text() == "{}");
  const std::string text =
      JsonLine().add("epoch", 3).add("loss", 0.25).add("done", false).add("of", "a \"run\"").text();
  BOOST_TEST(text == R"({"epoch":3,"loss":0.25,"done":false,"of":"a \"run\""})");
}

BOOST_AUTO_TEST_CASE(every_character_comes_back) {
  for (int c = 0; c < 128; ++c) {
    const std::string text = {'<', static_cast<char>(c), '>'};
    BOOST_TEST(read_back(text).get<std::string>() == text);
    BOOST_TEST(json::parse(JsonLine().add(text, 1).text()).at(text) == 1);
  }
  BOOST_TEST(utf8("") == "");
  BOOST_TEST(utf8("grün ≤ 𝛿 \\ \"\u2028\"") == "grün ≤ 𝛿 \\ \"\u2028\"");
}

BOOST_AUTO_TEST_CASE(what_is_no_utf8_is_replaced_and_the_rest_kept) {
  BOOST_TEST(utf8("a\xff"
                  "b") == "a\ufffdb");
  BOOST_TEST(utf8("\xc3") == "\ufffd");
  BOOST_TEST(utf8("\xc0\xaf") == "\ufffd\ufffd");            // an overlong slash
  BOOST_TEST(utf8("\xed\xa0\x80") == "\ufffd\ufffd\ufffd");  // a surrogate
  BOOST_TEST(utf8("\xe2\x82\"") == "\ufffd\ufffd\"");        // cut short by a quotation mark
  BOOST_TEST(utf8("\xf4\x90\x80\x80").size() == 4 * 3u);     // above U+10FFFF
  // Whatever the bytes are, the line can be read.
  RandomStream random(Seed{1});
  for (int i = 0; i < 20000; ++i) {
    std::string bytes;
    for (std::uint64_t n = random.below(6); n > 0; --n) {
      bytes += static_cast<char>(random() | (random.below(2) * 0x80));
    }
    BOOST_CHECK_NO_THROW(static_cast<void>(json::parse(JsonLine().add("x", bytes).text())));
  }
}

BOOST_AUTO_TEST_CASE(numbers_come_back_as_they_were) {
  using Limits = std::numeric_limits<double>;
  for (double x : {0.1, 1.0 / 3, 1e300, Limits::denorm_min(), Limits::max(), -0.0, 1e21, 5e-5}) {
    BOOST_TEST(read_back(x).get<double>() == x);
  }
  BOOST_TEST(read_back(0.1f).get<float>() == 0.1f);
  RandomStream random(Seed{2});
  for (int i = 0; i < 10000; ++i) {
    const auto x = std::bit_cast<double>(random());
    if (std::isfinite(x)) BOOST_TEST_REQUIRE(read_back(x).get<double>() == x);
  }
  BOOST_TEST(read_back(std::numeric_limits<std::int64_t>::min()).get<std::int64_t>() ==
             std::numeric_limits<std::int64_t>::min());
  BOOST_TEST(read_back(~std::uint64_t{0}).get<std::uint64_t>() == ~std::uint64_t{0});
  BOOST_TEST(read_back(std::uint8_t{7}).get<int>() == 7);
}

BOOST_AUTO_TEST_CASE(what_json_has_no_number_for_is_null) {
  using Limits = std::numeric_limits<double>;
  for (double x : {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity()}) {
    BOOST_TEST(read_back(x).is_null());
  }
}

BOOST_AUTO_TEST_CASE(texts_and_truths_are_not_numbers) {
  BOOST_TEST(read_back(true).is_boolean());
  BOOST_TEST(read_back("true").is_string());
  BOOST_TEST(read_back(std::string("1")).is_string());
  const char* pointer = "text";
  BOOST_TEST(read_back(pointer).is_string());
  static_assert(!detail::JsonScalar<char> && !detail::JsonScalar<void*> &&
                !detail::JsonScalar<JsonLine>);
}

BOOST_AUTO_TEST_CASE(objects_nest_and_join) {
  const JsonLine inner = JsonLine().add("a", 1);
  BOOST_TEST(JsonLine().add("run", inner).add("b", 2).text() == R"({"run":{"a":1},"b":2})");
  BOOST_TEST(JsonLine().add("b", 2).add(inner).add(JsonLine()).text() == R"({"b":2,"a":1})");
  BOOST_TEST(JsonLine().add(inner).text() == R"({"a":1})");
}

BOOST_AUTO_TEST_SUITE_END()
