// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `call.hpp`.

#include "lockstep/comm/call.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string job_call_text(JobCall call) {
  const auto bits = static_cast<std::uint32_t>(call);
  if (bits < static_cast<std::uint32_t>(JobCall::step_of_subgraphs))
    return std::string(job_call_names[bits]);
  std::string words = "step";
  for (std::uint32_t set = 0; set <= most_compared_subgraphs; ++set) {
    if ((bits >> set & 1) == 0) continue;
    words.append(words == "step" ? " of " : " and ");
    words.append(set == 0 ? std::string("the whole model") : detail::text({"sub-graph ", set}));
  }
  return words;
}

LOCKSTEP_INLINE std::string Call::text() const {
  if (part_of == JobCall::none) return collective_text();
  return detail::text({job_call_text(part_of), " (its ", collective_text(), ")"});
}

LOCKSTEP_INLINE std::string Call::collective_text() const {
  const std::string_view name = collective_name(kind);
  const char* const of = operation[0] != '\0' ? " of " : "";
  const char* other_rank = "";
  switch (kind) {
    case CollectiveKind::barrier:
    case CollectiveKind::capture:
      return detail::text({name, "()"});
    case CollectiveKind::replay:
      return detail::text({name, " of a captured step"});
    case CollectiveKind::new_group:
      return detail::text({name, "(", count, count == 1 ? " rank)" : " ranks)"});
    case CollectiveKind::all_gather_variable:
      return detail::text({name, "(", element_name(element), ")"});
    case CollectiveKind::gather_variable:
      return detail::text({name, "(", element_name(element), ", root ", root, ")"});
    case CollectiveKind::send:
      other_rank = ", to rank ";
      break;
    case CollectiveKind::receive:
      other_rank = ", from rank ";
      break;
    case CollectiveKind::reduce:
    case CollectiveKind::broadcast:
    case CollectiveKind::gather:
    case CollectiveKind::scatter:
      other_rank = ", root ";
      break;
    default:
      break;
  }
  return detail::text({name, "(", operation.data(), of, count, " ", element_name(element),
                       other_rank, *other_rank != '\0' ? detail::text({root}) : std::string(),
                       staged ? ", memory of its own)" : ")"});
}

}  // namespace lockstep::detail
