// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Writes a safetensors file so that, whatever happens, there is the old file or the new one.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/json.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// The data is written from where it is: it stays as it is until `write_file` returns. Where the
/// host cannot read it, `data` has a size and no address, and `read` gives it piece by piece, of at
/// most `write_chunk_bytes`.
struct TensorToWrite {
  std::string name;
  ElementKind kind;
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> data;
  /// So many bytes of the data, from byte `at` on; valid until the next call.
  std::function<std::span<const std::byte>(std::uint64_t at, std::size_t bytes)> read{};
  /// The format's name of a type that has no kind, such as "BOOL"; the kind is `unsupported` then.
  std::string_view type{};

  /// The elements in the file; null where the format has no such.
  const FileElement* element() const {
    return kind == ElementKind::unsupported ? file_element(type) : file_element(kind);
  }
};

struct FileToWrite {
  std::vector<TensorToWrite> tensors;
  /// The 'lockstep' entry, an object; `header` and `checksums` are the writer's.
  Json facts = Json::object();
  /// Entries for other programs, beside "format", "writer" and "lockstep".
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// What an index says of a file: its digest is the checksum of its header, which holds those of
/// its tensors.
struct WrittenFile {
  std::uint64_t bytes;
  std::uint64_t digest;
};

/// Writes a temporary beside `path`, syncs it, renames it to `path` and syncs the folder. Throws an
/// error in words, with the temporary removed and what was at `path` untouched.
WrittenFile write_file(const std::string& path, const FileToWrite& file);

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/write_file.ipp"
#endif
