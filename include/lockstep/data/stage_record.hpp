// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The file beside a copy that says what it is a copy of, and what its files were like when
/// it was made.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// A file of a copy. That it has the time of its source tells it from the file of an older copy,
/// and from one that was written to.
struct StagedFile {
  std::uint64_t bytes;
  std::int64_t time;
  std::uint64_t checksum;
};

/// The text of a record. `identity` is one line, the source's path with it; `facts` are the
/// source's. No two records are alike.
std::string stage_record(std::string_view identity, std::string_view facts,
                         const std::vector<StagedFile>& files);

/// The identity in a record; nothing where the record is damaged.
std::optional<std::string> identity_in(std::string_view record);

/// The files of a copy whose record has this identity and these facts; nothing where it has others.
std::optional<std::vector<StagedFile>> staged_files_in(std::string_view record,
                                                       std::string_view identity,
                                                       std::string_view facts);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/data/stage_record.ipp"
#endif
