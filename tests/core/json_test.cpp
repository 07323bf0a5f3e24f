// SPDX-License-Identifier: Apache-2.0
// The library's own JSON, with nlohmann's as a second opinion.
#include "lockstep/detail/core/json.hpp"

#include <bit>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/folder.hpp"
#include "checkpoint/sample.hpp"

BOOST_AUTO_TEST_SUITE(checkpoint_json)

namespace {

using namespace checkpoint;
using namespace lockstep::detail;
using lockstep::JsonLine;

Json parse(std::string_view text) { return Json::parse(text, "'a', its facts"); }
bool accepts(std::string_view text) {
  return error_of([&] { parse(text); }).empty();
}

std::string random_text(Random& random) {
  static constexpr const char* parts[] = {"a", "\"", "\\", "\n", "\x01", "é", "€", "😀", "/", " "};
  std::string text;
  for (std::size_t i = random.below(6); i > 0; --i) text += parts[random.below(std::size(parts))];
  return text;
}

double random_double(Random& random) {
  const auto value = std::bit_cast<double>(random());  // any exponent, denormal numbers too
  return std::isfinite(value) ? value : -0.0;
}

nlohmann::json random_value(Random& random, int depth) {
  switch (random.below(depth > 4 ? 7 : 9)) {
    case 0:
      return {};
    case 1:
      return random.below(2) == 0;
    case 2:
      return random() >> random.below(64);
    case 3:
      return static_cast<std::int64_t>(random());
    case 4:
      return random_double(random);
    case 5:
      return static_cast<double>(random.below(1000));
    case 6:
      return random_text(random);
    case 7: {
      nlohmann::json array = nlohmann::json::array();
      for (std::size_t i = random.below(5); i > 0; --i)
        array.push_back(random_value(random, depth + 1));
      return array;
    }
    default: {
      nlohmann::json object = nlohmann::json::object();
      for (std::size_t i = random.below(5); i > 0; --i)
        object[random_text(random)] = random_value(random, depth + 1);
      return object;
    }
  }
}

/// Are they the same, bit for bit?
bool same(const Json& json, const nlohmann::json& b) {
  const JsonEntry a(json, "a");
  if (const auto* v = a.get_if<bool>()) return b.is_boolean() && b.get<bool>() == *v;
  if (const auto* v = a.get_if<std::uint64_t>())
    return b.is_number_unsigned() && b.get<std::uint64_t>() == *v;
  if (const auto* v = a.get_if<std::int64_t>())
    return b.is_number_integer() && b.get<std::int64_t>() == *v;
  if (const auto* v = a.get_if<double>())
    return b.is_number_float() &&
           std::bit_cast<std::uint64_t>(b.get<double>()) == std::bit_cast<std::uint64_t>(*v);
  if (const auto* v = a.get_if<std::string>()) return b.is_string() && b.get<std::string>() == *v;
  if (const auto* v = a.get_if<Json::Array>()) {
    if (!b.is_array() || b.size() != v->size()) return false;
    for (std::size_t i = 0; i < v->size(); ++i)
      if (!same((*v)[i], b[i])) return false;
    return true;
  }
  if (const auto* v = a.get_if<Json::Object>()) {
    if (!b.is_object() || b.size() != v->size()) return false;
    for (const auto& [name, value] : *v)
      if (!b.contains(name) || !same(value, b[name])) return false;
    return true;
  }
  return b.is_null();
}

}  // namespace

BOOST_AUTO_TEST_CASE(random_values_are_what_nlohmann_wrote) {
  for (std::uint64_t stream = 0; stream < 400; ++stream) {
    Random random{stream};
    const auto value = nlohmann::json::parse(random_value(random, 0).dump());
    BOOST_TEST(same(parse(value.dump()), value), value.dump());
    BOOST_TEST(same(parse(value.dump(2)), value));              // with blanks
    BOOST_TEST(same(parse(value.dump(-1, ' ', true)), value));  // with escapes
  }
}

