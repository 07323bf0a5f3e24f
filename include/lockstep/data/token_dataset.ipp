// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `token_dataset.hpp`.

#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/data/npy.hpp"
#include "lockstep/data/token_dataset.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE TokenFile::TokenFile(const std::string& path, ElementKind token,
                                     std::size_t length, const TokenOptions& options)
    : file(std::make_shared<const MappedFile>(path, options.access, "TokenDataset")),
      begin(options.header_bytes),
      token_bytes(element_size(token)),
      stride(options.stride == 0 ? length : options.stride),
      windows(0) {
  const auto refuse = [&](std::initializer_list<Word> problem, std::string_view advice) {
    fail("TokenDataset", {"'", path, "'", text(problem)}, advice);
  };
  if (length == 0)
    refuse({": windows of no tokens are asked for"}, "give the number of tokens that a model reads");
  // Read as plain tokens, the header of a .npy file would be tokens that nobody wrote.
  if (options.header_bytes == 0 && is_npy(file->bytes())) {
    const NpyHeader header = parse_npy(file->bytes(), path);
    if (header.kind != token) fail_npy_kind(path, header.kind, token, "read as tokens of");
    if (header.shape.size() != 1)
      refuse({" has shape ", npy_shape_text(header.shape)}, "save tokens with one axis");
    begin = header.begin;
  }
  const std::size_t size = file->size();
  if (begin % token_bytes != 0)
    refuse({": tokens of ", token_bytes, " bytes cannot begin at byte ", begin},
           "check header_bytes");
  if (size < begin)
    refuse({" ends at byte ", size, ", and its header should have ", begin, " bytes"},
           "check header_bytes, or copy the file again");
  if ((size - begin) % token_bytes != 0)
    refuse({" ends at byte ", size, ", within a token: from byte ", begin, " on, each has ",
            token_bytes, " bytes"},
           "copy the file again, or ask for tokens of the type that was written");
  const std::size_t tokens = (size - begin) / token_bytes;
  if (tokens <= length)
    refuse({" has ", tokens, " tokens, and a window needs ", length, " and one more"},
           "ask for shorter windows, or check that this is the file");
  windows = (tokens - length - 1) / stride + 1;
}

LOCKSTEP_INLINE void fail_window(const std::string& path, std::size_t window,
                                 std::size_t windows) {
  fail("TokenDataset", {"there is no window ", window, " in '", path, "', which has ", windows},
       "ask for windows below their number");
}

LOCKSTEP_INLINE void fail_token(const std::string& path, std::size_t place, std::int64_t token,
                                std::uint64_t vocabulary) {
  fail("TokenDataset",
       {"'", path, "', byte ", place, ": token ", token, " in a vocabulary of ", vocabulary},
       "check the type of the tokens, header_bytes and the vocabulary of the model");
}

}  // namespace lockstep::detail
