// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Python's values as LibTorch has them: dictionaries, lists and numbers in a `c10::IValue`.

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace lockstep::detail {

using PythonDict = c10::impl::GenericDict;
using PythonList = c10::impl::GenericList;
inline PythonDict make_dict() { return PythonDict(c10::AnyType::get(), c10::AnyType::get()); }
/// As the type of the keys is in a file, a state_dict's are texts.
inline PythonDict string_dict() { return PythonDict(c10::StringType::get(), c10::AnyType::get()); }
inline PythonList make_list() { return PythonList(c10::AnyType::get()); }

/// The entry of a dictionary, or null.
inline const c10::IValue* find_entry(const PythonDict& in, const c10::IValue& key) {
  const auto found = in.find(key);
  return found == in.end() ? nullptr : &found->value();
}
/// The same where the entry is a dictionary.
inline std::optional<PythonDict> find_dict(const PythonDict& in, const c10::IValue& key) {
  const c10::IValue* const found = find_entry(in, key);
  return found != nullptr && found->isGenericDict() ? std::optional(found->toGenericDict())
                                                    : std::nullopt;
}

/// The elements of a tuple or a list; nothing for other values.
inline std::optional<c10::ArrayRef<c10::IValue>> elements_of(const c10::IValue& value) {
  if (value.isTuple()) return value.toTupleRef().elements();
  if (value.isList()) return value.toListRef();
  return std::nullopt;
}

/// A number, which Python may have in a tensor: a learning rate, or a step.
inline std::optional<at::Scalar> scalar_of(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1)
    return value.toTensor().item();
  if (value.isDouble() || value.isInt() || value.isBool()) return value.toScalar();
  return std::nullopt;
}

}  // namespace lockstep::detail
