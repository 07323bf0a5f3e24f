// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `log_fields.hpp`.

#include "lockstep/core/error.hpp"
#include "lockstep/trainer/log_fields.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void LogFields::move_to(JsonLine& record) {
  for (const auto& [name, field] : fields_) record.add(field);
  fields_.clear();
}

LOCKSTEP_INLINE void LogFields::put(std::string_view name, JsonLine field) {
  for (const std::string_view own :
       {"epoch", "epochs", "steps", "samples", "seconds", "loss", "lr", "data_seconds",
        "step_seconds", "evaluate_seconds", "epoch_seconds", "run"}) {
    if (name == own) {
      fail("log_field", {"'", name, "' is a field that lockstep writes"}, "give it another name",
           Rank{0});
    }
  }
  for (auto& [known, value] : fields_) {
    if (known == name) {
      value = std::move(field);
      return;
    }
  }
  fields_.emplace_back(name, std::move(field));
}

}  // namespace lockstep::detail
