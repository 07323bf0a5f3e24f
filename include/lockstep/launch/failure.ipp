// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `failure.hpp`.

#include <cstdint>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/failure.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE Failure Failure::of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return {error.operation(), error.problem(), error.advice(), error.rank(),
            error.is_consequence()};
  } catch (const std::exception& error) {
    return {"", error.what(), "", std::nullopt, false};
  } catch (...) {
    return {"", "an exception that is no std::exception", "", std::nullopt, false};
  }
}

LOCKSTEP_INLINE std::string Failure::text(std::optional<Rank> self) const {
  const std::optional<Rank> named = rank ? rank : self;
  if (!operation.empty()) return Error(operation, problem, advice, named).what();
  if (!named) return detail::text({"lockstep: ", problem});
  return detail::text({"lockstep: rank ", *named, ": ", problem});
}

LOCKSTEP_INLINE std::string Failure::bytes() const {
  return store_protocol::Writer{}
      .text(operation)
      .text(problem)
      .text(advice)
      .byte(rank ? 1 : 0)
      .u32(rank ? static_cast<std::uint32_t>(rank->value()) : 0)
      .byte(consequence ? 1 : 0)
      .bytes();
}

LOCKSTEP_INLINE std::optional<Failure> Failure::from_bytes(std::string_view bytes) {
  store_protocol::Reader said(bytes);
  Failure failure;
  failure.operation = said.text();
  failure.problem = said.text();
  failure.advice = said.text();
  const bool named = said.byte() != 0;
  const Rank rank{said.u32()};
  if (named) failure.rank = rank;
  failure.consequence = said.byte() != 0;
  if (!said.ok()) return std::nullopt;
  return failure;
}

}  // namespace lockstep::detail
