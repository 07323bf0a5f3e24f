// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The errors of norms.

#include <cstddef>
#include <string_view>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Throws the error about a tensor with another extent than the layer has features.
[[noreturn, gnu::cold]] void refuse_features(std::string_view layer, std::size_t given,
                                             std::size_t features);
/// Throws the error about two views of a layer that have different shapes.
[[noreturn, gnu::cold]] void refuse_shapes(std::string_view layer);
/// Throws the error about a backward pass of which there was no forward pass.
[[noreturn, gnu::cold]] void refuse_backward(std::string_view layer);
/// Throws the error about two views of one memory, of which the second call reads what the first
/// has written.
[[noreturn, gnu::cold]] void refuse_same_memory(std::string_view layer, std::string_view views,
                                                std::string_view cure);
/// Throws the error about a channel with one value, whose variance trains nothing.
[[noreturn, gnu::cold]] void refuse_single_value(std::string_view layer);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/norm/refusals.ipp"
#endif
