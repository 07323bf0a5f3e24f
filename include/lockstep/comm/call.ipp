// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `call.hpp`.

#include "lockstep/comm/call.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE std::string Call::text() const {
  if (part_of == JobCall::none) return collective_text();
  const std::string_view job_call = job_call_names[static_cast<std::size_t>(part_of)];
  return detail::text({job_call, " (its ", collective_text(), ")"});
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
