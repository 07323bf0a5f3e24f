// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file JSON: values that are built and written, and a strict reader (RFC 8259 and nothing beyond
/// it: UTF-8, no comments, no trailing commas, no lone surrogates). Lines for logs are in
/// json_line.hpp, which costs a program less.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/core/json_line.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// Walks through a text value by value and builds nothing: what a hostile file may cost is decided
/// by whoever walks. Integers are exact or an error. Where another thing follows than the walker
/// expects, that is an error that names the text and the byte.
class JsonCursor {
 public:
  /// `whose` says whose text it is: `'model.safetensors', its header`.
  JsonCursor(std::string_view text, std::string whose) : text_(text), whose_(std::move(whose)) {}

  /// The first character of what follows, behind blanks; 0 at the end.
  char peek();

  void open_object() { open('{', "an object should begin"); }
  void open_array() { open('[', "an array should begin"); }
  /// Does another item follow? At the end of the array or object it is closed.
  bool next_item() { return next(']'); }
  /// The name of the next member, whose value follows.
  bool next_member(std::string& name);

  std::string string();
  /// A number: exact where it has neither a point nor an exponent.
  using Number = std::variant<std::uint64_t, std::int64_t, double>;
  Number number();
  std::uint64_t natural();
  /// One of the words true, false and null.
  void word(std::string_view word);
  /// Nothing but blanks follows.
  void finish();

  std::size_t place() const { return place_; }
  [[noreturn, gnu::cold]] void fail(std::string_view problem) const;

 private:
  void expect(char c, std::string_view problem);
  void open(char bracket, std::string_view problem);
  bool next(char close);
  unsigned escaped_unit();
  void append_escaped(std::string& out);

  std::string_view text_;
  std::string whose_;
  std::size_t place_ = 0;
  bool is_first_ = false;  // a bracket was opened and nothing has followed yet
};

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
    if constexpr (std::signed_integral<T>) {
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
  /// Appends a member whose name is known to be new, or an item of an array.
  Json& add(std::string name, Json value);
  Json& push(Json value);
  /// Takes a member out of an object; null where there is none.
  Json take(std::string_view name);

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }
  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  /// The member of this name; none where there is none, or where this is no object.
  const Json* find(std::string_view name) const;
  /// What it is, in words.
  std::string_view kind() const;

  /// The text that `parse` reads back as the same value.
  std::string text() const;

  /// Reads a text; two members of one name are an error. Memory and time are bounded whatever the
  /// text holds: at most 32 brackets within each other and `most` values.
  static constexpr int most_depth = 32;
  static constexpr std::size_t most_values = std::size_t{1} << 22;
  static Json parse(std::string_view text, std::string whose, std::size_t most = most_values);

 private:
  using Value = std::variant<std::monostate, bool, std::uint64_t, std::int64_t, double, std::string,
                             Array, Object>;
  explicit Json(Value value) : value_(std::move(value)) {}
  static Json parse_value(JsonCursor& cursor, int depth, std::size_t& left);
  void append_to(std::string& out) const;

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

  /// The items of an array, or the members of an object with their names.
  const Json::Array& items() const { return as<Json::Array>("an array"); }
  const Json::Object& members() const { return as<Json::Object>("an object"); }
  JsonEntry item(std::size_t i) const;
  JsonEntry of(const Json::Member& member) const;

  bool boolean() const { return as<bool>("true or false"); }
  std::uint64_t natural() const { return as<std::uint64_t>("a whole number"); }
  std::int64_t integer() const;
  double real() const;  // any number
  const std::string& text() const { return as<std::string>("a text"); }
  std::uint64_t checksum() const;  // 16 hexadecimal digits
  std::vector<std::uint64_t> naturals() const;

  [[noreturn, gnu::cold]] void fail(std::string_view problem) const;

 private:
  template <class T>
  const T& as(std::string_view expected) const {
    if (const T* const value = json_->get_if<T>()) return *value;
    fail_kind(expected);
  }
  [[noreturn, gnu::cold]] void fail_kind(std::string_view expected) const;

  const Json* json_;
  std::string_view file_;
  std::string name_;
};

}  // namespace lockstep::detail
