// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file JSON: a writer of objects for logs and file headers, and a strict parser (RFC 8259).

#include <variant>

#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/text.hpp"

namespace lockstep {

namespace detail {

/// The size of the first UTF-8 character; 0 where it is invalid (RFC 3629).
std::size_t utf8_size(std::string_view text);
bool is_utf8(std::string_view text);

/// Appends `text` in quotation marks, with U+FFFD for what is not UTF-8. Returns whether all was.
bool append_json_string(std::string& out, std::string_view text);
/// Appends the shortest number that parses to the same value; `null` for NaN and infinities.
void append_json_number(std::string& out, std::floating_point auto value) {
  out += value - value == 0 ? number_text(value) : "null";
}

/// A value that JSON can hold. `char` is excluded: it could mean a number or a text.
template <class T>
concept JsonScalar =
    std::convertible_to<T, std::string_view> || std::same_as<T, bool> || std::floating_point<T> ||
    (std::integral<T> && !std::same_as<T, char> && !std::same_as<T, wchar_t>);

/// A parsed value. Members keep their order, and 64-bit integers are exact.
struct Json {
  using Member = std::pair<std::string, Json>;
  using Array = std::vector<Json>;
  using Object = std::vector<Member>;

  using Value = std::variant<std::monostate, bool, std::uint64_t, std::int64_t, double, std::string,
                             Array, Object>;

  Json() = default;  // null
  Json(Value of) : value(std::move(of)) {}

  /// Parses a text, which errors call `whose`: `'model.safetensors', its header`. Duplicate names
  /// and integers out of range are errors, as are more than `most_depth` brackets or `most` values.
  static constexpr int most_depth = 32;
  static constexpr std::size_t most_values = std::size_t{1} << 22;
  static Json parse(std::string_view text, std::string_view whose, std::size_t most = most_values);

  Value value;
};

/// A value and its path within a file, for errors; the `Json` and the file's name must outlive it.
class JsonEntry {
 public:
  JsonEntry(const Json& json, std::string_view file, std::string name = {})
      : json_(&json), file_(file), name_(std::move(name)) {}

  std::string_view file() const { return file_; }

  /// `at` throws where there is no such member.
  JsonEntry at(std::string_view name) const {
    if (const auto found = find(name)) return *found;
    fail(detail::text({"has no '", name, "'"}));
  }
  std::optional<JsonEntry> find(std::string_view name) const {
    for (const Json::Member& member : members())
      if (member.first == name) return of(member);
    return std::nullopt;
  }

  /// These throw where the value is no array or no object.
  const Json::Array& items() const { return as<Json::Array>("an array"); }
  const Json::Object& members() const { return as<Json::Object>("an object"); }
  JsonEntry item(std::size_t i) const {
    if (i >= items().size()) fail(detail::text({"has no item ", i}));
    return {items()[i], file_, detail::text({name_, "[", i, "]"})};
  }
  JsonEntry of(const Json::Member& member) const {
    return {member.second, file_, detail::text({name_, name_.empty() ? "" : ".", member.first})};
  }

  bool boolean() const { return as<bool>("true or false"); }
  std::uint64_t natural() const { return as<std::uint64_t>("a whole number"); }
  std::int64_t integer() const;
  double real() const;  // any number, or "nan", "inf", "-inf"
  const std::string& text() const { return as<std::string>("a text"); }
  std::uint64_t checksum() const {  // 16 hexadecimal digits
    const auto value = checksum_from(text());
    if (!value) fail("is no text of 16 hexadecimal digits");
    return *value;
  }
  std::vector<std::uint64_t> naturals() const {
    std::vector<std::uint64_t> values;
    for (std::size_t i = 0; i != items().size(); ++i) values.push_back(item(i).natural());
    return values;
  }

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&json_->value);
  }
  [[noreturn, gnu::cold]] void fail(std::string_view problem) const;

 private:
  template <class T>
  const T& as(std::string_view expected) const {
    if (const T* const value = get_if<T>()) return *value;
    fail_kind(expected);
  }
  [[noreturn, gnu::cold]] void fail_kind(std::string_view expected) const;

  const Json* json_;
  std::string_view file_;
  std::string name_;
};

}  // namespace detail

/// `JsonLine().add("epoch", 3).add("loss", 0.25).text()` is `{"epoch":3,"loss":0.25}`. Members keep
/// their order; numbers are the shortest that parse to the same value; NaN and infinities are null.
class JsonLine {
 public:
  JsonLine() = default;
  /// From the `members()` of another line.
  explicit JsonLine(std::string_view members) : members_(members) {}

  /// Adds a number, a text, a bool, or an object inside this one.
  template <class T>
    requires(detail::JsonScalar<T> || std::same_as<T, JsonLine>)
  JsonLine& add(std::string_view name, const T& value) {
    add_name(name);
    append(value);
    return *this;
  }
  /// Appends the members of another line.
  JsonLine& add(const JsonLine& others);
  /// A double without loss: NaN and infinities become the texts "nan", "inf" and "-inf".
  JsonLine& add_exact(std::string_view name, double value);
  template <class Range>
  JsonLine& add_array(std::string_view name, const Range& values) {
    add_name(name);
    append_all(values);
    return *this;
  }

  std::string text() const { return detail::text({"{", members_, "}"}); }
  const std::string& members() const { return members_; }
  bool empty() const { return members_.empty(); }
  /// Were all texts valid UTF-8, so that none was altered?
  bool is_utf8() const { return is_utf8_; }

 private:
  void add_name(std::string_view name) {
    if (!members_.empty()) members_ += ',';
    append(name);
    members_ += ':';
  }
  template <class Range>
  void append_all(const Range& values) {
    char before = '[';
    for (const auto& value : values) {
      members_ += std::exchange(before, ',');
      append(value);
    }
    members_ += before == '[' ? "[]" : "]";
  }
  template <class T>
  void append(const T& value) {
    if constexpr (std::same_as<T, JsonLine>) {
      members_ += value.text();
      is_utf8_ = is_utf8_ && value.is_utf8_;
    } else if constexpr (std::ranges::range<T> && !std::convertible_to<T, std::string_view>) {
      append_all(value);
    } else if constexpr (std::convertible_to<T, std::string_view>) {
      is_utf8_ = detail::append_json_string(members_, value) && is_utf8_;
    } else if constexpr (std::same_as<T, bool>) {
      members_ += value ? "true" : "false";
    } else if constexpr (std::same_as<T, float>) {
      detail::append_json_number(members_, value);
    } else if constexpr (std::floating_point<T>) {
      detail::append_json_number(members_, static_cast<double>(value));
    } else {
      detail::TextPart(value).append_to(members_);
    }
  }

  std::string members_;
  bool is_utf8_ = true;
};

}  // namespace lockstep
