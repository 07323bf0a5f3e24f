// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every meeting of a job's ranks has a name of its own in the store.

#include <string>
#include <string_view>

#include "lockstep/core/strong.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/launch/store.hpp"

namespace lockstep::detail {

/// `name` and a number, from 1: the second communicator of one name must not find the keys of the
/// first. Each rank counts its own meetings; all ranks make communicators of one name in the same
/// order.
inline std::string numbered_meeting(Store& store, Rank rank, std::string_view backend,
                                    std::string_view name) {
  const std::string counter = text({"lockstep/", backend, "/", name, "/joined/", rank.value()});
  return text({name, ".", static_cast<std::size_t>(store.add(counter, 1))});
}

}  // namespace lockstep::detail
