// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `safetensors_file.hpp`.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>

#include "lockstep/checkpoint/json_cursor.hpp"
#include "lockstep/checkpoint/safetensors_file.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK a pipe of this name would wait for its writer.
  file_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file_) fail_reading(path_, errno);
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0) fail_reading(path_, errno);
  if (S_ISDIR(status.st_mode)) fail_reading(path_, EISDIR);
  if (!S_ISREG(status.st_mode)) damaged({"it is no regular file"});
  bytes_ = static_cast<std::uint64_t>(status.st_size);

  if (bytes_ < 8) damaged({"it has ", bytes_, " bytes, less than the length of a header"});
  std::uint64_t length = 0;
  read_bytes(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length < 2) damaged({"its header has ", length, " bytes"});
  if (length > most_header_bytes)
    damaged({"its header claims ", length, " bytes and ", most_header_bytes, " are allowed"});
  if (length > bytes_ - 8)
    damaged({"its header claims ", length, " bytes and ", bytes_ - 8, " are there"});
  std::string header(8 + length, '\0');
  read_bytes(0, std::as_writable_bytes(std::span(header)));
  parse_header(header);
  check_places(8 + length);
  sort_names();
  take_facts(header);
}

LOCKSTEP_INLINE void SafetensorsFile::damaged(std::initializer_list<Word> problem) const {
  fail_damaged(path_, text(problem));
}

LOCKSTEP_INLINE void SafetensorsFile::read_bytes(std::uint64_t place,
                                                 std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t n = ::pread(file_.get(), to.data(), to.size(), static_cast<off_t>(place));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_reading(path_, errno);
    if (n == 0) damaged({"it ends at byte ", place, " and had ", bytes_, " when it was opened"});
    note_storage_progress();
    place += static_cast<std::uint64_t>(n);
    to = to.subspan(static_cast<std::size_t>(n));
  }
}

LOCKSTEP_INLINE void SafetensorsFile::parse_header(std::string_view header) {
  JsonCursor cursor(header.substr(8), text({"'", path_, "', its header"}));
  if (header[8] != '{') cursor.fail("an object should begin");
  cursor.open_object();
  bool has_metadata = false;
  for (std::string name; cursor.next_member(name);) {
    if (name != "__metadata__") {
      tensors_.push_back(parse_tensor(cursor, std::move(name)));
    } else if (std::exchange(has_metadata, true)) {
      cursor.fail("a second '__metadata__' should not be");
    } else {
      parse_metadata(cursor);
    }
  }
  cursor.finish();
}

LOCKSTEP_INLINE void SafetensorsFile::parse_metadata(JsonCursor& cursor) {
  cursor.open_object();
  for (std::string key; cursor.next_member(key);) {
    cursor.peek();
    if (key == "lockstep") facts_place_ = cursor.place() + 8;
    std::string value = cursor.string();
    metadata_.emplace_back(std::move(key), std::move(value));
  }
  std::ranges::sort(metadata_);
  const auto same_key = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto twice = std::ranges::adjacent_find(metadata_, same_key);
  if (twice != metadata_.end()) damaged({"its metadata has '", twice->first, "' twice"});
}

LOCKSTEP_INLINE TensorEntry SafetensorsFile::parse_tensor(JsonCursor& cursor,
                                                          std::string name) const {
  constexpr std::size_t most_axes = 64;
  TensorEntry tensor;
  tensor.name = std::move(name);
  bool has_shape = false;
  bool has_offsets = false;
  std::uint64_t end = 0;
  cursor.open_object();
  for (std::string key; cursor.next_member(key);) {
    if (key == "dtype" && tensor.element == nullptr) {
      const std::string type = cursor.string();
      tensor.element = file_element(type);
      if (tensor.element == nullptr)
        damaged({"tensor '", tensor.name, "' has the unknown type '", type, "'"});
    } else if (key == "shape" && !has_shape) {
      has_shape = true;
      cursor.open_array();
      while (cursor.next_item()) {
        if (tensor.shape.size() == most_axes)
          damaged({"tensor '", tensor.name, "' has more than ", most_axes, " axes"});
        tensor.shape.push_back(cursor.natural());
      }
    } else if (key == "data_offsets" && !has_offsets) {
      has_offsets = true;
      cursor.open_array();
      const bool has_begin = cursor.next_item();
      tensor.begin = has_begin ? cursor.natural() : 0;
      const bool has_end = has_begin && cursor.next_item();
      end = has_end ? cursor.natural() : 0;
      if (!has_end || cursor.next_item())
        damaged({"tensor '", tensor.name, "' has other than two offsets"});
    } else {
      damaged({"tensor '", tensor.name, "' has '", key, "' twice or for no reason"});
    }
  }
  if (tensor.element == nullptr || !has_shape || !has_offsets)
    damaged({"tensor '", tensor.name, "' lacks its dtype, shape or data_offsets"});
  if (end < tensor.begin)
    damaged({"tensor '", tensor.name, "' ends at ", end, ", before it begins"});
  tensor.bytes = end - tensor.begin;
  tensor.count = 1;
  bool fits = true;
  for (const std::uint64_t extent : tensor.shape)
    fits = fits && multiply(tensor.count, extent, tensor.count);
  std::uint64_t bits = 0;
  std::uint64_t needed = 0;
  if (!fits || !multiply(tensor.count, tensor.element->bits, bits) ||
      !multiply(tensor.bytes, 8, needed) || bits != needed) {
    damaged({"tensor '", tensor.name, "' of shape ", shape_text(tensor.shape), " and type ",
             tensor.element->name, " has ", tensor.bytes, " bytes"});
  }
  return tensor;
}

