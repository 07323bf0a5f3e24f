// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A safetensors file that is read: everything it claims is checked before it is believed.

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/json.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

class JsonCursor;

/// A tensor of a file.
struct TensorEntry {
  std::string name;
  const FileElement* element = nullptr;
  std::vector<std::uint64_t> shape;
  std::uint64_t count = 0;  // of elements
  std::uint64_t begin = 0;  // in the file
  std::uint64_t bytes = 0;
  std::optional<std::uint64_t> checksum;

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

  /// All tensors, in the order of their data.
  std::span<const TensorEntry> tensors() const { return tensors_; }
  /// The tensor of this name, or null.
  const TensorEntry* find(std::string_view name) const;

  /// The text of a metadata entry, or null.
  const std::string* metadata(std::string_view key) const;

  /// What lockstep has written about the file: its 'lockstep' entry, without `header` and
  /// `checksums`; an empty object for files of other programs.
  JsonEntry facts() const { return {facts_, path_}; }
  bool is_lockstep() const { return digest_.has_value(); }

  /// The checksum of the header, by which an index knows a file; none for other programs' files.
  std::optional<std::uint64_t> digest() const { return digest_; }

  /// Reads bytes of a tensor, from `first_byte` of it on. May be called by several threads.
  void read(const TensorEntry& tensor, std::uint64_t first_byte, std::span<std::byte> to) const;

  /// Reads everything and compares the checksums; throws an error that names the first tensor whose
  /// data is not what was written. Files of other programs have none.
  void verify() const;

  /// The same for one tensor, through memory of the caller's; `verify_bytes` of it stay in a cache.
  void verify(const TensorEntry& tensor, std::span<std::byte> memory) const;
  static constexpr std::size_t verify_bytes = std::size_t{256} << 10;

 private:
  [[noreturn, gnu::cold]] void damaged(std::initializer_list<Word> problem) const;
  void read_bytes(std::uint64_t place, std::span<std::byte> to) const;
  void parse_header(std::string_view header);
  void parse_metadata(JsonCursor& cursor);
  TensorEntry parse_tensor(JsonCursor& cursor, std::string name) const;
  void check_places(std::uint64_t data_begin);
  void sort_names();
  void take_facts(std::string_view header);

  std::string path_;
  Descriptor file_;
  std::uint64_t bytes_ = 0;
  std::vector<TensorEntry> tensors_;
  std::vector<std::uint32_t> by_name_;
  std::vector<std::pair<std::string, std::string>> metadata_;
  std::size_t facts_place_ = 0;  // of the 'lockstep' entry's text in the header
  Json facts_ = Json::object();
  std::optional<std::uint64_t> digest_;
};

}  // namespace lockstep::detail

#if !defined(LOCKSTEP_COMPILED)
#include "lockstep/checkpoint/safetensors_file.ipp"
#endif
