// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `json.hpp`.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "lockstep/checkpoint/json.hpp"
#include "lockstep/checkpoint/json_cursor.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/json_string.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE Json::Json(double value) {
  if (std::isnan(value)) {
    value_ = std::string("nan");
  } else if (std::isinf(value)) {
    value_ = std::string(value < 0 ? "-inf" : "inf");
  } else {
    value_ = value;
  }
}

LOCKSTEP_INLINE Json& Json::set(std::string_view name, Json value) {
  Object& members = std::get<Object>(value_);
  const auto found =
      std::ranges::find_if(members, [name](const Member& member) { return member.first == name; });
  if (found == members.end()) return add(std::string(name), std::move(value));
  found->second = std::move(value);
  return *this;
}

LOCKSTEP_INLINE Json& Json::add(std::string name, Json value) {
  std::get<Object>(value_).emplace_back(std::move(name), std::move(value));
  return *this;
}

LOCKSTEP_INLINE Json& Json::push(Json value) {
  std::get<Array>(value_).push_back(std::move(value));
  return *this;
}

LOCKSTEP_INLINE Json Json::take(std::string_view name) {
  Object& members = std::get<Object>(value_);
  const auto found =
      std::ranges::find_if(members, [name](const Member& member) { return member.first == name; });
  if (found == members.end()) return {};
  Json value = std::move(found->second);
  members.erase(found);
  return value;
}

LOCKSTEP_INLINE const Json* Json::find(std::string_view name) const {
  const auto* const members = get_if<Object>();
  if (members == nullptr) return nullptr;
  for (const Member& member : *members) {
    if (member.first == name) return &member.second;
  }
  return nullptr;
}

LOCKSTEP_INLINE std::string Json::text() const {
  std::string out;
  append_to(out);
  return out;
}

LOCKSTEP_INLINE void Json::append_to(std::string& out) const {
  const auto append_number = [&out](auto number) {
    char digits[64];
    const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
    out.append(digits, end);
    if constexpr (std::floating_point<decltype(number)>) {
      // Without a point it would come back as an integer.
      if (std::string_view(digits, end).find_first_of(".e") == std::string_view::npos) out += ".0";
    }
  };
  if (const auto* const boolean = get_if<bool>()) {
    out += *boolean ? "true" : "false";
  } else if (const auto* const natural = get_if<std::uint64_t>()) {
    append_number(*natural);
  } else if (const auto* const integer = get_if<std::int64_t>()) {
    append_number(*integer);
  } else if (const auto* const real = get_if<double>()) {
    append_number(*real);
  } else if (const auto* const text = get_if<std::string>()) {
    append_json_string(out, *text);
  } else if (const auto* const items = get_if<Array>()) {
    char before = '[';
    for (const Json& item : *items) {
      out += std::exchange(before, ',');
      item.append_to(out);
    }
    out += items->empty() ? "[]" : "]";
  } else if (const auto* const members = get_if<Object>()) {
    char before = '{';
    for (const Member& member : *members) {
      out += std::exchange(before, ',');
      append_json_string(out, member.first);
      out += ':';
      member.second.append_to(out);
    }
    out += members->empty() ? "{}" : "}";
  } else {
    out += "null";
  }
}

LOCKSTEP_INLINE bool has_name_twice(const Json::Object& members) {
  std::vector<std::string_view> names;
  names.reserve(members.size());
  for (const Json::Member& member : members) names.push_back(member.first);
  std::ranges::sort(names);
  return std::ranges::adjacent_find(names) != names.end();
}

LOCKSTEP_INLINE Json Json::parse_value(JsonCursor& cursor, int depth, std::size_t& left) {
  if (depth > most_depth) cursor.fail("brackets are too deep");
  if (left-- == 0) cursor.fail("there are too many values");
  switch (cursor.peek()) {
    case '{': {
      Object members;
      cursor.open_object();
      for (std::string name; cursor.next_member(name);) {
        // Moved apart from the loop's name, whose memory would be kept otherwise.
        std::string own = std::move(name);
        Json value = parse_value(cursor, depth + 1, left);
        members.emplace_back(std::move(own), std::move(value));
      }
      if (has_name_twice(members)) cursor.fail("an object has a name twice and ends");
      return Json(Value(std::move(members)));
    }
    case '[': {
      Array items;
      cursor.open_array();
      while (cursor.next_item()) items.push_back(parse_value(cursor, depth + 1, left));
      return Json(Value(std::move(items)));
    }
    case '"':
      return Json(cursor.string());
    case 't':
      cursor.word("true");
      return Json(true);
    case 'f':
      cursor.word("false");
      return Json(false);
    case 'n':
      cursor.word("null");
      return {};
    default:
      return std::visit([](auto number) { return Json(Value(number)); }, cursor.number());
  }
}

LOCKSTEP_INLINE Json Json::parse(std::string_view text, std::string whose, std::size_t most) {
  JsonCursor cursor(text, std::move(whose));
  Json value = parse_value(cursor, 1, most);
  cursor.finish();
  return value;
}

