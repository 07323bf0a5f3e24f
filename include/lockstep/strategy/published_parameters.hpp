// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How ranks get the parameters that other ranks have updated.

#include <cstddef>
#include <type_traits>

#include "lockstep/strategy/parameter_gathers.hpp"

namespace lockstep::detail {

/// Every rank updates all parameters by itself.
struct NothingPublished {
  constexpr NothingPublished(const auto&, const auto&, std::byte*) {}
};

template <class Traits, class Comm>
using PublishedParameters =
    std::conditional_t<Traits::shards, ParameterGathers<Traits, Comm>, NothingPublished>;

}  // namespace lockstep::detail
