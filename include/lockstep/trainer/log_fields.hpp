// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a program adds to the record of an epoch.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/macros.hpp"
#include "lockstep/observe/json_line.hpp"

namespace lockstep::detail {

/// Fields in the order in which their names were first used, each with its last value.
class LogFields {
 public:
  template <JsonScalar T>
  void set(std::string_view name, const T& value) {
    put(name, JsonLine().add(name, value));
  }

  /// Appends all fields to a record, and forgets them.
  void move_to(JsonLine& record);

 private:
  /// Throws where the name is that of a field of lockstep's own.
  void put(std::string_view name, JsonLine field);

  std::vector<std::pair<std::string, JsonLine>> fields_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/trainer/log_fields.ipp"
#endif
