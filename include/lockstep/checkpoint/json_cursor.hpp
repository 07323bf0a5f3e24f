// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Walks through a JSON text, strictly, value by value and without building anything: what a
/// hostile file may cost is decided by whoever walks.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// JSON by RFC 8259, and nothing beyond it: UTF-8 only, no comments, no trailing commas, no lone
/// surrogates. Integers are exact or an error. The walker says what it expects; another thing is
/// an error that names the text and the byte.
class JsonCursor {
 public:
  /// `whose` says whose text it is: `'model.safetensors', its header`.
  JsonCursor(std::string_view text, std::string whose) : text_(text), whose_(std::move(whose)) {}

  /// The first character of what follows, behind blanks; 0 at the end.
  char peek();

  void open_object();
  /// The name of the object's next member, whose value follows; false at the object's end.
  bool next_member(std::string& name);

  void open_array();
  /// Whether an item follows; false at the array's end.
  bool next_item();

  std::string string();

  /// A number: exact where it has neither a point nor an exponent.
  using Number = std::variant<std::uint64_t, std::int64_t, double>;
  Number number();

  /// A whole number that is not negative.
  std::uint64_t natural();

  /// One of the words true, false and null.
  void word(std::string_view word);

  /// Nothing but blanks follows.
  void finish();

  /// How many bytes are behind the cursor.
  std::size_t place() const { return place_; }

  [[noreturn, gnu::cold]] void fail(std::string_view problem) const;

 private:
  bool next(char close);
  void expect(char c, std::string_view problem);
  unsigned escaped_unit();
  void append_escaped(std::string& out);

  std::string_view text_;
  std::string whose_;
  std::size_t place_ = 0;
  bool is_first_ = false;  // a bracket was opened and nothing has followed yet
};

}  // namespace lockstep::detail
