// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `kept_values.hpp`.

#include <algorithm>

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

}  // namespace detail

}  // namespace lockstep
