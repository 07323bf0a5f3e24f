// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `stage_record.hpp`.

#include <charconv>
#include <cstddef>
#include <system_error>

#include "lockstep/core/checksum.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/data/stage_record.hpp"

namespace lockstep::detail {

inline constexpr std::string_view stage_record_title = "lockstep staged 1 ";
inline constexpr std::size_t stage_token_bytes = 17;     // and the end of the line
inline constexpr std::size_t stage_checksum_bytes = 17;  // likewise

LOCKSTEP_INLINE std::string stage_record(std::string_view identity, std::string_view facts,
                                         const std::vector<StagedFile>& files) {
  std::string record = text({stage_record_title, random_token(), "\n", identity, "\n", facts});
  for (const StagedFile& file : files)
    record += text({file.bytes, " ", file.time, " ", checksum_text(file.checksum), "\n"});
  record += text({checksum_text(Checksum().add(record).value()), "\n"});
  return record;
}

/// What is between the first line of a record and its checksum; nothing where it is damaged.
LOCKSTEP_INLINE std::optional<std::string_view> record_body(std::string_view record) {
  const std::size_t front = stage_record_title.size() + stage_token_bytes;
  if (!record.starts_with(stage_record_title) || record.size() < front + stage_checksum_bytes)
    return std::nullopt;
  const std::string_view checked = record.substr(0, record.size() - stage_checksum_bytes);
  const std::string_view digits = record.substr(checked.size(), stage_checksum_bytes - 1);
  if (checksum_from(digits) != Checksum().add(checked).value()) return std::nullopt;
  return checked.substr(front);
}

LOCKSTEP_INLINE std::optional<std::string> identity_in(std::string_view record) {
  const std::optional<std::string_view> body = record_body(record);
  if (!body) return std::nullopt;
  return std::string(body->substr(0, body->find('\n')));
}

LOCKSTEP_INLINE std::optional<std::vector<StagedFile>> staged_files_in(std::string_view record,
                                                                       std::string_view identity,
                                                                       std::string_view facts) {
  const std::optional<std::string_view> body = record_body(record);
  const std::string expected = text({identity, "\n", facts});
  if (!body || !body->starts_with(expected)) return std::nullopt;
  std::vector<StagedFile> files;
  const char* at = body->data() + expected.size();
  const char* const end = body->data() + body->size();
  while (at != end) {
    StagedFile file{};
    const auto bytes = std::from_chars(at, end, file.bytes);
    if (bytes.ec != std::errc{} || bytes.ptr == end || *bytes.ptr != ' ') return std::nullopt;
    const auto time = std::from_chars(bytes.ptr + 1, end, file.time);
    if (time.ec != std::errc{} || end - time.ptr < 18) return std::nullopt;
    const std::optional<std::uint64_t> sum = checksum_from({time.ptr + 1, 16});
    if (!sum) return std::nullopt;
    file.checksum = *sum;
    files.push_back(file);
    at = time.ptr + 18;
  }
  return files;
}

}  // namespace lockstep::detail
