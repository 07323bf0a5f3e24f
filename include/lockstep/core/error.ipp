// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `error.hpp`.

#include "lockstep/core/error.hpp"

namespace lockstep {

namespace detail {

LOCKSTEP_INLINE std::string error_sentence(std::string_view operation, std::string_view problem,
                                           std::string_view advice, std::optional<Rank> rank) {
  // What a name of a file or a tensor contains must not end the text. Messages of other libraries
  // have several lines.
  return printable(text({"lockstep: ", rank ? text({"rank ", *rank, ", "}) : std::string(),
                         operation, ": ", problem, "; ", advice}),
                   "\n\t");
}

LOCKSTEP_INLINE void fail(std::string_view operation, std::initializer_list<Word> problem,
                          std::string_view advice, std::optional<Rank> rank) {
  throw Error(operation, text(problem), advice, rank);
}

LOCKSTEP_INLINE void fail_check(std::string_view advice, const char* file, int line) {
  throw Error(text({file, ":", line}), "a condition does not hold", advice);
}

}  // namespace detail

LOCKSTEP_INLINE Error::Error(std::string_view operation, std::string_view problem,
                             std::string_view advice, std::optional<Rank> rank)
    : std::runtime_error(detail::error_sentence(operation, problem, advice, rank)),
      operation_(operation),
      problem_(problem),
      advice_(advice),
      rank_(rank) {}

LOCKSTEP_INLINE Error::Error(const Error& other) = default;
LOCKSTEP_INLINE Error::~Error() = default;

LOCKSTEP_INLINE Error Error::on(Rank rank) const {
  Error error(operation_, problem_, advice_, rank);
  error.consequence_ = consequence_;
  return error;
}

LOCKSTEP_INLINE Error Error::as_consequence() const {
  Error error = *this;
  error.consequence_ = true;
  return error;
}

}  // namespace lockstep