BOOST_AUTO_TEST_CASE(changed_texts_are_accepted_where_nlohmann_accepts_them) {
  constexpr std::string_view bytes = "{}[]\",:\\/0123456789+-.eEtrufalsn \n\x01\x80\xc3\xa9u";
  std::size_t accepted = 0;
  for (std::uint64_t stream = 0; stream < 4000; ++stream) {
    Random random{stream};
    std::string text = random_value(random, 0).dump();
    for (std::size_t changes = 1 + random.below(2); changes > 0; --changes) {
      const std::size_t place = random.below(text.size());
      const char byte = bytes[random.below(bytes.size())];
      switch (random.below(3)) {
        case 0:
          text[place] = byte;
          break;
        case 1:
          text.insert(place, 1, byte);
          break;
        default:
          text.erase(place, 1);
      }
      if (text.empty()) text = "0";
    }
    // nlohmann is laxer in three ways: integers that do not fit become doubles, numbers that are
    // too small become zero, and of two members of one name it keeps one.
    bool is_lax = false;
    std::vector<std::vector<std::string>> names;
    const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
      using Event = nlohmann::json::parse_event_t;
      if (event == Event::object_start) names.emplace_back();
      if (event == Event::object_end) names.pop_back();
      if (event == Event::key) {
        for (const std::string& name : names.back())
          is_lax = is_lax || name == parsed.get<std::string>();
        names.back().push_back(parsed);
      }
      return true;
    };
    nlohmann::json other;
    bool other_accepts = true;
    try {
      other = nlohmann::json::parse(text, watch);
    } catch (const nlohmann::json::exception&) {
      other_accepts = false;
    }
    const std::string error = error_of([&] { parse(text); });
    is_lax = is_lax || holds(error, "out of range");
    BOOST_TEST((error.empty() == other_accepts || (is_lax && !error.empty())), text + ": " + error);
    if (!error.empty()) continue;
    ++accepted;
    if (text.find("-0") == std::string::npos) BOOST_TEST(same(parse(text), other), text);
  }
  BOOST_TEST(accepted > 500u);
}

BOOST_AUTO_TEST_CASE(integers_and_doubles_are_exact) {
  constexpr auto most = std::numeric_limits<std::uint64_t>::max();
  constexpr auto least = std::numeric_limits<std::int64_t>::min();
  BOOST_TEST(JsonEntry(parse("18446744073709551615"), "a").natural() == most);
  BOOST_TEST(JsonEntry(parse("-9223372036854775808"), "a").integer() == least);
  BOOST_TEST(std::signbit(JsonEntry(parse("-0"), "a").real()));
  const auto again = [](double value) {
    const Json json = parse(JsonLine().add_exact("x", value).text());
    return JsonEntry(json, "a").at("x").real();
  };
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const double value :
       {infinity, -infinity, 5e-324, 0.1, 3.0, 1e300, 1e19, 0x1p63, 1.7976931348623157e308})
    BOOST_TEST(again(value) == value);
  BOOST_TEST(std::signbit(again(-0.0)));
  BOOST_TEST(std::isnan(again(std::nan(""))));
}

BOOST_AUTO_TEST_CASE(what_is_no_json_is_rejected) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1",
                           "[1,",
                           "[1,]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "{1:1}",
                           "[1 2]",
                           "1 2",
                           "01",
                           "-",
                           "+1",
                           ".5",
                           "1.",
                           "1e",
                           "1e+",
                           "0x10",
                           "NaN",
                           "Infinity",
                           "tru",
                           "truee",
                           "nul",
                           "'a'",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u123g\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\n\"",
                           "\"\x80\"",
                           "\"\xc0\xaf\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf5\x80\x80\x80\"",
                           "// a\n1",
                           "[1}",
                           "{]",
                           "18446744073709551616",
                           "-9223372036854775809",
                           "1e999",
                           "{\"a\":1,\"b\":2,\"a\":3}",
                           "{\"a\":1,\"\\u0061\":3}",
                           "\xef\xbb\xbf"
                           "1"}) {
    BOOST_TEST(!accepts(text), text);
  }
  BOOST_TEST(!accepts(std::string("1\0", 2)));
  BOOST_TEST(!accepts(std::string("\0", 1)));
  BOOST_TEST((JsonEntry(parse("\"\\ud83d\\ude00\\u00e9\\u20ac\\u0000\""), "a").text() ==
              std::string("😀é€\0", 10)));
  BOOST_TEST(
      error_of([] { parse("[1,02]"); }) ==
      "lockstep: checkpoint: 'a', its facts: a number begins with a zero at byte 3; the file "
      "is damaged or no such file: copy it again, or take another");
}

