// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Why a rank ended with an exception, as it tells its launcher.
///
/// A rank does not print this itself: whoever watches all ranks knows which failure was the first,
/// and shows that one, once, ahead of those it has caused.

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/store_protocol.hpp"

namespace lockstep {

struct Failure {
  /// As in `Error`; all but the problem are empty for an exception that is none.
  std::string operation;
  std::string problem;
  std::string advice;
  std::optional<Rank> rank;
  /// Another rank knows the reason.
  bool consequence = false;

  static Failure of(const std::exception_ptr& thrown) {
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

  /// What a user reads. `self` is the rank that failed, where the error names none.
  std::string text(std::optional<Rank> self) const {
    const std::optional<Rank> named = rank ? rank : self;
    if (!operation.empty()) return Error(operation, problem, advice, named).what();
    return "lockstep: " + (named ? "rank " + std::to_string(named->value()) + ": " : "") + problem;
  }

  std::string bytes() const {
    return store_protocol::Writer{}
        .text(operation)
        .text(problem)
        .text(advice)
        .byte(rank ? 1 : 0)
        .u32(rank ? static_cast<std::uint32_t>(rank->value()) : 0)
        .byte(consequence ? 1 : 0)
        .bytes();
  }

  /// Nothing where a rank ended before it had said all of it.
  static std::optional<Failure> from_bytes(std::string_view bytes) {
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
};

}  // namespace lockstep