/// What a value is, in words.
LOCKSTEP_INLINE std::string_view kind_of(const Json& json) {
  if (json.is_null()) return "null";
  if (json.is_object()) return "an object";
  if (json.is_array()) return "an array";
  if (json.get_if<bool>() != nullptr) return "true or false";
  if (json.get_if<std::string>() != nullptr) return "a text";
  if (json.get_if<double>() != nullptr) return "a number with a fraction or an exponent";
  return json.get_if<std::int64_t>() != nullptr ? "a negative number" : "a whole number";
}

LOCKSTEP_INLINE void JsonEntry::fail(std::string_view problem) const {
  detail::fail("checkpoint",
               {"'", file_, "': ", name_.empty() ? "its 'lockstep' entry" : name_, " ", problem},
               "the file is damaged, or another version has made it: take another checkpoint");
}

LOCKSTEP_INLINE void JsonEntry::fail_kind(std::string_view expected) const {
  fail(detail::text({"is ", kind_of(*json_), " instead of ", expected}));
}

LOCKSTEP_INLINE const Json::Array& JsonEntry::items() const {
  const auto* const items = json_->get_if<Json::Array>();
  if (items == nullptr) fail_kind("an array");
  return *items;
}

LOCKSTEP_INLINE const Json::Object& JsonEntry::members() const {
  const auto* const members = json_->get_if<Json::Object>();
  if (members == nullptr) fail_kind("an object");
  return *members;
}

LOCKSTEP_INLINE std::optional<JsonEntry> JsonEntry::find(std::string_view name) const {
  for (const Json::Member& member : members()) {
    if (member.first == name) {
      return JsonEntry(member.second, file_, detail::text({name_, name_.empty() ? "" : ".", name}));
    }
  }
  return std::nullopt;
}

LOCKSTEP_INLINE JsonEntry JsonEntry::at(std::string_view name) const {
  if (const auto found = find(name)) return *found;
  fail(detail::text({"has no '", name, "'"}));
}

LOCKSTEP_INLINE const JsonEntry& JsonEntry::as_object() const {
  members();
  return *this;
}

LOCKSTEP_INLINE const JsonEntry& JsonEntry::as_array() const {
  items();
  return *this;
}

LOCKSTEP_INLINE std::size_t JsonEntry::size() const {
  return json_->is_object() ? members().size() : items().size();
}

LOCKSTEP_INLINE JsonEntry JsonEntry::item(std::size_t i) const {
  if (i >= items().size()) fail(detail::text({"has no item ", i}));
  return {items()[i], file_, detail::text({name_, "[", i, "]"})};
}

LOCKSTEP_INLINE JsonEntry JsonEntry::member(std::size_t i) const {
  const Json::Member& member = members().at(i);
  return {member.second, file_, detail::text({name_, name_.empty() ? "" : ".", member.first})};
}

LOCKSTEP_INLINE std::string_view JsonEntry::member_name(std::size_t i) const {
  return members().at(i).first;
}

LOCKSTEP_INLINE bool JsonEntry::boolean() const {
  const auto* const value = json_->get_if<bool>();
  if (value == nullptr) fail_kind("true or false");
  return *value;
}

LOCKSTEP_INLINE std::uint64_t JsonEntry::natural() const {
  const auto* const value = json_->get_if<std::uint64_t>();
  if (value == nullptr) fail_kind("a whole number");
  return *value;
}

LOCKSTEP_INLINE std::int64_t JsonEntry::integer() const {
  if (const auto* const negative = json_->get_if<std::int64_t>()) return *negative;
  if (natural() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
    fail("is too large a number");
  return static_cast<std::int64_t>(natural());
}

LOCKSTEP_INLINE double JsonEntry::real() const {
  if (const auto* const real = json_->get_if<double>()) return *real;
  if (const auto* const natural = json_->get_if<std::uint64_t>())
    return static_cast<double>(*natural);
  if (const auto* const integer = json_->get_if<std::int64_t>())
    return static_cast<double>(*integer);
  if (const auto* const text = json_->get_if<std::string>()) {
    if (*text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (*text == "inf") return std::numeric_limits<double>::infinity();
    if (*text == "-inf") return -std::numeric_limits<double>::infinity();
  }
  fail_kind("a number");
}

LOCKSTEP_INLINE const std::string& JsonEntry::text() const {
  const auto* const value = json_->get_if<std::string>();
  if (value == nullptr) fail_kind("a text");
  return *value;
}

LOCKSTEP_INLINE std::uint64_t JsonEntry::checksum() const {
  const auto value = checksum_from(text());
  if (!value) fail("is no text of 16 hexadecimal digits");
  return *value;
}

LOCKSTEP_INLINE std::vector<std::uint64_t> JsonEntry::naturals() const {
  std::vector<std::uint64_t> values;
  for (const Json& value : items()) {
    if (value.get_if<std::uint64_t>() == nullptr) item(values.size()).fail_kind("a whole number");
    values.push_back(*value.get_if<std::uint64_t>());
  }
  return values;
}

LOCKSTEP_INLINE std::vector<double> JsonEntry::reals() const {
  std::vector<double> values;
  for (const Json& value : items()) {
    const auto* const real = value.get_if<double>();
    values.push_back(real != nullptr ? *real : item(values.size()).real());
  }
  return values;
}

}  // namespace lockstep::detail