BOOST_AUTO_TEST_CASE(depth_and_size_are_bounded) {
  const auto nested = [](std::size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  BOOST_TEST(accepts(nested(32)));
  for (std::size_t depth : {33, 100'000})
    BOOST_TEST(holds(error_of([&] { parse(nested(depth)); }), "brackets are too deep at byte 32"));
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  BOOST_TEST(holds(error_of([&] { parse(objects); }), "brackets are too deep"));
  const auto few = [](std::string_view text) { Json::parse(text, "a", 4); };
  few("[1,2,3]");
  BOOST_TEST(holds(error_of([&] { few("[1,2,3,4]"); }), "there are too many values"));
  BOOST_TEST(holds(error_of([&] { few("[[],{},\"\",{}]"); }), "there are too many values"));
}

BOOST_AUTO_TEST_CASE(getters_say_what_is_wrong_in_which_file) {
  const Json json = parse(R"({"world":"four","files":[{"bytes":-1}],"list":[1,true],"sum":"12",
                              "large":9223372036854775808})");
  const JsonEntry facts(json, "dir/a.safetensors");
  const auto says = [](const auto& f) {
    const std::string error = error_of(f);
    BOOST_TEST(holds(error, "; the file is damaged, or another version has made it"));
    return error.substr(0, error.find(';')).substr(std::string("lockstep: checkpoint: ").size());
  };
  BOOST_TEST(says([&] { facts.at("world").natural(); }) ==
             "'dir/a.safetensors': world is a text instead of a whole number");
  BOOST_TEST(says([&] { facts.at("files").item(0).at("bytes").natural(); }) ==
             "'dir/a.safetensors': files[0].bytes is a negative number instead of a whole number");
  BOOST_TEST(says([&] { facts.at("rank"); }) ==
             "'dir/a.safetensors': its 'lockstep' entry has no 'rank'");
  BOOST_TEST(says([&] { facts.at("files").item(1); }) ==
             "'dir/a.safetensors': files has no item 1");
  BOOST_TEST(says([&] { facts.at("files").at("a"); }) ==
             "'dir/a.safetensors': files is an array instead of an object");
  BOOST_TEST(says([&] { facts.at("list").naturals(); }) ==
             "'dir/a.safetensors': list[1] is true or false instead of a whole number");
  BOOST_TEST(says([&] { facts.at("list").item(1).real(); }) ==
             "'dir/a.safetensors': list[1] is true or false instead of a number");
  BOOST_TEST(says([&] { facts.at("sum").checksum(); }) ==
             "'dir/a.safetensors': sum is no text of 16 hexadecimal digits");
  BOOST_TEST(says([&] { facts.at("large").integer(); }) ==
             "'dir/a.safetensors': large is too large a number");
  BOOST_TEST(!facts.find("rank").has_value());
}

BOOST_AUTO_TEST_CASE(lines_have_arrays_and_say_what_is_no_utf8) {
  JsonLine line;
  line.add_array("a", std::vector<double>{0.5, 2}).add_array("b", std::vector<int>());
  line.add_array("c", std::vector<JsonLine>{JsonLine().add("x", 1), JsonLine()});
  BOOST_TEST(line.text() == R"({"a":[0.5,2],"b":[],"c":[{"x":1},{}]})");
  BOOST_TEST(JsonLine(line.members()).add("d", true).text() ==
             R"({"a":[0.5,2],"b":[],"c":[{"x":1},{}],"d":true})");
  BOOST_TEST(line.is_utf8());
  BOOST_TEST(!JsonLine().add("x", "\xff").is_utf8());
  BOOST_TEST(!JsonLine().add("\xff", 1).is_utf8());
  BOOST_TEST(!JsonLine().add("x", JsonLine().add("y", "\xff")).is_utf8());
  BOOST_TEST(!JsonLine().add(JsonLine().add("y", "\xff")).is_utf8());
}

BOOST_AUTO_TEST_SUITE_END()