LOCKSTEP_INLINE void SafetensorsFile::check_places(std::uint64_t data_begin) {
  std::ranges::sort(tensors_, [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes;
  });
  const std::uint64_t data_bytes = bytes_ - data_begin;
  std::uint64_t place = 0;
  for (TensorEntry& tensor : tensors_) {
    if (tensor.begin < place) damaged({"tensor '", tensor.name, "' overlaps the one before it"});
    if (tensor.begin > place)
      damaged({"no tensor has the bytes before that of '", tensor.name, "'"});
    place = tensor.begin + tensor.bytes;
    if (place > data_bytes)
      damaged({"tensor '", tensor.name, "' ends at byte ", place, " of ", data_bytes,
               ": the file has been cut"});
    tensor.begin += data_begin;
  }
  if (place != data_bytes)
    damaged({"its tensors have ", place, " bytes, and ", data_bytes, " are there"});
}

LOCKSTEP_INLINE void SafetensorsFile::sort_names() {
  by_name_.resize(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_[i] = static_cast<std::uint32_t>(i);
  const auto name = [this](std::uint32_t i) -> const std::string& { return tensors_[i].name; };
  std::ranges::sort(by_name_, {}, name);
  const auto twice = std::ranges::adjacent_find(by_name_, {}, name);
  if (twice != by_name_.end()) damaged({"it has two tensors '", name(*twice), "'"});
}

LOCKSTEP_INLINE const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(
      by_name_, name, {}, [this](std::uint32_t i) -> std::string_view { return tensors_[i].name; });
  if (found == by_name_.end() || tensors_[*found].name != name) return nullptr;
  return &tensors_[*found];
}

LOCKSTEP_INLINE const std::string* SafetensorsFile::metadata(std::string_view key) const {
  for (const auto& entry : metadata_) {
    if (entry.first == key) return &entry.second;
  }
  return nullptr;
}

LOCKSTEP_INLINE void SafetensorsFile::take_facts(std::string_view header) {
  const std::string* const facts = metadata("lockstep");
  if (facts == nullptr) {
    // One flipped bit must not make it a file of another program, which has no checksums.
    const std::string* const writer = metadata("writer");
    if (writer != nullptr && writer->starts_with("lockstep "))
      damaged({"lockstep has written it, and its 'lockstep' entry is missing"});
    return;
  }
  constexpr std::string_view before = R"("{\"header\":\")";
  constexpr std::string_view zeros = "0000000000000000";
  const std::string_view raw = header.substr(facts_place_);
  const auto said = raw.size() < before.size() + zeros.size() || !raw.starts_with(before)
                        ? std::nullopt
                        : checksum_from(raw.substr(before.size(), zeros.size()));
  if (!said) damaged({"its 'lockstep' entry does not begin with the header's checksum"});
  const std::size_t digits = facts_place_ + before.size();
  const std::uint64_t found = Checksum()
                                  .add(header.substr(0, digits))
                                  .add(zeros)
                                  .add(header.substr(digits + zeros.size()))
                                  .value();
  if (found != *said) {
    damaged({"its header's checksum is ", checksum_text(found), " and should be ",
             checksum_text(*said)});
  }
  digest_ = found;
  facts_ = Json::parse(*facts, text({"'", path_, "', its 'lockstep' entry"}));
  std::erase_if(metadata_, [](const auto& entry) { return entry.first == "lockstep"; });
  JsonEntry(facts_, path_).at("header").checksum();
  const JsonEntry checksums = JsonEntry(facts_, path_).at("checksums").as_object();
  for (std::size_t i = 0; i < checksums.size(); ++i) {
    const TensorEntry* const tensor = find(checksums.member_name(i));
    if (tensor == nullptr)
      damaged({"it has a checksum of '", checksums.member_name(i), "' and no such tensor"});
    tensors_[static_cast<std::size_t>(tensor - tensors_.data())].checksum =
        checksums.member(i).checksum();
  }
  for (const TensorEntry& tensor : tensors_) {
    if (!tensor.checksum) damaged({"it has no checksum of tensor '", tensor.name, "'"});
  }
  facts_.take("header");
  facts_.take("checksums");
}

LOCKSTEP_INLINE void SafetensorsFile::read(const TensorEntry& tensor, std::uint64_t first_byte,
                                           std::span<std::byte> to) const {
  check(first_byte <= tensor.bytes && to.size() <= tensor.bytes - first_byte,
        "read no more of a tensor than there is");
  read_bytes(tensor.begin + first_byte, to);
}

LOCKSTEP_INLINE void SafetensorsFile::verify(const TensorEntry& tensor,
                                             std::span<std::byte> memory) const {
  if (!tensor.checksum) return;
  Checksum checksum;
  for (std::uint64_t done = 0; done != tensor.bytes;) {
    const auto part = memory.first(
        static_cast<std::size_t>(std::min<std::uint64_t>(memory.size(), tensor.bytes - done)));
    read(tensor, done, part);
    checksum.add(part);
    done += part.size();
  }
  if (checksum.value() != *tensor.checksum)
    damaged({"the data of tensor '", tensor.name, "' is not what was written"});
}

LOCKSTEP_INLINE void SafetensorsFile::verify() const {
  std::vector<std::byte> memory(verify_bytes);
  for (const TensorEntry& tensor : tensors_) verify(tensor, memory);
}

}  // namespace lockstep::detail
