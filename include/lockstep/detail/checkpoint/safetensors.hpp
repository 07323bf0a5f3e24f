// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The safetensors format: a reader that checks everything, and an atomic writer.

#include <bit>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/json.hpp"

namespace lockstep::detail {

static_assert(std::endian::native == std::endian::little,
              "lockstep: safetensors files are little-endian, and this machine is not");

/// Python's reader rejects longer headers, too.
inline constexpr std::uint64_t most_header_bytes = 100'000'000;

/// An element type of the format; tensors of `unsupported` kinds other than BOOL are not loaded.
struct FileElement {
  std::string_view name;
  ElementKind kind;
  unsigned bits;
};

/// The type of this name or kind; null where the format has none.
const FileElement* file_element(std::string_view name);
const FileElement* file_element(ElementKind kind);

/// "[4, 3]", as Python writes it.
inline std::string shape_text(std::span<const std::uint64_t> shape) {
  return text({"[", joined(shape), "]"});
}

[[noreturn, gnu::cold]] void fail_damaged(std::string_view path, std::string_view problem);

/// A written file, as the index of a checkpoint's main file describes its shards.
struct ShardFile {
  std::string name;  // in the folder of the main file
  std::uint64_t bytes = 0;
  std::uint64_t digest = 0;  // of the header, which holds the checksums of the tensors
  std::size_t rank = 0;      // which rank writes it
};

struct FileToWrite;

struct TensorEntry {
  std::string name;
  const FileElement* element = nullptr;
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 0;  // of elements
  std::uint64_t begin = 0;  // in the file
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> checksum = std::nullopt;

  ElementKind kind() const { return element->kind; }
};

/// Opens a file and checks its header, for lockstep's files also the header's checksum. Data is
/// read with pread, not mapped: truncating the file causes an error, not SIGBUS.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }

  /// All tensors, sorted by name.
  std::span<const TensorEntry> tensors() const { return tensors_; }
  const TensorEntry* find(std::string_view name) const;

  const std::string* metadata(std::string_view key) const;

  /// The 'lockstep' metadata entry; an empty object for other programs' files.
  JsonEntry facts() const { return {facts_, path_}; }
  bool is_lockstep() const { return digest_.has_value(); }

  /// The checksum of the header, by which an index names a file; none for other programs' files.
  std::optional<std::uint64_t> digest() const { return digest_; }

  /// Reads bytes of a tensor from its byte `first_byte` on. Thread-safe.
  void read(const TensorEntry& tensor, std::uint64_t first_byte, std::span<std::byte> to) const;

  /// Throws an error that names the first tensor whose data does not match its checksum, if any.
  void verify() const {
    for (const TensorEntry& tensor : tensors_) verify(tensor);
  }
  void verify(const TensorEntry& tensor) const;

 private:
  friend ShardFile write_file(const std::string& path, const FileToWrite& file);

  /// Checks the header of a file of `bytes` bytes that is about to be written.
  SafetensorsFile(const std::string& path, std::string_view header, std::uint64_t bytes)
      : path_(path), bytes_(bytes) {
    require_length(header.size() - 8);
    parse(header);
  }

  [[noreturn, gnu::cold]] void damaged(std::initializer_list<TextPart> problem) const {
    fail_damaged(path_, text(problem));
  }
  void read_bytes(std::uint64_t offset, std::span<std::byte> to) const;
  void require_length(std::uint64_t length) const;
  void parse(std::string_view header);
  TensorEntry parse_tensor(const JsonEntry& entry, const std::string& name) const;
  void check_offsets(std::uint64_t data_begin);
  void take_facts(std::string_view header);

  std::string path_;
  Descriptor file_;
  std::uint64_t bytes_ = 0;
  std::vector<TensorEntry> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  Json facts_{Json::Object()};
  std::optional<std::uint64_t> digest_;
};

/// The data is written in place and must not change until `write_file` returns. Where the host
/// cannot read it, `data` has a size and no address, and `read` returns it in chunks.
struct TensorToWrite {
  std::string name;
  ElementKind kind;
  std::vector<std::uint64_t> shape;
  std::span<const std::byte> data;
  /// `bytes` (at most `write_chunk_bytes`) of the data from byte `at` on, until the next call.
  std::function<std::span<const std::byte>(std::uint64_t at, std::size_t bytes)> read{};
  /// The format's name of a type whose kind is `unsupported`, such as "BOOL".
  std::string_view type{};

  /// Null where the format has no such type.
  const FileElement* element() const {
    return kind == ElementKind::unsupported ? file_element(type) : file_element(kind);
  }
};

struct FileToWrite {
  std::vector<TensorToWrite> tensors;
  /// The 'lockstep' entry; `write_file` adds `header` and `checksums`.
  JsonLine facts;
  /// Entries for other programs, in addition to "format", "writer" and "lockstep".
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Writes a temporary beside `path`, syncs it, renames it to `path` and syncs the folder. On an
/// error the temporary is removed and the file at `path` is unchanged.
ShardFile write_file(const std::string& path, const FileToWrite& file);

}  // namespace lockstep::detail
