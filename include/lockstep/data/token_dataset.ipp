// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `token_dataset.hpp`.

#include <initializer_list>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/data/npy.hpp"
#include "lockstep/data/token_dataset.hpp"

namespace lockstep::detail {

[[noreturn, gnu::cold]] LOCKSTEP_INLINE void fail_tokens(const std::string& path,
                                                         std::initializer_list<Word> problem,
                                                         std::string_view advice) {
  fail("TokenDataset", {"'", path, "'", text(problem)}, advice);
}

/// The byte at which the tokens of a file begin.
LOCKSTEP_INLINE std::size_t begin_of_tokens(const MappedFile& file, ElementKind token,
                                            std::size_t header_bytes) {
  // Read as plain tokens, the header of a .npy file would be tokens that nobody wrote.
  if (header_bytes != 0 || !is_npy(file.bytes())) return header_bytes;
  const NpyHeader header = parse_npy(file.bytes(), file.path());
  if (header.kind != token) fail_npy_kind(file.path(), header.kind, token, "read as tokens of");
  if (header.shape.size() != 1)
    fail_tokens(file.path(), {" has shape ", npy_shape_text(header.shape)},
                "save tokens with one axis");
  return header.begin;
}

/// How many tokens a file has from `begin` on.
LOCKSTEP_INLINE std::size_t count_tokens(const MappedFile& file, std::size_t begin,
                                         std::size_t token_bytes) {
  const std::size_t size = file.size();
  if (begin % token_bytes != 0)
    fail_tokens(file.path(), {": tokens of ", token_bytes, " bytes cannot begin at byte ", begin},
                "check header_bytes");
  if (size < begin)
    fail_tokens(file.path(),
                {" ends at byte ", size, ", and its header should have ", begin, " bytes"},
                "check header_bytes, or copy the file again");
  if ((size - begin) % token_bytes != 0)
    fail_tokens(file.path(),
                {" ends at byte ", size, ", within a token: from byte ", begin, " on, each has ",
                 token_bytes, " bytes"},
                "copy the file again, or ask for tokens of the type that was written");
  return (size - begin) / token_bytes;
}

LOCKSTEP_INLINE TokenFiles::TokenFiles(std::span<const std::string> paths, ElementKind token,
                                       std::size_t length, const TokenOptions& options) {
  if (length == 0)
    fail("TokenDataset", {"windows of no tokens"}, "give the number of tokens that a model reads");
  if (paths.empty()) fail("TokenDataset", {"no files"}, "give the path of one, or of several");
  const std::size_t token_bytes = element_size(token);
  const std::size_t stride = options.stride == 0 ? length : options.stride;
  stride_bytes_ = stride * token_bytes;
  for (const std::string& path : paths) {
    auto file = std::make_shared<const MappedFile>(path, options.access, "TokenDataset");
    const std::size_t begin = begin_of_tokens(*file, token, options.header_bytes);
    const std::size_t tokens = count_tokens(*file, begin, token_bytes);
    if (tokens <= length)
      fail_tokens(path, {" has ", tokens, " tokens, and a window needs ", length, " and one more"},
                  "ask for shorter windows, or check that this is the file");
    files_.push_back({std::move(file), begin, windows_});
    windows_ += (tokens - length - 1) / stride + 1;
  }
}

LOCKSTEP_INLINE void TokenFiles::fail_window(std::size_t window) const {
  fail("TokenDataset",
       {"there is no window ", window, ": '", files_.front().file->path(),
        files_.size() == 1 ? "' has " : "' and those behind it have ", windows_},
       "ask for windows below their number");
}

LOCKSTEP_INLINE void fail_token(const std::string& path, std::size_t place, std::int64_t token,
                                std::uint64_t vocabulary) {
  fail("TokenDataset",
       {"'", path, "', byte ", place, ": token ", token, " in a vocabulary of ", vocabulary},
       "check the type of the tokens, header_bytes and the vocabulary of the model");
}

}  // namespace lockstep::detail
