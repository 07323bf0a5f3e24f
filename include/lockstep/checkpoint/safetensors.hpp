// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The safetensors format: its limits and element types, a file that is read, of which
/// everything is checked before it is believed, and a file that is written as a whole or not at
/// all.

#include <bit>
#include <initializer_list>

#include "lockstep/core/element.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

static_assert(std::endian::native == std::endian::little,
              "lockstep: safetensors files are little-endian, and this machine is not");

/// A longer header is refused, as Python's reader refuses it.
inline constexpr std::uint64_t most_header_bytes = 100'000'000;

/// An element type of the format. `kind` is `unsupported` where no tensor of lockstep's holds it:
/// such tensors are listed and checked, and an error if they are wanted.
struct FileElement {
  std::string_view name;
  ElementKind kind;
  unsigned bits;
};

/// The type of this name, or of this kind; null where the format has none.
const FileElement* file_element(std::string_view name);
const FileElement* file_element(ElementKind kind);

/// The product of sizes that a file claims; nothing where it does not fit.
std::optional<std::uint64_t> product_of(std::span<const std::uint64_t> sizes);

/// "[4, 3]", as Python writes it.
std::string shape_text(std::span<const std::uint64_t> shape);

/// Throws: what is wrong with the contents of a file.
[[noreturn, gnu::cold]] void fail_damaged(std::string_view path, std::string_view problem);

/// What an index says of a file: its digest is the checksum of its header, which holds those of
/// its tensors.
struct WrittenFile {
  std::uint64_t bytes;
  std::uint64_t digest;
};

struct FileToWrite;

/// A tensor of a file.
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

/// Opens a file and checks its header: that it is whole and means what it says, whoever wrote it.
/// A header that lockstep wrote is checked by its own checksum too. The data is read when it is
/// asked for; nothing is mapped into memory, so that a file which is cut while it is read is an
/// error and no signal.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  std::uint64_t bytes() const { return bytes_; }

  /// All tensors, by name.
  std::span<const TensorEntry> tensors() const { return tensors_; }
  /// The tensor of this name, or null.
  const TensorEntry* find(std::string_view name) const;

  /// The text of a metadata entry, or null.
  const std::string* metadata(std::string_view key) const;

  /// What lockstep has written about the file: its 'lockstep' entry; an empty object for files of
  /// other programs.
  JsonEntry facts() const { return {facts_, path_}; }
  bool is_lockstep() const { return digest_.has_value(); }

  /// The checksum of the header, by which an index knows a file; none for other programs' files.
  std::optional<std::uint64_t> digest() const { return digest_; }

  /// Reads bytes of a tensor, from `first_byte` of it on. May be called by several threads.
  void read(const TensorEntry& tensor, std::uint64_t first_byte, std::span<std::byte> to) const;

  /// Reads everything and compares the checksums; throws an error that names the first tensor whose
  /// data is not what was written. Files of other programs have none.
  void verify() const;

  /// The same for one tensor.
  void verify(const TensorEntry& tensor) const;

 private:
  friend WrittenFile write_file(const std::string& path, const FileToWrite& file);

  /// Checks the header of a file of so many bytes that is about to be written.
  SafetensorsFile(const std::string& path, std::string_view header, std::uint64_t bytes)
      : path_(path), bytes_(bytes) {
    require_length(header.size() - 8);
    parse(header);
  }

  [[noreturn, gnu::cold]] void damaged(std::initializer_list<Word> problem) const;
  void read_bytes(std::uint64_t place, std::span<std::byte> to) const;
  void require_length(std::uint64_t length) const;
  void parse(std::string_view header);
  TensorEntry parse_tensor(const JsonEntry& entry, const std::string& name) const;
  void check_places(std::uint64_t data_begin);
  void take_facts(std::string_view header);

  std::string path_;
  Descriptor file_;
  std::uint64_t bytes_ = 0;
  std::vector<TensorEntry> tensors_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  Json facts_{Json::Object()};
  std::optional<std::uint64_t> digest_;
};

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
  /// The 'lockstep' entry; `header` and `checksums` are the writer's.
  JsonLine facts;
  /// Entries for other programs, beside "format", "writer" and "lockstep".
  std::vector<std::pair<std::string, std::string>> metadata;
};

/// Writes a temporary beside `path`, syncs it, renames it to `path` and syncs the folder. Throws an
/// error in words, with the temporary removed and what was at `path` untouched.
WrittenFile write_file(const std::string& path, const FileToWrite& file);

}  // namespace lockstep::detail
