// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `labelled_record.hpp`.

#include "lockstep/core/bytes.hpp"
#include "lockstep/data/labelled_record.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE LabelledRecord labelled_record(std::span<const std::byte> record, ElementKind input,
                                               ElementKind label) {
  constexpr const char* operation = "lmdb_dataset";
  LabelledRecord front;
  if (record.size() >= sizeof front) std::memcpy(&front, record.data(), sizeof front);
  if (record.size() < sizeof front || front.mark != LabelledRecord::own_mark) {
    fail(operation, {"it does not begin as the records of write_lmdb do, with 'LSR1'"},
         "give the function that decodes these records: lmdb_dataset<Sample>(path, decode)");
  }
  const auto is_known = [](ElementKind kind) {
    return kind != ElementKind::unsupported && static_cast<std::size_t>(kind) < element_kinds;
  };
  if (!is_known(front.input) || !is_known(front.label)) {
    fail(operation, {"its element types, at its bytes 4 and 5, are none that the library knows"},
         "write the set again, or read it with the version of lockstep that wrote it");
  }
  if (front.input != input || front.label != label) {
    fail(operation,
         {"it holds ", element_name(front.input), " inputs and ", element_name(front.label),
          " labels, and ", element_name(input), " and ", element_name(label), " are asked for"},
         "name the types that it holds: lmdb_dataset<X, Y>; `| map(f)` makes others of them");
  }
  const std::size_t inputs = saturating_product(front.width, element_size(input));
  const std::size_t room = record.size() - sizeof front;
  if (inputs != room) {
    fail(operation,
         {"it promises ", front.width, " inputs of ", element_size(input), " bytes, and has ", room,
          " bytes for them"},
         "write the set again");
  }
  if (std::bit_cast<std::uintptr_t>(record.data()) % element_size(input) != 0) {
    fail(operation, {"its inputs do not lie at a multiple of ", element_size(input), " bytes"},
         "write the set with write_lmdb, which sees to that");
  }
  return front;
}

}  // namespace lockstep::detail
