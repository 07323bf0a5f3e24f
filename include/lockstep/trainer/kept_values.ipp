// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `kept_values.hpp`.

#include <algorithm>
#include <charconv>
#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/trainer/joint_work.hpp"
#include "lockstep/trainer/kept_values.hpp"

namespace lockstep {

LOCKSTEP_INLINE KeptValues& KeptValues::add(const KeptValue& value) {
  for (const KeptValue& other : values_) {
    if (other.name() == value.name())
      detail::fail("KeptValues", {"two values have the name ", value.name()},
                   "give each a name of its own");
  }
  values_.push_back(value);
  return *this;
}

namespace detail {

LOCKSTEP_INLINE std::string SavedValue::type() const {
  switch (kind) {
    case ValueKind::number:
      return std::string(element_name(element));
    case ValueKind::truth:
      return "bool";
    case ValueKind::text:
      return "text";
    case ValueKind::numbers:
      return text({element_name(element), "[]"});
    case ValueKind::random_stream:
      return "RandomStream";
  }
  return "";
}

LOCKSTEP_INLINE std::string pack_values(const KeptValues& values) {
  std::string packed;
  for (const KeptValue& value : values) {
    const SavedValue saved = value.saved();
    packed += static_cast<char>(saved.kind);
    packed += static_cast<char>(saved.element);
    append_sized(packed, saved.name);
    append_sized(packed, saved.bytes);
  }
  return packed;
}

LOCKSTEP_INLINE std::vector<SavedValue> unpack_values(std::string_view packed) {
  std::vector<SavedValue> values;
  while (!packed.empty()) {
    SavedValue& value = values.emplace_back();
    value.kind = static_cast<ValueKind>(packed[0]);
    value.element = static_cast<ElementKind>(packed[1]);
    packed.remove_prefix(2);
    value.name = take_sized(packed);
    value.bytes = take_sized(packed);
  }
  return values;
}

LOCKSTEP_INLINE const SavedValue* find_value(const std::vector<SavedValue>& saved,
                                             std::string_view name) {
  for (const SavedValue& value : saved)
    if (value.name == name) return &value;
  return nullptr;
}

LOCKSTEP_INLINE ValueDifferences compare_values(const KeptValues& values,
                                                const std::vector<SavedValue>& saved) {
  ValueDifferences found;
  for (const KeptValue& value : values) {
    const SavedValue* const other = find_value(saved, value.name());
    if (other == nullptr) {
      found.missing.push_back(value.name());
    } else if (!value.is_of(*other)) {
      found.other_types.push_back(text({value.name(), " is ", other->type(), " in the file and ",
                                        value.saved().type(), " here"}));
    }
  }
  for (const SavedValue& value : saved) {
    const bool wanted = std::any_of(values.begin(), values.end(), [&](const KeptValue& other) {
      return other.name() == value.name;
    });
    if (!wanted) found.unexpected.push_back(value.name);
  }
  return found;
}

LOCKSTEP_INLINE void set_values(const KeptValues& values, const std::vector<SavedValue>& saved) {
  for (const KeptValue& value : values) {
    const SavedValue* const other = find_value(saved, value.name());
    if (other != nullptr && value.is_of(*other)) value.set(*other);
  }
}

template <class T>
std::string digits_of(std::string_view bytes) {
  T number{};
  std::memcpy(&number, bytes.data(), sizeof number);
  char digits[64];
  const auto end = std::to_chars(std::begin(digits), std::end(digits), number);
  return {digits, end.ptr};
}

template <class T>
std::string of_digits(std::string_view digits) {
  T number{};
  const auto end = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (end.ec != std::errc() || end.ptr != digits.data() + digits.size())
    fail("checkpoint", {"\"", digits, "\" is no ", element_name(element_kind<T>())},
         "load another file");
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

/// Calls `f(std::type_identity<T>{})` with the type behind a kind. Numbers of 16 bits are told by
/// their bits, since the standard has no digits of them.
template <class F>
std::string with_number(ElementKind kind, const F& f) {
  switch (kind) {
    case ElementKind::f64:
      return f(std::type_identity<double>{});
    case ElementKind::f32:
      return f(std::type_identity<float>{});
    case ElementKind::i8:
      return f(std::type_identity<std::int8_t>{});
    case ElementKind::i16:
      return f(std::type_identity<std::int16_t>{});
    case ElementKind::i32:
      return f(std::type_identity<std::int32_t>{});
    case ElementKind::i64:
      return f(std::type_identity<std::int64_t>{});
    case ElementKind::u8:
      return f(std::type_identity<std::uint8_t>{});
    case ElementKind::f16:
    case ElementKind::bf16:
    case ElementKind::u16:
      return f(std::type_identity<std::uint16_t>{});
    case ElementKind::u32:
      return f(std::type_identity<std::uint32_t>{});
    case ElementKind::u64:
      return f(std::type_identity<std::uint64_t>{});
    case ElementKind::unsupported:
      break;
  }
  fail("checkpoint", {"a value has no type"}, "load another file");
}

LOCKSTEP_INLINE std::string number_digits(ElementKind element, std::string_view bytes) {
  return with_number(element, [&]<class T>(std::type_identity<T>) { return digits_of<T>(bytes); });
}

LOCKSTEP_INLINE std::string number_of_digits(ElementKind element, std::string_view digits) {
  return with_number(element, [&]<class T>(std::type_identity<T>) { return of_digits<T>(digits); });
}

}  // namespace detail

}  // namespace lockstep
