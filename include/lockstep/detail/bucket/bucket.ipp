// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Lists of tensors and their plan at run time.

#include "lockstep/detail/bucket/layout.hpp"

LOCKSTEP_COLD_BEGIN

namespace lockstep {

LOCKSTEP_INLINE void TensorList::check() const {
  std::vector<std::string_view> names(roles_[0].names.begin(), roles_[0].names.end());
  if (names.empty()) throw Error("tensors", "the model lists no parameter", "list one at least");
  names.insert(names.end(), roles_[1].names.begin(), roles_[1].names.end());
  for (const detail::NameAlias& alias : aliases_)
    require(std::find(names.begin(), names.end(), alias.of) != names.end(), alias.name,
            "is another name of a tensor that is not listed", "list that one first");
  for (const detail::NameAlias& alias : aliases_) names.push_back(alias.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  require(twin == names.end(), twin == names.end() ? "" : std::string(*twin), "is listed twice",
          "give every parameter and buffer a name of its own");
}

LOCKSTEP_INLINE void TensorList::require(bool ok, const std::string& name, const char* problem,
                                         const char* advice) {
  if (!ok) throw Error("tensors", "tensor '" + name + "' " + problem, advice);
}

LOCKSTEP_INLINE void TensorList::add(detail::TensorRole role, std::string name, ElementKind element,
                                     const std::vector<std::size_t>& extents) {
  require(!name.empty(), name, "has no name", "give every tensor one");
  require(std::find(kinds_.begin(), kinds_.end(), element) != kinds_.end(), name,
          "has an element type that the model's Elements do not list", "add it there");
  require(extents.size() <= detail::max_tensor_rank, name, "has more than eight extents",
          "merge some");
  detail::TensorInfo info{element, extents.size(), {}};
  std::copy(extents.begin(), extents.end(), info.extents.begin());
  require(info.bytes() != detail::too_large, name, "is larger than memory can be",
          "check its extents");
  of(role).infos.push_back(info);
  of(role).names.push_back(std::move(name));
}

namespace detail {

LOCKSTEP_INLINE BucketPlan<dynamic> plan_at_run_time(
    std::span<const TensorInfo> tensors, BucketLimits limits,
    FunctionRef<bool(std::size_t)> is_frozen, std::size_t room,
    FunctionRef<std::string_view(std::size_t)> unit_of) {
  return make_bucket_plan<dynamic>(tensors, limits, is_frozen, room, unit_of);
}

}  // namespace detail

}  // namespace lockstep

LOCKSTEP_COLD_END
