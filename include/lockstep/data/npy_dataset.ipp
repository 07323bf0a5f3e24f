// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `npy_dataset.hpp`.

#include <type_traits>

#include "lockstep/core/error.hpp"
#include "lockstep/data/npy_dataset.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE bool is_integer(ElementKind kind) { return kind >= ElementKind::i8; }

LOCKSTEP_INLINE void check_npy_labels(const NpyFile& inputs, const NpyFile& labels,
                                      ElementKind wanted) {
  const auto refuse = [](std::initializer_list<Word> problem, std::string_view advice) {
    fail("npy_dataset", problem, advice);
  };
  if (inputs.shape().empty() || inputs.bytes().empty() != (inputs.shape()[0] == 0)) {
    refuse({"'", inputs.path(), "' has shape ", npy_shape_text(inputs.shape()), ", which is no ",
            "number of rows"},
           "save inputs of shape (samples, ...), with at least one element in a sample");
  }
  const auto& shape = labels.shape();
  if (shape.empty() || shape.size() > 2 || (shape.size() == 2 && shape[1] != 1)) {
    refuse({"the labels in '", labels.path(), "' have shape ", npy_shape_text(shape)},
           "save one label for every sample: shape (samples,) or (samples, 1)");
  }
  if (shape[0] != inputs.shape()[0]) {
    refuse({"'", inputs.path(), "' has ", inputs.shape()[0], " rows and '", labels.path(), "' ",
            shape[0], " labels"},
           "give files of the same set");
  }
  if (labels.kind() != wanted && !(is_integer(labels.kind()) && is_integer(wanted)))
    fail_npy_kind(labels.path(), labels.kind(), wanted, "to be labels of");
}

/// Calls `f` with a null pointer to the integer type of a kind.
template <class F>
auto with_integer(ElementKind kind, const F& f) {
  switch (kind) {
    case ElementKind::i8:
      return f(static_cast<std::int8_t*>(nullptr));
    case ElementKind::i16:
      return f(static_cast<std::int16_t*>(nullptr));
    case ElementKind::i32:
      return f(static_cast<std::int32_t*>(nullptr));
    case ElementKind::u8:
      return f(static_cast<std::uint8_t*>(nullptr));
    case ElementKind::u16:
      return f(static_cast<std::uint16_t*>(nullptr));
    case ElementKind::u32:
      return f(static_cast<std::uint32_t*>(nullptr));
    case ElementKind::u64:
      return f(static_cast<std::uint64_t*>(nullptr));
    default:
      return f(static_cast<std::int64_t*>(nullptr));
  }
}

LOCKSTEP_INLINE std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element) {
  return with_integer(file.kind(), [&]<class T>(T*) -> std::optional<std::int64_t> {
    T value;
    std::memcpy(&value, file.bytes().data() + element * sizeof(T), sizeof(T));
    if (!std::in_range<std::int64_t>(value)) return std::nullopt;
    return static_cast<std::int64_t>(value);
  });
}

LOCKSTEP_INLINE void fail_npy_label(const NpyFile& file, std::size_t sample, ElementKind wanted) {
  const std::optional<std::int64_t> value = npy_integer(file, sample);
  const std::string number = value ? text({*value}) : std::string("above 9223372036854775807");
  fail("npy_dataset",
       {"'", file.path(), "', byte ", file.place_of(sample), ": the label of sample ", sample,
        " is ", number, ", which ", element_name(wanted), " does not hold"},
       "ask for labels of a wider type, or check that these are labels");
}

}  // namespace lockstep::detail
