// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file JSON values: built and written by those who save, read by those who load.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

class JsonCursor;

/// A JSON value. Members of objects keep their order. Integers of 64 bits are exact, and doubles
/// come back as the same bits: they always have a point or an exponent, so -0.0 stays what it is,
/// and those that JSON has no number for are the texts "nan", "inf" and "-inf".
class Json {
 public:
  using Member = std::pair<std::string, Json>;
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;

  Json() = default;  // null
  template <std::same_as<bool> T>
  Json(T value) : value_(value) {}
  template <std::integral T>
    requires(!std::same_as<T, bool> && !std::same_as<T, char>)
  Json(T value) : value_(static_cast<std::uint64_t>(value)) {
    if constexpr (std::is_signed_v<T>) {
      if (value < 0) value_ = static_cast<std::int64_t>(value);
    }
  }
  Json(double value);
  Json(const char* text) : value_(std::string(text)) {}
  Json(std::string_view text) : value_(std::string(text)) {}
  Json(std::string text) : value_(std::move(text)) {}

  static Json object() { return Json(Value(Object())); }
  static Json array() { return Json(Value(Array())); }
  /// An array of numbers or texts.
  template <class Range>
  static Json array_of(const Range& range) {
    Array items;
    for (const auto& value : range) items.emplace_back(value);
    return Json(Value(std::move(items)));
  }

  /// Sets a member of an object: replaces the one of this name, or appends.
  Json& set(std::string_view name, Json value);
  /// Appends a member whose name is known to be new.
  Json& add(std::string name, Json value);
  /// Appends an item to an array.
  Json& push(Json value);
  /// Takes a member out of an object; null where there is none.
  Json take(std::string_view name);

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  /// The member of this name; none where there is none, or where this is no object.
  const Json* find(std::string_view name) const;

  /// The text that `parse` reads back as the same value.
  std::string text() const;
  void append_to(std::string& out) const;

  /// Reads a text, strictly: two members of one name are an error too. Memory and time are bounded
  /// whatever the text holds: at most 32 brackets within each other and `most_values` values.
  static constexpr int most_depth = 32;
  static constexpr std::size_t most_values = std::size_t{1} << 22;
  static Json parse(std::string_view text, std::string whose, std::size_t most = most_values);

 private:
  using Value = std::variant<std::monostate, bool, std::uint64_t, std::int64_t, double, std::string,
                             Array, Object>;
  explicit Json(Value value) : value_(std::move(value)) {}

  static Json parse_value(JsonCursor& cursor, int depth, std::size_t& left);

  Value value_;
};

/// A value of a file's JSON that knows where it stands: what it is not is said in an error with the
/// file's name and its own, `'a.safetensors': files[2].bytes is a text instead of a whole number`.
/// It points into the value: it is used while that stands.
class JsonEntry {
 public:
  JsonEntry(const Json& json, std::string_view file, std::string name = {})
      : json_(&json), file_(file), name_(std::move(name)) {}

  const Json& json() const { return *json_; }
  std::string_view file() const { return file_; }

  /// A member that must be there, or one that may be.
  JsonEntry at(std::string_view name) const;
  std::optional<JsonEntry> find(std::string_view name) const;

  /// This, if it is an object or an array.
  const JsonEntry& as_object() const;
  const JsonEntry& as_array() const;
  /// How many items or members; their entries; the name of a member.
  std::size_t size() const;
  JsonEntry item(std::size_t i) const;
  JsonEntry member(std::size_t i) const;
  std::string_view member_name(std::size_t i) const;

  bool boolean() const;
  std::uint64_t natural() const;
  std::int64_t integer() const;
  double real() const;  // any number
  const std::string& text() const;
  std::uint64_t checksum() const;  // 16 hexadecimal digits
  std::vector<std::uint64_t> naturals() const;
  std::vector<double> reals() const;

  [[noreturn, gnu::cold]] void fail(std::string_view problem) const;

 private:
  [[noreturn, gnu::cold]] void fail_kind(std::string_view expected) const;
  const Json::Array& items() const;
  const Json::Object& members() const;

  const Json* json_;
  std::string_view file_;
  std::string name_;
};

}  // namespace lockstep::detail
