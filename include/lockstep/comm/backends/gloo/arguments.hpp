// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What a call is given: told to the other ranks, or an error here and now.

#include <cstddef>
#include <span>
#include <string_view>
#include <type_traits>

#include "lockstep/comm/call.hpp"
#include "lockstep/comm/call_arguments.hpp"
#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::over_gloo {

inline CallArguments arguments(const Engine& engine) {
  return {engine.rank(), WorldSize{engine.world()}};
}

/// The call as the others will compare it.
template <class U>
Call describe(const Engine& engine, CollectiveKind kind, std::span<U> data, Rank root,
              std::string_view operation = "") {
  using T = std::remove_const_t<U>;
  arguments(engine).check<T>(kind, root);
  return make_call<T>(kind, data.size(), false, root.value(), operation);
}

inline void check_size(const Engine& engine, const Call& call, std::size_t have, std::size_t want) {
  arguments(engine).check_size(call, have, want);
}

inline void check_peer(const Engine& engine, const char* operation, Rank peer) {
  arguments(engine).check_peer(operation, peer);
}

}  // namespace lockstep::over_gloo
