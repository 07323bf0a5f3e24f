// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of strategy/ that are no templates.

#include "lockstep/core/text.hpp"
#include "lockstep/strategy/agreement.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void describe(std::string& text, std::string_view role, std::string_view name,
                              const TensorInfo& info) {
  text += detail::text({role, " ", name, " ", element_name(info.element)});
  for (std::size_t j = 0; j != info.rank; ++j) {
    text += detail::text({j == 0 ? " " : " x ", info.extents[j]});
  }
  text += info.is_frozen ? " frozen\n" : "\n";
}

LOCKSTEP_INLINE std::string_view line_at(std::string_view text, std::size_t number) {
  for (; number != 0 && text.find('\n') != std::string_view::npos; --number)
    text.remove_prefix(text.find('\n') + 1);
  return text.empty() ? "nothing more" : text.substr(0, text.find('\n'));
}

LOCKSTEP_INLINE void fail_agreement(const std::string& first_job, const std::string& other_job,
                                    std::size_t other, Rank me) {
  std::size_t line = 0;
  while (line_at(first_job, line) == line_at(other_job, line) &&
         line_at(first_job, line) != "nothing more") {
    ++line;
  }
  fail("DDP",
       {"ranks have different jobs: rank 0 has \"", line_at(first_job, line), "\" and rank ", other,
        " has \"", line_at(other_job, line), "\""},
       "start the same program with the same settings on all ranks", me);
}

}  // namespace lockstep::detail
