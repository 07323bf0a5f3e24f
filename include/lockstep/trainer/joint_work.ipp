// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `joint_work.hpp`.

#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/trainer/joint_work.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void append_sized(std::string& out, std::string_view piece) {
  const std::uint64_t size = piece.size();
  out.append(reinterpret_cast<const char*>(&size), sizeof size).append(piece);
}

LOCKSTEP_INLINE std::string_view take_sized(std::string_view& rest) {
  std::uint64_t size = 0;
  std::memcpy(&size, rest.data(), sizeof size);
  const std::string_view piece = rest.substr(sizeof size, size);
  rest.remove_prefix(sizeof size + size);
  return piece;
}

LOCKSTEP_INLINE std::string packed_error(std::string_view operation, std::string_view problem,
                                         std::string_view advice) {
  std::string packed = "!";
  for (const std::string_view piece : {operation, problem, advice}) append_sized(packed, piece);
  return packed;
}

LOCKSTEP_INLINE std::vector<std::string> work_together(const JointRanks& ranks,
                                                       std::string_view operation,
                                                       FunctionRef<std::string()> work) {
  std::string mine;
  try {
    mine.append(1, '.').append(work());
  } catch (const Error& error) {
    mine = packed_error(error.operation(), error.problem(), error.advice());
  } catch (const std::exception& error) {
    mine = packed_error(operation, error.what(), "see to that, and call it again");
  }
  std::vector<std::string> all = ranks.gather(std::move(mine));
  for (std::size_t rank = 0; rank != all.size(); ++rank) {
    if (all[rank].front() == '.') continue;
    std::string_view rest = std::string_view(all[rank]).substr(1);
    const std::string_view whose = take_sized(rest);
    const std::string_view problem = take_sized(rest);
    throw Error(whose, problem, take_sized(rest), Rank{rank});
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

LOCKSTEP_INLINE void require_same_path(const JointRanks& ranks, std::string_view operation,
                                       const std::vector<std::string>& paths) {
  for (std::size_t rank = 1; rank < paths.size(); ++rank) {
    if (paths[rank] == paths[0]) continue;
    fail(operation,
         {"ranks were given different paths: rank 0 has '", paths[0], "' and rank ", rank, " has '",
          paths[rank], "'"},
         "give all ranks the same path", ranks.rank);
  }
}

}  // namespace lockstep::detail
