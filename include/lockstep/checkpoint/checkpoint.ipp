// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder that are no templates.

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/checkpoint/checkpoints.hpp"
#include "lockstep/checkpoint/folder.hpp"
#include "lockstep/checkpoint/job.hpp"
#include "lockstep/checkpoint/options.hpp"
#include "lockstep/checkpoint/reader.hpp"
#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/checkpoint/state.hpp"
#include "lockstep/checkpoint/stop_request.hpp"
#include "lockstep/checkpoint/values.hpp"
#include "lockstep/checkpoint/writer.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/half.hpp"
#include "lockstep/core/json.hpp"
#include "lockstep/core/scope_guard.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/worker.hpp"
#include "lockstep/launch/launch.hpp"
#include "lockstep/version.hpp"

namespace lockstep {

LOCKSTEP_INLINE bool CheckpointOptions::prefers_higher() const {
  if (higher_is_better) return *higher_is_better;
  for (const std::string_view word : {"loss", "error", "perplexity"}) {
    if (best_by.find(word) != std::string::npos) return false;
  }
  return true;
}

namespace detail {

LOCKSTEP_INLINE CheckpointOptions CheckpointFlags::over(CheckpointOptions options) const {
  if (folder) options.folder = *folder;
  if (options.folder.empty() && any()) {
    fail("launch",
         {resume    ? "--resume"
          : every   ? "--checkpoint-every"
          : best_by ? "--best"
                    : "--keep",
          " is given without --checkpoint"},
         "add --checkpoint DIR, the folder of the checkpoints");
  }
  if (every) {
    options.every_steps = every->steps;
    options.every_time = every->time;
  }
  if (keep) options.keep = *keep;
  if (best_by) {
    options.best_by = *best_by;
    options.higher_is_better = higher_is_better;
  }
  options.resume = options.resume || resume;
  return options;
}

LOCKSTEP_INLINE void require_checkpoint_options(const CheckpointOptions& options) {
  if (options.folder.empty()) {
    fail("checkpoints", {"no folder is named"}, "set CheckpointOptions::folder, or --checkpoint");
  }
  if (options.keep == 0) {
    fail("checkpoints", {"keep is 0, so that every checkpoint would be deleted"},
         "keep at least 1, or keep_all");
  }
  if (options.every_time.count() < 0) {
    fail("checkpoints", {"every_time is ", options.every_time.count(), " ms"},
         "give it a time above 0, or leave it out");
  }
}

}  // namespace detail

LOCKSTEP_INLINE KeptValues& KeptValues::add(const KeptValue& value) {
  for (const KeptValue& other : values_) {
    if (other.name() == value.name())
      detail::fail("KeptValues", {"two values have the name ", value.name()},
                   "give each a name of its own");
  }
  values_.push_back(value);
  return *this;
}

namespace detail {

LOCKSTEP_INLINE std::string SavedValue::type() const {
  switch (kind) {
    case ValueKind::number:
      return std::string(element_name(element));
    case ValueKind::truth:
      return "bool";
    case ValueKind::text:
      return "text";
    case ValueKind::numbers:
      return text({element_name(element), "[]"});
    case ValueKind::random_stream:
      return "RandomStream";
  }
  return "";
}

LOCKSTEP_INLINE std::string pack_values(const KeptValues& values) {
  std::string packed;
  for (const KeptValue& value : values) {
    const SavedValue saved = value.saved();
    packed += static_cast<char>(saved.kind);
    packed += static_cast<char>(saved.element);
    append_sized(packed, saved.name);
    append_sized(packed, saved.bytes);
  }
  return packed;
}

LOCKSTEP_INLINE std::vector<SavedValue> unpack_values(std::string_view packed) {
  std::vector<SavedValue> values;
  while (!packed.empty()) {
    SavedValue& value = values.emplace_back();
    value.kind = static_cast<ValueKind>(packed[0]);
    value.element = static_cast<ElementKind>(packed[1]);
    packed.remove_prefix(2);
    value.name = take_sized(packed);
    value.bytes = take_sized(packed);
  }
  return values;
}

LOCKSTEP_INLINE const SavedValue* find_value(const std::vector<SavedValue>& saved,
                                             std::string_view name) {
  for (const SavedValue& value : saved)
    if (value.name == name) return &value;
  return nullptr;
}

LOCKSTEP_INLINE ValueDifferences compare_values(const KeptValues& values,
                                                const std::vector<SavedValue>& saved) {
  ValueDifferences found;
  for (const KeptValue& value : values) {
    const SavedValue* const other = find_value(saved, value.name());
    if (other == nullptr) {
      found.missing.push_back(value.name());
    } else if (!value.is_of(*other)) {
      found.other_types.push_back(text({value.name(), " is ", other->type(), " in the file and ",
                                        value.saved().type(), " here"}));
    }
  }
  for (const SavedValue& value : saved) {
    const bool wanted = std::any_of(values.begin(), values.end(), [&](const KeptValue& other) {
      return other.name() == value.name;
    });
    if (!wanted) found.unexpected.push_back(value.name);
  }
  return found;
}

LOCKSTEP_INLINE void set_values(const KeptValues& values, const std::vector<SavedValue>& saved) {
  for (const KeptValue& value : values) {
    const SavedValue* const other = find_value(saved, value.name());
    if (other != nullptr && value.is_of(*other)) value.set(*other);
  }
}

}  // namespace detail

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE std::span<const FileElement> file_elements() {
  static constexpr ElementKind none = ElementKind::unsupported;
  static constexpr FileElement elements[] = {
      {"F64", ElementKind::f64, 64},
      {"F32", ElementKind::f32, 32},
      {"F16", ElementKind::f16, 16},
      {"BF16", ElementKind::bf16, 16},
      {"I8", ElementKind::i8, 8},
      {"I16", ElementKind::i16, 16},
      {"I32", ElementKind::i32, 32},
      {"I64", ElementKind::i64, 64},
      {"U8", ElementKind::u8, 8},
      {"U16", ElementKind::u16, 16},
      {"U32", ElementKind::u32, 32},
      {"U64", ElementKind::u64, 64},
      {"BOOL", none, 8},
      {"C64", none, 64},
      {"F8_E4M3", none, 8},
      {"F8_E5M2", none, 8},
      {"F8_E8M0", none, 8},
      {"F6_E2M3", none, 6},
      {"F6_E3M2", none, 6},
      {"F4", none, 4},
  };
  return elements;
}

LOCKSTEP_INLINE const FileElement* file_element(std::string_view name) {
  for (const FileElement& element : file_elements()) {
    if (element.name == name) return &element;
  }
  return nullptr;
}

LOCKSTEP_INLINE const FileElement* file_element(ElementKind kind) {
  for (const FileElement& element : file_elements()) {
    if (element.kind == kind && kind != ElementKind::unsupported) return &element;
  }
  return nullptr;
}

LOCKSTEP_INLINE std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string out = "[";
  for (const std::uint64_t extent : shape) {
    if (out.size() > 1) out += ", ";
    Word(extent).append_to(out);
  }
  return out += "]";
}

LOCKSTEP_INLINE void fail_writing(std::string_view path, int error) {
  fail_writing("checkpoint", path, error);
}

LOCKSTEP_INLINE void fail_reading(std::string_view path, int error) {
  fail_reading("checkpoint", path, error);
}

LOCKSTEP_INLINE void fail_damaged(std::string_view path, std::string_view problem) {
  fail("checkpoint", {"'", path, "' is damaged or no safetensors file: ", problem},
       "copy it again, or take another");
}

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
  const JsonEntry checksums = JsonEntry(facts_, path_).at("checksums");
  for (const Json::Member& member : checksums.members()) {
    const TensorEntry* const tensor = find(member.first);
    if (tensor == nullptr)
      damaged({"it has a checksum of '", member.first, "' and no such tensor"});
    tensors_[static_cast<std::size_t>(tensor - tensors_.data())].checksum =
        checksums.of(member).checksum();
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

/// Where everything lies in a file, and its header.
class FileLayout {
 public:
  FileLayout(const std::string& path, const FileToWrite& file) : path_(path), file_(file) {
    for (const TensorToWrite& tensor : file.tensors) {
      check_tensor(tensor);
      order_.push_back(&tensor);
    }
    check_names();
    std::size_t values = order_.size() + 2;  // with what is added to the facts
    check_facts(file.facts, 1, values);
    // The widest elements come first: then every element is aligned, without holes.
    std::ranges::sort(order_, [](const TensorToWrite* a, const TensorToWrite* b) {
      const unsigned width_a = a->element()->bits;
      const unsigned width_b = b->element()->bits;
      return width_a != width_b ? width_a > width_b : a < b;  // else as they were given
    });
    header_bytes_ = header(std::vector<std::uint64_t>(order_.size())).text.size();
    if (header_bytes_ - 8 > most_header_bytes) {
      refuse({"its header would have ", header_bytes_ - 8, " bytes and ", most_header_bytes,
              " are allowed"},
             "keep large values as tensors, not as numbers or texts");
    }
  }

  const std::vector<const TensorToWrite*>& order() const { return order_; }
  std::uint64_t header_bytes() const { return header_bytes_; }

  struct Header {
    std::string text;
    std::uint64_t digest;
  };

  /// The header, with the checksums of the tensors in order: its size does not depend on them.
  Header header(const std::vector<std::uint64_t>& checksums) const {
    std::string facts = text({"{\"header\":\"", no_digits});
    const std::size_t digits_in_facts = facts.size() - no_digits.size();
    facts += '"';
    if (const auto* const members = file_.facts.get_if<Json::Object>()) {
      for (const Json::Member& member : *members) {
        facts += ',';
        append_json_string(facts, member.first);
        facts += ':';
        facts += member.second.text();
      }
    }
    facts += ",\"checksums\":{";
    for (std::size_t i = 0; i < order_.size(); ++i) {
      if (i != 0) facts += ',';
      append_json_string(facts, order_[i]->name);
      facts += ":\"" + checksum_text(checksums[i]) + '"';
    }
    facts += "}}";

    std::string out(8, '\0');
    out += "{\"__metadata__\":{\"format\":\"pt\",\"writer\":";
    append_json_string(out, text({"lockstep ", version}));
    for (const auto& [key, value] : file_.metadata) {
      out += ',';
      append_json_string(out, key);
      out += ':';
      append_json_string(out, value);
    }
    out += ",\"lockstep\":";
    // The digits stand behind the quotation mark and `{"header":"` with its three marks escaped.
    const std::size_t digits = out.size() + 1 + digits_in_facts + 3;
    append_json_string(out, facts);
    out += '}';
    std::uint64_t place = 0;
    for (const TensorToWrite* const tensor : order_) {
      out += ',';
      append_json_string(out, tensor->name);
      out += text({":{\"dtype\":\"", tensor->element()->name, "\",\"shape\":["});
      for (std::size_t axis = 0; axis < tensor->shape.size(); ++axis) {
        if (axis != 0) out += ',';
        Word(tensor->shape[axis]).append_to(out);
      }
      const std::uint64_t end = place + tensor->data.size();
      out += text({"],\"data_offsets\":[", place, ",", end, "]}"});
      place = end;
    }
    out += '}';
    out.append(align_up(out.size(), 8) - out.size(), ' ');
    for (int i = 0; i < 8; ++i) out[i] = static_cast<char>((out.size() - 8) >> (8 * i));
    const std::uint64_t digest = Checksum().add(out).value();
    out.replace(digits, 16, checksum_text(digest));
    return {std::move(out), digest};
  }

 private:
  static constexpr std::string_view no_digits = "0000000000000000";

  [[noreturn]] void refuse(std::initializer_list<Word> problem, std::string_view advice) const {
    fail("checkpoint", {"'", path_, "' cannot be written: ", text(problem)}, advice);
  }

  void check_tensor(const TensorToWrite& tensor) const {
    const FileElement* const element = tensor.element();
    if (element == nullptr) {
      refuse({"tensor '", tensor.name, "' has elements that safetensors files do not have"},
             "save it in another type");
    }
    std::uint64_t bytes = element->bits / 8;
    bool fits = true;
    for (const std::uint64_t extent : tensor.shape) fits = fits && multiply(bytes, extent, bytes);
    if (!fits || bytes != tensor.data.size()) {
      refuse({"tensor '", tensor.name, "' of shape ", shape_text(tensor.shape), " has ",
              tensor.data.size(), " bytes of data"},
             "give it as many as its shape needs");
    }
  }

  void check_names() const {
    std::vector<std::string_view> names{"__metadata__"};
    for (const TensorToWrite& tensor : file_.tensors) names.push_back(tensor.name);
    check_distinct(std::move(names));
    std::vector<std::string_view> keys{"format", "writer", "lockstep"};
    for (const auto& [key, value] : file_.metadata) {
      keys.push_back(key);
      if (!is_utf8(value)) refuse({"the metadata of '", key, "' is not UTF-8"}, "write UTF-8");
    }
    check_distinct(std::move(keys));
    check(file_.facts.find("header") == nullptr && file_.facts.find("checksums") == nullptr,
          "leave 'header' and 'checksums' to the writer");
  }

  /// What is written must be read again, bit for bit.
  void check_facts(const Json& value, int depth, std::size_t& values) const {
    if (depth > Json::most_depth)
      refuse({"the values saved with it are too deep"}, "save flatter ones");
    if (++values > Json::most_values)
      refuse({"more than ", Json::most_values, " values are saved with it"},
             "save tensors instead");
    if (const auto* const text = value.get_if<std::string>(); text != nullptr && !is_utf8(*text))
      refuse({"the text '", *text, "' is not UTF-8"}, "save texts in UTF-8, and bytes as numbers");
    if (const auto* const items = value.get_if<Json::Array>()) {
      for (const Json& item : *items) check_facts(item, depth + 1, values);
    }
    if (const auto* const members = value.get_if<Json::Object>()) {
      std::vector<std::string_view> names;
      for (const Json::Member& member : *members) {
        names.push_back(member.first);
        check_facts(member.second, depth + 1, values);
      }
      check_distinct(std::move(names));
    }
  }

  void check_distinct(std::vector<std::string_view> names) const {
    std::ranges::sort(names);
    const auto twice = std::ranges::adjacent_find(names);
    if (twice != names.end())
      refuse({"the name '", *twice, "' is there twice"}, "give everything a name of its own");
    for (const std::string_view name : names) {
      if (!is_utf8(name)) refuse({"the name '", name, "' is not UTF-8"}, "write names in UTF-8");
    }
  }

  const std::string& path_;
  const FileToWrite& file_;
  std::vector<const TensorToWrite*> order_;
  std::uint64_t header_bytes_ = 0;
};

LOCKSTEP_INLINE WrittenFile write_file(const std::string& path, const FileToWrite& file) {
  const FileLayout layout(path, file);
  std::uint64_t bytes = layout.header_bytes();
  for (const TensorToWrite* const tensor : layout.order()) bytes += tensor->data.size();

  TemporaryFile out("checkpoint", path, bytes);
  out.seek(layout.header_bytes());
  std::vector<std::uint64_t> checksums;
  for (const TensorToWrite* const tensor : layout.order()) {
    Checksum checksum;
    const std::size_t all = tensor->data.size();
    for (std::size_t at = 0; at != all;) {  // a chunk is still in the cache when it is written
      const std::size_t size = std::min(all - at, write_chunk_bytes);
      const auto chunk = tensor->read ? tensor->read(at, size) : tensor->data.subspan(at, size);
      checksum.add(chunk);
      out.append(chunk);
      if (tensor->read) out.flush();  // before its memory is used again
      at += size;
    }
    checksums.push_back(checksum.value());
  }
  const FileLayout::Header header = layout.header(checksums);
  out.seek(0);
  out.append(std::as_bytes(std::span(header.text)));
  out.commit();
  return {bytes, header.digest};
}

[[noreturn]] LOCKSTEP_INLINE void fail_locked(const std::string& folder, const std::string& path) {
  std::string owner = read_file(path.c_str());
  if (const std::size_t end = owner.find('\n'); end != std::string::npos) owner.resize(end);
  if (owner.size() > 1000) owner.resize(1000);
  fail("checkpoints",
       {"'", folder, "' belongs to a job that still runs",
        owner.empty() ? std::string() : text({": ", owner})},
       "end that job, or name another folder");
}

LOCKSTEP_INLINE FolderLock::FolderLock(const std::string& folder,
                                       std::chrono::milliseconds patience)
    : folder_(folder), path_(text({folder, "/.lock"})) {
  const Deadline end = Deadline::after(patience);
  file_ = Descriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file_) {
    fail("checkpoints", {"'", path_, "' cannot be opened: ", error_text(errno)},
         "name a folder in which this job may write");
  }
  while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error == EWOULDBLOCK) {
      if (end.passed()) fail_locked(folder_, path_);
      sleep_for(std::chrono::milliseconds(20));
      continue;
    }
    // Some network file systems have no locks. That is no reason to lose the checkpoints.
    std::fputs(text({"lockstep: checkpoints: '", folder_, "' cannot be locked (", error_text(error),
                     "): see to it that no other job uses this folder\n"})
                   .c_str(),
               stderr);
    return;
  }
  // A full disk has no room for this text; the lock holds without it.
  const std::string owner = text({owner_text(), "\n"});
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
  [[maybe_unused]] const bool is_written = write_all(file_.get(), owner);
}

LOCKSTEP_INLINE FolderLock::~FolderLock() {
  if (!file_) return;
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
}

LOCKSTEP_INLINE void FolderLock::require() const {
  struct stat mine{};
  struct stat there{};
  if (::stat(path_.c_str(), &there) == 0 && ::fstat(file_.get(), &mine) == 0 &&
      mine.st_dev == there.st_dev && mine.st_ino == there.st_ino) {
    return;
  }
  fail("checkpoints", {"'", folder_, "' was removed or replaced while the job ran"},
       "put it back or start the job again, with --resume if it still holds a checkpoint");
}

inline constexpr std::string_view checkpoint_prefix = "step-";
inline constexpr std::string_view checkpoint_suffix = ".safetensors";

LOCKSTEP_INLINE std::string checkpoint_name(std::uint64_t step) {
  std::string digits = text({step});
  if (digits.size() < 12) digits.insert(0, 12 - digits.size(), '0');
  return text({checkpoint_prefix, digits, checkpoint_suffix});
}

/// Removes `end` from the end of `name`; false where it is not there.
LOCKSTEP_INLINE bool cut_end(std::string_view& name, std::string_view end) {
  if (!name.ends_with(end)) return false;
  name.remove_suffix(end.size());
  return true;
}

/// Removes the digits from the end of `name`; false where there are none.
LOCKSTEP_INLINE bool cut_digits(std::string_view& name) {
  const std::size_t last = name.find_last_not_of("0123456789");
  const std::size_t first = last == std::string_view::npos ? 0 : last + 1;
  const bool has_digits = first != name.size();
  name = name.substr(0, first);
  return has_digits;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checkpoint_step(std::string_view name) {
  std::string_view digits = name;
  if (!digits.starts_with(checkpoint_prefix) || !cut_end(digits, checkpoint_suffix)) return {};
  digits.remove_prefix(checkpoint_prefix.size());
  std::uint64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc{} || end != digits.data() + digits.size()) return {};
  // One spelling for each step: another would be found and never be replaced.
  return checkpoint_name(step) == name ? std::optional(step) : std::nullopt;
}

LOCKSTEP_INLINE std::string_view shard_stem(std::string_view name) {
  if (!cut_end(name, checkpoint_suffix) || !cut_digits(name) || !cut_end(name, "-of-") ||
      !cut_digits(name) || !cut_end(name, ".rank-")) {
    return {};
  }
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || dot + 1 == name.size()) return {};
  return name.substr(0, dot);
}

LOCKSTEP_INLINE bool is_temporary_name(std::string_view name) {
  const std::size_t mark = name.rfind(temporary_infix);
  if (mark == std::string_view::npos) return false;
  const std::string_view file = name.substr(0, mark);
  return file.ends_with(checkpoint_suffix) || file == "best.score";
}

LOCKSTEP_INLINE std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  struct Close {
    void operator()(DIR* entries) const { ::closedir(entries); }
  };
  const std::unique_ptr<DIR, Close> entries(::opendir(folder.c_str()));
  if (!entries) return names;
  while (const dirent* const entry = ::readdir(entries.get())) {
    struct stat status{};
    const int flags = AT_SYMLINK_NOFOLLOW;
    if (::fstatat(::dirfd(entries.get()), entry->d_name, &status, flags) != 0) continue;
    if (S_ISREG(status.st_mode)) names.emplace_back(entry->d_name);
  }
  return names;
}

LOCKSTEP_INLINE std::vector<FoundCheckpoint> list_checkpoints(const std::string& folder) {
  std::vector<FoundCheckpoint> found;
  for (const std::string& name : files_in(folder)) {
    const std::optional<std::uint64_t> step = checkpoint_step(name);
    if (!step) continue;
    // Few, and a sort of the standard library takes long to compile.
    auto place = found.begin();
    while (place != found.end() && place->step > step) ++place;
    found.insert(place, {text({folder, "/", name}), step});
  }
  return found;
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> newest_valid_checkpoint(
    const std::string& folder, FunctionRef<void(const std::string&)> verify,
    FunctionRef<void(const FoundCheckpoint&, const std::string&)> skipped) {
  std::vector<FoundCheckpoint> candidates = list_checkpoints(folder);
  for (const std::string& name : files_in(folder)) {
    if (name == best_checkpoint_name) candidates.push_back({text({folder, "/", name}), {}});
  }
  for (FoundCheckpoint& candidate : candidates) {
    try {
      verify(candidate.path);
      return std::move(candidate);
    } catch (const Error& error) {
      skipped(candidate, error.problem());
    }
  }
  return std::nullopt;
}

/// A number that tells checkpoints apart: the checksum of the header, which holds those of all
/// tensors. Nothing where there is no such file, or lockstep did not write it.
LOCKSTEP_INLINE std::optional<std::uint64_t> header_digest(const std::string& path) {
  try {
    return SafetensorsFile(path).digest();
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// A line of `best.score`: which checkpoint, its score, and the score's name.
LOCKSTEP_INLINE std::string best_score_line(std::uint64_t digest, double score,
                                            std::string_view name) {
  char number[32];
  const auto end = std::to_chars(number, number + sizeof number, score).ptr;
  return text({checksum_text(digest), " ",
               std::string_view(number, static_cast<std::size_t>(end - number)), " ", name, "\n"});
}

LOCKSTEP_INLINE std::string best_score_path(const std::string& folder) {
  return text({folder, "/best.score"});
}

LOCKSTEP_INLINE std::optional<double> read_best_score(const std::string& folder,
                                                      std::string_view name) {
  const auto digest = header_digest(text({folder, "/", best_checkpoint_name}));
  if (!digest) return std::nullopt;
  const std::string lines = read_file(best_score_path(folder).c_str());
  for (std::string_view rest = lines; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.size() < 18) continue;
    const std::string_view after = line.substr(17);
    double score = 0;
    const auto [end, error] = std::from_chars(after.data(), after.data() + after.size(), score);
    // The line that this score would have been written as, so nothing else is taken for it.
    if (error != std::errc{} || text({line, "\n"}) != best_score_line(*digest, score, name)) {
      continue;
    }
    return score;
  }
  return std::nullopt;
}

[[noreturn]] LOCKSTEP_INLINE void fail_best_copy(const std::string& path, int error) {
  fail("checkpoints", {"'", path, "' cannot be written: ", error_text(error)},
       "make room there, or see whether the folder may still be written");
}

/// A file that is removed unless it has been renamed.
class ReplacementFile {
 public:
  explicit ReplacementFile(const std::string& target)
      : target_(target), path_(text({target, temporary_infix, random_token()})) {}
  ~ReplacementFile() { ::unlink(path_.c_str()); }  // where rename found one file twice, it stays
  ReplacementFile(const ReplacementFile&) = delete;
  ReplacementFile& operator=(const ReplacementFile&) = delete;

  const std::string& path() const { return path_; }

  Descriptor create() const {
    Descriptor file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file) fail_best_copy(path_, errno);
    return file;
  }

  /// Puts the file in its place, and sees to it that both outlast a loss of power.
  void commit(const std::string& folder) const {
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail_best_copy(target_, errno);
    const Descriptor entries(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Some file systems cannot sync a folder; those keep names without being asked.
    if (entries && ::fsync(entries.get()) != 0 && errno != EINVAL) fail_best_copy(target_, errno);
  }

 private:
  std::string target_;
  std::string path_;
};

/// Copies a file, for file systems without hard links.
LOCKSTEP_INLINE void copy_file(const std::string& from, const ReplacementFile& to) {
  const Descriptor source(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  if (!source) fail_best_copy(from, errno);
  const Descriptor target = to.create();
  std::vector<char> buffer(std::size_t{1} << 20);
  for (;;) {
    const ssize_t n = ::read(source.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_best_copy(from, errno);
    if (n == 0) break;
    const std::string_view piece(buffer.data(), static_cast<std::size_t>(n));
    if (!write_all(target.get(), piece)) fail_best_copy(to.path(), errno);
  }
  if (::fsync(target.get()) != 0) fail_best_copy(to.path(), errno);
}

LOCKSTEP_INLINE void replace_best_copy(const std::string& folder, const std::string& checkpoint,
                                       std::string_view name, double score) {
  const auto digest = header_digest(checkpoint);
  if (!digest) {
    fail("checkpoints", {"'", checkpoint, "' cannot be made the best copy: it is no checkpoint"},
         "see whether another program has changed the folder");
  }
  const std::string best = text({folder, "/", best_checkpoint_name});
  std::string lines = best_score_line(*digest, score, name);
  const auto digest_before = header_digest(best);
  const auto score_before = read_best_score(folder, name);
  if (score_before && digest_before) lines += best_score_line(*digest_before, *score_before, name);
  {
    const ReplacementFile scores(best_score_path(folder));
    const Descriptor file = scores.create();
    if (!write_all(file.get(), lines)) fail_best_copy(scores.path(), errno);
    if (::fsync(file.get()) != 0) fail_best_copy(scores.path(), errno);
    scores.commit(folder);
  }
  const ReplacementFile copy(best);
  if (::link(checkpoint.c_str(), copy.path().c_str()) != 0) {
    if (errno == ENOENT) fail_best_copy(checkpoint, errno);
    copy_file(checkpoint, copy);
  }
  copy.commit(folder);
}

/// `folder` without slashes at its end, which would be doubled in paths.
LOCKSTEP_INLINE CheckpointOptions with_plain_folder(CheckpointOptions options) {
  require_checkpoint_options(options);
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  return options;
}

LOCKSTEP_INLINE void verify_checkpoint(const std::string& path) {
  const CheckpointReader reader(path);
  if (!reader.is_lockstep()) {
    fail("checkpoints", {"'", path, "' was not written by lockstep"},
         "load its parameters with load_parameters");
  }
  reader.verify();
}

/// The names of a checkpoint's shards, whether or not they are there.
LOCKSTEP_INLINE std::vector<std::string> shard_names(const std::string& path) {
  const SafetensorsFile main(path);
  std::vector<std::string> names;
  for (ShardFile& shard : shards_in(main.facts())) names.push_back(std::move(shard.name));
  return names;
}

/// The score of this name that a checkpoint was saved with.
LOCKSTEP_INLINE std::optional<double> recorded_score(const std::string& path,
                                                     std::string_view name) {
  const SafetensorsFile main(path);
  const auto scores = main.facts().find("scores");
  const auto score = scores ? scores->find(name) : std::nullopt;
  return score ? std::optional(score->at("mean").real()) : std::nullopt;
}

LOCKSTEP_INLINE bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

LOCKSTEP_INLINE CheckpointFolder::CheckpointFolder(CheckpointOptions options,
                                                   std::chrono::milliseconds patience)
    : options_(with_plain_folder(std::move(options))),
      is_new_(make_folder("checkpoints", options_.folder)),
      lock_(options_.folder, patience) {
  clean_up();
  if (!options_.best_by.empty()) best_score_ = read_best_score(path(), options_.best_by);
}

LOCKSTEP_INLINE std::string CheckpointFolder::path_of(std::uint64_t step) const {
  return text({path(), "/", checkpoint_name(step)});
}

LOCKSTEP_INLINE std::string CheckpointFolder::best_path() const {
  return text({path(), "/", best_checkpoint_name});
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> CheckpointFolder::newest_valid(
    FunctionRef<void(const std::string&, const std::string&)> skipped) {
  const std::lock_guard lock(mutex_);
  auto found = newest_valid_checkpoint(
      path(), verify_checkpoint, [&](const FoundCheckpoint& candidate, const std::string& why) {
        if (candidate.step) note(*candidate.step, Standing::invalid);
        skipped(candidate.path, why);
      });
  if (!found || !found->step) return found;
  note(*found->step, Standing::valid);
  if (options_.best_by.empty()) return found;
  if (const auto score = recorded_score(found->path, options_.best_by)) {
    take_if_best(*found->step, *score);
  }
  return found;
}

LOCKSTEP_INLINE void CheckpointFolder::begin_at(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  for (const FoundCheckpoint& found : list_checkpoints(path())) {
    const std::uint64_t later = found.step.value_or(0);
    if (later <= step || standing_of(later) == Standing::invalid) continue;
    // An error of how the job was started. Launchers do not repeat these: the second start would go
    // on from a checkpoint that nobody has asked for.
    fail("launch",
         {"'", path(), "' holds a checkpoint of step ", later, ", and this job begins at step ",
          step},
         "add --resume to go on from there, or name another folder");
  }
}

LOCKSTEP_INLINE void CheckpointFolder::saved(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  note(step, Standing::valid);
  keep_newest();
}

LOCKSTEP_INLINE bool CheckpointFolder::offer_best(std::uint64_t step, double score) {
  const std::lock_guard lock(mutex_);
  return take_if_best(step, score);
}

LOCKSTEP_INLINE bool CheckpointFolder::take_if_best(std::uint64_t step, double score) {
  if (std::isnan(score)) return false;
  const bool is_better =
      !best_score_ || (options_.prefers_higher() ? score > *best_score_ : score < *best_score_);
  if (!is_better) return false;
  lock_.require();
  const auto shards_before = best_shards();
  replace_best_copy(path(), path_of(step), options_.best_by, score);
  best_score_ = score;
  // Shards that only the best copy before has named are not needed any more.
  const auto shards = best_shards();
  if (!shards_before || !shards) return true;
  for (const std::string& name : *shards_before) {
    const std::string main = text({path(), "/", shard_stem(name), ".safetensors"});
    if (!contains(*shards, name) && ::access(main.c_str(), F_OK) != 0) remove_file(name);
  }
  return true;
}

LOCKSTEP_INLINE std::optional<double> CheckpointFolder::best_score() const {
  const std::lock_guard lock(mutex_);
  return best_score_;
}

LOCKSTEP_INLINE std::optional<FoundCheckpoint> CheckpointFolder::latest() const {
  const std::lock_guard lock(mutex_);
  for (const FoundCheckpoint& found : list_checkpoints(path())) {
    if (standing_of(found.step.value_or(0)) == Standing::valid) return found;
  }
  return std::nullopt;
}

LOCKSTEP_INLINE std::optional<CheckpointFolder::Standing> CheckpointFolder::standing_of(
    std::uint64_t step) const {
  for (const Known& known : known_) {
    if (known.step == step) return known.standing;
  }
  return std::nullopt;
}

LOCKSTEP_INLINE void CheckpointFolder::note(std::uint64_t step, Standing standing) {
  std::erase_if(known_, [&](const Known& known) { return known.step == step; });
  known_.push_back({step, standing});
}

LOCKSTEP_INLINE std::optional<std::vector<std::string>> CheckpointFolder::best_shards() const {
  const std::string best = best_path();
  if (::access(best.c_str(), F_OK) != 0) return std::vector<std::string>();
  try {
    return shard_names(best);
  } catch (const Error&) {
    return std::nullopt;
  }
}

LOCKSTEP_INLINE void CheckpointFolder::clean_up() {
  // What a checkpoint names is needed. Of one that cannot be read nobody knows what it names.
  std::vector<std::string> needed;
  std::vector<std::string> unreadable;
  const std::vector<std::string> names = files_in(path());
  for (const std::string& name : names) {
    const bool is_best = name == best_checkpoint_name;
    if (!is_best && !checkpoint_step(name)) continue;
    try {
      const std::vector<std::string> shards = shard_names(text({path(), "/", name}));
      needed.insert(needed.end(), shards.begin(), shards.end());
    } catch (const Error&) {
      unreadable.push_back(name);
    }
  }
  for (const std::string& name : names) {
    const std::string main = text({shard_stem(name), ".safetensors"});
    const bool is_shard = checkpoint_step(main).has_value();
    const bool is_orphan = is_shard && !contains(needed, name) && !contains(unreadable, main) &&
                           !contains(unreadable, best_checkpoint_name);
    if (is_orphan || is_temporary_name(name)) remove_file(name);
  }
}

LOCKSTEP_INLINE void CheckpointFolder::keep_newest() {
  const std::vector<FoundCheckpoint> all = list_checkpoints(path());
  std::size_t valid = 0;
  for (const FoundCheckpoint& found : all) {
    valid += standing_of(found.step.value_or(0)) == Standing::valid ? 1 : 0;
  }
  if (valid < options_.keep) return;
  // The best copy's shards have the name of a checkpoint, and stay without it. Nobody knows which
  // they are where the copy cannot be read.
  const auto of_best = best_shards();
  if (!of_best) return;
  valid = 0;
  for (const FoundCheckpoint& found : all) {
    const std::uint64_t step = found.step.value_or(0);
    const std::optional<Standing> standing = standing_of(step);
    const bool is_over = valid >= options_.keep || standing == Standing::invalid;
    valid += standing == Standing::valid ? 1 : 0;
    if (is_over) remove(step, *of_best);
  }
}

LOCKSTEP_INLINE void CheckpointFolder::remove(std::uint64_t step,
                                              const std::vector<std::string>& of_best) {
  const std::string main = checkpoint_name(step);
  // The checkpoint before its shards: a job that dies in between leaves no checkpoint without them.
  if (!remove_file(main)) return;
  std::erase_if(known_, [&](const Known& known) { return known.step == step; });
  for (const std::string& name : files_in(path())) {
    const bool is_shard = text({shard_stem(name), ".safetensors"}) == main;
    if (is_shard && !contains(of_best, name)) remove_file(name);
  }
}

LOCKSTEP_INLINE bool CheckpointFolder::remove_file(const std::string& name) {
  const std::string file = text({path(), "/", name});
  if (::unlink(file.c_str()) == 0 || errno == ENOENT) return true;
  const int error = errno;
  // Training can go on beside a file too many, but whoever runs it should know.
  if (!std::exchange(has_complained_, true)) {
    std::fputs(
        text({"lockstep: checkpoints: '", file, "' cannot be removed: ", error_text(error), "\n"})
            .c_str(),
        stderr);
  }
  return false;
}

/// One of the signals that ask, and what it did before.
struct StopSignal {
  int number;
  struct sigaction before{};
  bool is_taken = false;   // ours is its handler
  std::string too_late{};  // what is said when the time is over
};

/// What the stop requests of a process share. The handler reads what was written before it was
/// installed, and the atomics.
struct StopState {
  std::mutex mutex;
  std::size_t requests = 0;
  StopSignal signals[2] = {{SIGTERM}, {SIGUSR1}};
  std::chrono::milliseconds limit{};
  timer_t timer{};
  bool has_timer = false;
  std::atomic<pid_t> process = 0;
  std::atomic<int> asked = 0;
  std::atomic<bool> is_finished = false;
  static_assert(std::atomic<int>::is_always_lock_free);
};

LOCKSTEP_INLINE StopState& stop_state() {
  // Never destroyed: a signal may come at any time.
  static StopState& state = *new StopState;
  return state;
}

/// Lets the time limit begin (or ends it, with 0). timer_settime may be called in a handler.
LOCKSTEP_INLINE void set_stop_timer(StopState& state, std::chrono::milliseconds limit) {
  if (!state.has_timer) return;
  itimerspec time{};
  time.it_value.tv_sec = static_cast<time_t>(limit.count() / 1000);
  time.it_value.tv_nsec = static_cast<long>(limit.count() % 1000 * 1'000'000);
  ::timer_settime(state.timer, 0, &time, nullptr);
}

LOCKSTEP_INLINE void handle_stop_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  StopState& state = stop_state();
  StopSignal& signal = state.signals[number == SIGTERM ? 0 : 1];
  if (state.process.load(std::memory_order_relaxed) != ::getpid()) {
    // A process that was forked from the job: the signal does there what it did before.
    ::sigaction(number, &signal.before, nullptr);
    ::raise(number);
  } else if (info != nullptr && info->si_code == SI_TIMER && info->si_value.sival_ptr == &state) {
    const int first = state.asked.load(std::memory_order_relaxed);
    const std::string& words = state.signals[first == SIGUSR1 ? 1 : 0].too_late;
    if (first != 0) {
      [[maybe_unused]] const ssize_t n = ::write(2, words.data(), words.size());
      ::_exit(128 + first);
    }
  } else {
    int nobody = 0;
    if (state.asked.compare_exchange_strong(nobody, number) &&
        !state.is_finished.load(std::memory_order_relaxed))
      set_stop_timer(state, state.limit);
    if ((signal.before.sa_flags & SA_SIGINFO) != 0) {
      signal.before.sa_sigaction(number, info, context);
    } else if (signal.before.sa_handler != SIG_DFL && signal.before.sa_handler != SIG_IGN) {
      signal.before.sa_handler(number);
    }
  }
  errno = error;
}

/// Installs the handlers that are not installed yet.
LOCKSTEP_INLINE void take_stop_signals(StopState& state) {
  for (StopSignal& signal : state.signals) {
    signal.too_late = text(
        {"lockstep: ", signal_name(signal.number), " asked this process to stop ",
         seconds_text(state.limit),
         " ago, and its step and the checkpoint have not come to an end; it ends now, and the ",
         "newest checkpoint is an older one: raise LOCKSTEP_GRACE_SECONDS\n"});
    if (signal.is_taken) continue;
    if (::sigaction(signal.number, nullptr, &signal.before) != 0) continue;
    const bool has_function = (signal.before.sa_flags & SA_SIGINFO) != 0;
    if (!has_function && signal.before.sa_handler == SIG_IGN) continue;
    struct sigaction ours{};
    ours.sa_sigaction = handle_stop_signal;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    // One at a time: the second would find the first half noted.
    ::sigemptyset(&ours.sa_mask);
    for (const StopSignal& other : state.signals) ::sigaddset(&ours.sa_mask, other.number);
    signal.is_taken = ::sigaction(signal.number, &ours, nullptr) == 0;
  }
}

LOCKSTEP_INLINE void put_stop_signals_back(StopState& state) {
  // First the timer, whose signal must not meet another's handler.
  if (state.has_timer) ::timer_delete(state.timer);
  state.has_timer = false;
  for (StopSignal& signal : state.signals) {
    if (!signal.is_taken) continue;
    // Somebody else's handler that was installed since stays.
    struct sigaction now{};
    const bool is_ours = ::sigaction(signal.number, nullptr, &now) == 0 &&
                         (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == handle_stop_signal;
    if (is_ours) ::sigaction(signal.number, &signal.before, nullptr);
    signal.is_taken = false;
  }
}

LOCKSTEP_INLINE StopRequest::StopRequest() {
  const char* const seconds = std::getenv("LOCKSTEP_GRACE_SECONDS");
  const std::chrono::milliseconds limit = seconds == nullptr
                                              ? std::chrono::seconds(60)
                                              : parse_seconds("LOCKSTEP_GRACE_SECONDS", seconds);
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  // A process that was forked from a job has none of the job's requests.
  if (state.process.load() != ::getpid()) state.requests = 0;
  if (state.requests++ != 0) return;
  // What was asked of a job that is over was not asked of this one.
  put_stop_signals_back(state);
  state.asked.store(0);
  state.is_finished.store(false);
  state.process.store(::getpid());
  state.limit = limit;
  // The time limit comes as one of the signals itself, so no other signal and no thread is needed.
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGTERM;
  event.sigev_value.sival_ptr = &state;
  state.has_timer = ::timer_create(CLOCK_MONOTONIC, &event, &state.timer) == 0;
  take_stop_signals(state);
  // The timer raises a signal that reaches our handler.
  if (!state.signals[0].is_taken && state.signals[1].is_taken && state.has_timer) {
    ::timer_delete(state.timer);
    event.sigev_signo = SIGUSR1;
    state.has_timer = ::timer_create(CLOCK_MONOTONIC, &event, &state.timer) == 0;
  }
}

LOCKSTEP_INLINE StopRequest::~StopRequest() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  if (state.requests == 0) return;  // a forked child has none
  --state.requests;
  if (state.requests != 0 || state.asked.load() != 0 || state.is_finished.load()) return;
  put_stop_signals_back(state);
}

LOCKSTEP_INLINE int StopRequest::signal() const {
  return stop_state().asked.load(std::memory_order_relaxed);
}

LOCKSTEP_INLINE void StopRequest::finished() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  state.is_finished.store(true);
  set_stop_timer(state, {});
}

LOCKSTEP_INLINE void StopRequest::forget() {
  StopState& state = stop_state();
  const std::lock_guard lock(state.mutex);
  set_stop_timer(state, {});
  state.asked.store(0);
  state.is_finished.store(false);
  if (state.requests == 0) put_stop_signals_back(state);
}

LOCKSTEP_INLINE BackgroundWriter::~BackgroundWriter() {
  thread_.join();
  if (const std::exception_ptr thrown = take_failure()) tell_late_failure({thrown, rank_});
}

LOCKSTEP_INLINE void BackgroundWriter::wait() {
  thread_.join();
  rethrow();
}

LOCKSTEP_INLINE std::exception_ptr BackgroundWriter::take_failure() {
  if (!has_failed_.load(std::memory_order_acquire)) return nullptr;
  thread_.join();  // it is on its way out, and must not hold the failure any more
  has_failed_.store(false, std::memory_order_relaxed);
  return std::exchange(failure_, nullptr);
}

LOCKSTEP_INLINE bool BackgroundWriter::is_free(WhenBusy when_busy) {
  rethrow();
  if (is_busy() && when_busy == WhenBusy::skip) return false;
  wait();
  return true;
}

LOCKSTEP_INLINE void BackgroundWriter::failed(std::exception_ptr thrown) {
  failure_ = std::move(thrown);
  has_failed_.store(true, std::memory_order_release);
  is_busy_.store(false, std::memory_order_release);
}

LOCKSTEP_INLINE void BackgroundWriter::throw_failure() { std::rethrow_exception(take_failure()); }

LOCKSTEP_INLINE Json index_of(std::span<const ShardFile> shards) {
  Json index = Json::array();
  for (const ShardFile& shard : shards) {
    index.push(Json::object()
                   .add("name", shard.name)
                   .add("bytes", shard.file.bytes)
                   .add("digest", checksum_text(shard.file.digest)));
  }
  return index;
}

LOCKSTEP_INLINE std::vector<ShardFile> shards_in(const JsonEntry& facts) {
  std::vector<ShardFile> shards;
  const auto files = facts.find("files");
  if (!files) return shards;
  for (std::size_t i = 0; i < files->items().size(); ++i) {
    const JsonEntry file = files->item(i);
    const std::string name = file.at("name").text();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || name == name_in_folder(facts.file()))
      file.at("name").fail("is not the name of another file in the same folder");
    shards.push_back({name, {file.at("bytes").natural(), file.at("digest").checksum()}});
  }
  std::vector<std::string_view> names;
  names.reserve(shards.size());
  for (const ShardFile& shard : shards) names.push_back(shard.name);
  std::ranges::sort(names);
  if (std::ranges::adjacent_find(names) != names.end()) files->fail("has a name twice");
  return shards;
}

LOCKSTEP_INLINE std::string piece_name(std::string_view whole, std::uint64_t first) {
  return text({whole, "@", first});
}

/// `name@12` is the piece of `name` from element 12 on.
struct PieceName {
  std::string_view whole;
  std::uint64_t first;
};

LOCKSTEP_INLINE std::optional<PieceName> as_piece(std::string_view name) {
  const std::size_t sign = name.rfind('@');
  if (sign == std::string_view::npos) return std::nullopt;
  const std::string_view digits = name.substr(sign + 1);
  if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  std::uint64_t first = 0;
  const char* const begin = &digits.front();
  const char* const end = begin + digits.size();
  const auto [stop, error] = std::from_chars(begin, end, first);
  if (error != std::errc() || stop != end) return std::nullopt;
  return PieceName{name.substr(0, sign), first};
}

/// The parameter or buffer that `lockstep/state/<parameter>/<state>`,
/// `lockstep/local/<rank>/<parameter>/<state>`, `lockstep/gradient/<rank>/<parameter>` or
/// `lockstep/buffer/<rank>/<buffer>` belongs to.
LOCKSTEP_INLINE std::string_view owner_of(std::string_view name) {
  constexpr std::string_view state = "lockstep/state/";
  if (name.starts_with(state)) {
    const std::size_t slash = name.rfind('/');
    return slash < state.size() ? "" : name.substr(state.size(), slash - state.size());
  }
  constexpr std::string_view local = "lockstep/local/";
  constexpr std::string_view roles[] = {"lockstep/gradient/", "lockstep/buffer/", local};
  for (const std::string_view role : roles) {
    if (!name.starts_with(role)) continue;
    const std::size_t slash = name.find('/', role.size());
    if (slash == std::string_view::npos) return "";
    const std::size_t end = role == local ? name.rfind('/') : name.size();
    return end <= slash ? "" : name.substr(slash + 1, end - slash - 1);
  }
  return "";
}

LOCKSTEP_INLINE CheckpointReader::CheckpointReader(const std::string& path) {
  files_.emplace_back(path);
  open_shards(path);
  collect();
}

LOCKSTEP_INLINE void CheckpointReader::open_shards(const std::string& path) {
  shards_ = shards_in(facts());
  if (shards_.empty()) return;
  prefer_open_files(shards_.size() + 16);
  const auto refuse = [&](std::string_view problem) {
    fail("checkpoint", {"'", path, "' is not whole: ", problem},
         "bring all its files into one folder, or take another checkpoint");
  };
  const std::string folder = folder_of(path);
  for (const ShardFile& shard : shards_) {
    const std::string shard_path = text({folder, "/", shard.name});
    try {
      files_.emplace_back(shard_path);
    } catch (const Error& error) {
      refuse(error.problem());
    }
    const SafetensorsFile& file = files_.back();
    if (file.bytes() != shard.file.bytes || file.digest() != shard.file.digest) {
      refuse(text({"its shard '", shard_path, "' is not the one that was saved with it (",
                   file.bytes(), " bytes, digest ", checksum_text(file.digest().value_or(0)), "; ",
                   shard.file.bytes, " and ", checksum_text(shard.file.digest), " are expected)"}));
    }
  }
}

LOCKSTEP_INLINE void CheckpointReader::collect() {
  const SafetensorsFile& main = files_.front();
  std::vector<std::pair<std::string_view, JsonEntry>> recorded;
  if (const auto shapes = facts().find("shapes")) {
    for (const Json::Member& shape : shapes->members())
      recorded.emplace_back(shape.first, shapes->of(shape));
  }
  using Recorded = std::pair<std::string_view, JsonEntry>;
  std::ranges::sort(recorded, {}, &Recorded::first);
  const auto recorded_shape = [&](std::string_view name) -> const JsonEntry* {
    const auto found = std::ranges::lower_bound(recorded, name, {}, &Recorded::first);
    return found == recorded.end() || found->first != name ? nullptr : &found->second;
  };
  const auto owner_shape = [&](std::string_view name) -> std::optional<std::vector<std::uint64_t>> {
    const std::string_view owner = owner_of(name);
    if (owner.empty()) return std::nullopt;
    if (const TensorEntry* const whole = main.find(owner)) return whole->shape;
    if (const JsonEntry* const shape = recorded_shape(owner)) return shape->naturals();
    return std::nullopt;
  };
  const auto piece_of = [&](const TensorEntry& entry) -> std::optional<PieceName> {
    const std::string_view name = entry.name;
    const auto piece = main.is_lockstep() ? as_piece(name) : std::nullopt;
    if (!piece || entry.shape.size() != 1) return std::nullopt;
    if (recorded_shape(piece->whole) != nullptr) return piece;
    if (!name.starts_with("lockstep/")) return std::nullopt;
    // A parameter may be called `a@1` itself; a state is never.
    if (!name.starts_with("lockstep/state/") && owner_shape(name)) return std::nullopt;
    if (!owner_shape(piece->whole))
      fail_damaged(path(), text({"nothing says how large '", piece->whole, "' is"}));
    return piece;
  };

  struct Found {
    std::string_view whole;
    bool is_piece;
    StoredPiece piece;
  };
  std::vector<Found> found;
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& entry : file.tensors()) {
      const auto piece = piece_of(entry);
      found.push_back({piece ? piece->whole : std::string_view(entry.name),
                       piece.has_value(),
                       {piece ? piece->first : 0, entry.count, &file, &entry}});
    }
  }
  std::ranges::sort(found, [](const Found& a, const Found& b) {
    if (a.whole != b.whole) return a.whole < b.whole;
    if (a.piece.first != b.piece.first) return a.piece.first < b.piece.first;
    return a.piece.count < b.piece.count;
  });
  for (std::size_t i = 0; i < found.size();) {
    const Found& first = found[i];
    const TensorEntry& entry = *first.piece.entry;
    StoredTensor tensor{std::string(first.whole), entry.element, entry.shape, entry.count, {}};
    bool is_whole = false;
    for (; i < found.size() && found[i].whole == tensor.name; ++i) {
      tensor.pieces.push_back(found[i].piece);
      is_whole = is_whole || !found[i].is_piece;
    }
    if (is_whole && tensor.pieces.size() > 1) {
      fail_damaged(path(), text({"'", tensor.name, "' is in '", tensor.pieces[0].file->path(),
                                 "' and again in '", tensor.pieces[1].file->path(), "'"}));
    }
    if (!is_whole) {
      const JsonEntry* const shape = recorded_shape(tensor.name);
      tensor.shape =
          shape != nullptr ? shape->naturals() : owner_shape(tensor.name).value_or(tensor.shape);
      join(tensor);
    }
    tensors_.push_back(std::move(tensor));
  }
}

/// Checks that the pieces make the whole.
LOCKSTEP_INLINE void CheckpointReader::join(StoredTensor& tensor) const {
  tensor.count = 1;
  for (const std::uint64_t extent : tensor.shape) {
    if (!multiply(tensor.count, extent, tensor.count))
      fail_damaged(path(), text({"the shape of '", tensor.name, "' is too large"}));
  }
  std::uint64_t place = 0;
  for (const StoredPiece& piece : tensor.pieces) {
    if (piece.entry->element != tensor.element)
      fail_damaged(path(), text({"the pieces of '", tensor.name, "' have different types"}));
    if (piece.first != place) {
      fail_damaged(path(), text({"the pieces of '", tensor.name,
                                 piece.first < place ? "' overlap at element " : "' lack element ",
                                 std::min(place, piece.first)}));
    }
    if (!add_up(place, piece.count, place) || place > tensor.count) break;
  }
  if (place != tensor.count) {
    fail_damaged(path(), text({"the pieces of '", tensor.name, "' have ", place, " elements of ",
                               tensor.count}));
  }
}

LOCKSTEP_INLINE const StoredTensor* CheckpointReader::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors_, name, {}, &StoredTensor::name);
  return found == tensors_.end() || found->name != name ? nullptr : &*found;
}

LOCKSTEP_INLINE void CheckpointReader::read(const StoredTensor& tensor, std::uint64_t first,
                                            std::uint64_t count, std::byte* to) const {
  check(first <= tensor.count && count <= tensor.count - first,
        "read no more of a tensor than there is");
  check(tensor.element->bits % 8 == 0, "read elements of whole bytes only");
  const std::uint64_t size = tensor.element->bits / 8;
  auto piece = std::ranges::upper_bound(tensor.pieces, first, {}, &StoredPiece::first);
  if (piece != tensor.pieces.begin()) --piece;
  for (; count != 0; ++piece) {
    const std::uint64_t skipped = first - piece->first;
    const std::uint64_t taken = std::min(count, piece->count - skipped);
    piece->file->read(*piece->entry, skipped * size, {to, static_cast<std::size_t>(taken * size)});
    to += taken * size;
    first += taken;
    count -= taken;
  }
}

LOCKSTEP_INLINE void CheckpointReader::verify() const {
  struct Task {
    const SafetensorsFile* file;
    const TensorEntry* tensor;
  };
  std::vector<Task> tasks;
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& tensor : file.tensors()) tasks.push_back({&file, &tensor});
  }
  std::ranges::sort(tasks, std::greater(), [](const Task& task) { return task.tensor->bytes; });

  // Whoever waits for it has nothing else to do. Large tensors come first.
  share_work(tasks.size(), [&](std::size_t i) {
    const TensorEntry& tensor = *tasks[i].tensor;
    std::vector<std::byte> memory(static_cast<std::size_t>(
        std::min<std::uint64_t>(tensor.bytes, SafetensorsFile::verify_bytes)));
    tasks[i].file->verify(tensor, memory);
  });
}

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

/// What a rank tells the others of its work: `.` and its result, or `!` and its error.
LOCKSTEP_INLINE std::string outcome_of(std::string_view operation,
                                       FunctionRef<std::string()> work) {
  try {
    std::string mine(1, '.');
    return mine.append(work());
  } catch (const Error& error) {
    return packed_error(error.operation(), error.problem(), error.advice());
  } catch (const std::exception& error) {
    return packed_error(operation, error.what(), "see to that, and call it again");
  }
}

/// The results of all ranks, or the first rank's error.
LOCKSTEP_INLINE std::vector<std::string> results_of(std::vector<std::string> all) {
  for (std::size_t rank = 0; rank != all.size(); ++rank) {
    if (all[rank].front() != '!') continue;
    std::string_view rest = std::string_view(all[rank]).substr(1);
    const std::string_view whose = take_sized(rest);
    const std::string_view problem = take_sized(rest);
    throw Error(whose, problem, take_sized(rest), Rank{rank});
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

LOCKSTEP_INLINE std::vector<std::string> work_together(const JointRanks& ranks,
                                                       std::string_view operation,
                                                       FunctionRef<std::string()> work) {
  return results_of(ranks.gather(outcome_of(operation, work)));
}

/// Rounds in which ranks tell each other whether they still work: `~`, or the outcome. A rank sends
/// one in every round until the outcomes of all are there, or one of them is that its storage is
/// dead: that ends with `!` too, and is told while the rank still waits for it.
class StorageRounds {
 public:
  StorageRounds(const JointRanks& ranks, std::string_view operation,
                const StoragePatience& patience)
      : ranks_(ranks), operation_(operation), patience_(patience), next_words_(patience.words) {
    try {
      thread_ = Thread(
          ThreadName{"lockstep alive", "the thread that says that this rank waits for storage"},
          [this] { run(); }, [this](std::exception_ptr thrown) { failure_ = std::move(thrown); });
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
      // Without a thread the rounds begin when the work is done: the others wait as long as a call
      // may take.
    }
  }
  StorageRounds(const StorageRounds&) = delete;
  StorageRounds& operator=(const StorageRounds&) = delete;

  /// The outcomes of all ranks; this one's is `mine`.
  std::vector<std::string> end(std::string mine) {
    {
      const std::lock_guard lock(mutex_);
      mine_ = std::move(mine);
      changed_.notify_all();
    }
    if (!thread_.is_running()) {
      run();
    } else {
      thread_.join();
    }
    if (failure_) std::rethrow_exception(failure_);
    return std::move(all_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr char working = '~';

  void run() {
    for (bool is_dead = false; !is_dead;) {
      all_ = ranks_.gather(next());
      bool works = false;
      for (const std::string& told : all_) {
        works = works || told.front() == working;
        is_dead = is_dead || (told.front() == '!' && told.ends_with(dead));
      }
      if (!works) break;
    }
    // The others have been told, which will end this process while it still waits: what it has been
    // writing must not stay.
    if (is_given_up_) remove_temporary_files();
  }

  /// What this rank says in the next round.
  std::string next() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, patience_.heartbeat, [&] { return mine_.has_value(); });
    if (mine_) return *mine_;
    const Clock::time_point now = Clock::now();
    if (const std::uint64_t count = storage_progress().load(); count != progress_) {
      progress_ = count;
      progressed_ = now;
    }
    const auto seconds = [&](Clock::time_point since) {
      return std::chrono::duration_cast<std::chrono::seconds>(now - since).count();
    };
    if (now - progressed_ >= patience_.longest) {
      is_given_up_ = true;
      return packed_error(
          operation_, text({"its storage has made no progress for ", seconds(progressed_), " s"}),
          dead);
    }
    if (now - begun_ >= next_words_) {
      next_words_ *= 2;
      std::fputs(
          text({"lockstep: rank ", ranks_.rank, ", ", operation_, ": waiting for storage for ",
                seconds(begun_), " s; the other ranks wait too\n"})
              .c_str(),
          stderr);
    }
    return {working};
  }

  static constexpr std::string_view dead = "see whether the disk or its server still answers";

  const JointRanks& ranks_;
  std::string_view operation_;
  const StoragePatience& patience_;
  std::chrono::milliseconds next_words_;
  Clock::time_point begun_ = Clock::now();
  Clock::time_point progressed_ = begun_;
  std::uint64_t progress_ = storage_progress().load();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> mine_;
  bool is_given_up_ = false;  // of the thread's
  std::vector<std::string> all_;
  std::exception_ptr failure_;
  Thread thread_;  // declared last: it uses the members above
};

LOCKSTEP_INLINE std::vector<std::string> store_together(const JointRanks& ranks,
                                                        std::string_view operation,
                                                        FunctionRef<std::string()> work,
                                                        const StoragePatience& patience) {
  if (ranks.world == 1) return work_together(ranks, operation, work);
  StorageRounds rounds(ranks, operation, patience);
  return results_of(rounds.end(outcome_of(operation, work)));
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

/// Names that begin so are the library's; all others are parameters and buffers.
inline constexpr std::string_view reserved_prefix = "lockstep/";

/// The name under which a piece's whole tensor is in a file. Buffers of other ranks than the first
/// have names of their own: they are there only where ranks keep their own buffers.
LOCKSTEP_INLINE std::string stored_name(const StateEntry& piece) {
  if (piece.name.starts_with(reserved_prefix))
    fail("save", {"the name ", piece.name, " begins with ", reserved_prefix},
         "give the tensor another name: these are the library's");
  switch (piece.role) {
    case StateRole::state:
      return text({"lockstep/state/", piece.name, "/", piece.state});
    case StateRole::local:
      return text({"lockstep/local/", piece.rank, "/", piece.name, "/", piece.state});
    case StateRole::buffer:
      if (piece.rank != 0) return text({"lockstep/buffer/", piece.rank, "/", piece.name});
      break;
    case StateRole::parameter:
      break;
  }
  return std::string(piece.name);
}

/// A name in its parts: `lockstep/state/<parameter>/<state>`, `lockstep/buffer/<rank>/<name>`,
/// `lockstep/local/<rank>/<parameter>/<state>`, or a parameter's
/// or buffer's alone.
struct StoredName {
  enum class Kind : std::uint8_t { plain, state, buffer, local, other } kind = Kind::plain;
  std::string_view name;   // of the parameter or buffer
  std::string_view extra;  // the state, or the rank
  std::string_view state;  // of a rank's own
};

LOCKSTEP_INLINE StoredName parse_stored_name(std::string_view name) {
  using Kind = StoredName::Kind;
  if (!name.starts_with(reserved_prefix)) return {Kind::plain, name, {}, {}};
  const std::string_view rest = name.substr(reserved_prefix.size());
  const auto after = [&](std::string_view prefix) {
    return rest.starts_with(prefix) ? rest.substr(prefix.size()) : std::string_view();
  };
  if (const std::string_view state = after("state/"); !state.empty()) {
    const std::size_t slash = state.rfind('/');
    if (slash != std::string_view::npos)
      return {Kind::state, state.substr(0, slash), state.substr(slash + 1), {}};
  }
  if (const std::string_view of_rank = after("buffer/"); !of_rank.empty()) {
    const std::size_t slash = of_rank.find('/');
    if (slash != std::string_view::npos)
      return {Kind::buffer, of_rank.substr(slash + 1), of_rank.substr(0, slash), {}};
  }
  if (const std::string_view local = after("local/"); !local.empty()) {
    const std::size_t first = local.find('/');
    const std::size_t last = local.rfind('/');
    if (first != std::string_view::npos && first < last)
      return {Kind::local, local.substr(first + 1, last - first - 1), local.substr(0, first),
              local.substr(last + 1)};
  }
  return {Kind::other, name, {}, {}};
}

/// The same with another parameter's or buffer's name.
LOCKSTEP_INLINE std::string renamed(const StoredName& stored, std::string_view name) {
  switch (stored.kind) {
    case StoredName::Kind::state:
      return text({"lockstep/state/", name, "/", stored.extra});
    case StoredName::Kind::buffer:
      return text({"lockstep/buffer/", stored.extra, "/", name});
    case StoredName::Kind::local:
      return text({"lockstep/local/", stored.extra, "/", name, "/", stored.state});
    default:
      return std::string(name);
  }
}

/// Everything that a checkpoint says beside tensors.
struct CheckpointFacts {
  std::string version;  ///< of the library that wrote it
  std::string time;     ///< in UTC
  JobShape shape;
  ReplicaProgress progress;
  /// Of a step that was under way: version 1.x saved their gradients too.
  std::uint64_t micro_batches_under_way = 0;
  std::uint64_t epoch = 0;
  std::optional<double> best;
  std::optional<SamplerState> position;
  Scores scores;
  std::vector<std::vector<SavedValue>> values;  ///< of the program, by rank
  std::vector<SavedValue> common;               ///< of the program, for all ranks
};

/// The time now, `2026-11-16T05:23:49Z`.
LOCKSTEP_INLINE std::string utc_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char words[32];
  return {words, std::strftime(words, sizeof words, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

// The program's values.

LOCKSTEP_INLINE bool is_tensor(const SavedValue& value) {
  return value.kind == ValueKind::text || value.kind == ValueKind::numbers;
}
/// `whose` is a rank, or `common`.
LOCKSTEP_INLINE std::string value_tensor_name(std::string_view whose, std::string_view name) {
  return text({"lockstep/value/", whose, "/", name});
}

/// Calls `f(std::type_identity<T>{})` with the type of a number.
template <class F>
void with_number(ElementKind kind, const F& f) {
  const auto with = [&]<std::size_t... I>(std::index_sequence<I...>) {
    ((static_cast<std::size_t>(kind) == I + 1
          ? f(std::type_identity<std::tuple_element_t<I + 1, ElementTypes>>{})
          : void()),
     ...);
  };
  with(std::make_index_sequence<element_kinds - 1>{});
}

LOCKSTEP_INLINE Json json_of(const SavedValue& value) {
  Json json = Json::object().add("type", value.type());
  if (value.kind == ValueKind::truth) {
    json.add("value", value.bytes.front() != 0);
  } else if (value.kind == ValueKind::random_stream) {
    std::uint64_t state[2] = {};
    std::memcpy(state, value.bytes.data(), sizeof state);
    json.add("value", Json::array_of(state));
  } else if (value.kind == ValueKind::number) {
    with_number(value.element, [&]<class T>(std::type_identity<T>) {
      T number{};
      std::memcpy(&number, value.bytes.data(), sizeof number);
      if constexpr (std::integral<T>) {
        json.add("value", Json(number));
      } else {
        json.add("value", Json(static_cast<double>(static_cast<Accumulator<T>>(number))));
      }
    });
  }
  return json;
}

/// The bytes of a number. A number that its type cannot hold was written by nobody.
LOCKSTEP_INLINE std::string number_bytes(const JsonEntry& entry, ElementKind element) {
  std::string bytes;
  with_number(element, [&]<class T>(std::type_identity<T>) {
    T number{};
    if constexpr (std::signed_integral<T>) {
      const std::int64_t value = entry.integer();
      if (!std::in_range<T>(value)) entry.fail("is too large for its type");
      number = static_cast<T>(value);
    } else if constexpr (std::integral<T>) {
      const std::uint64_t value = entry.natural();
      if (!std::in_range<T>(value)) entry.fail("is too large for its type");
      number = static_cast<T>(value);
    } else {
      number = static_cast<T>(static_cast<Accumulator<T>>(entry.real()));
    }
    bytes.assign(reinterpret_cast<const char*>(&number), sizeof number);
  });
  return bytes;
}

LOCKSTEP_INLINE SavedValue value_of(const JsonEntry& entry, std::string name) {
  SavedValue value{std::move(name), ValueKind::number, ElementKind::unsupported, {}};
  std::string_view type = entry.at("type").text();
  if (type == "bool") {
    value.kind = ValueKind::truth;
    value.element = ElementKind::u8;
    value.bytes.assign(1, entry.at("value").boolean() ? '\1' : '\0');
  } else if (type == "text") {
    value.kind = ValueKind::text;
    value.element = ElementKind::u8;
  } else if (type == "RandomStream") {
    value.kind = ValueKind::random_stream;
    value.element = ElementKind::u64;
    const std::vector<std::uint64_t> state = entry.at("value").naturals();
    if (state.size() != 2) entry.fail("is no state of a random stream");
    value.bytes.assign(reinterpret_cast<const char*>(state.data()), 2 * sizeof state[0]);
  } else {
    if (type.ends_with("[]")) {
      value.kind = ValueKind::numbers;
      type.remove_suffix(2);
    }
    for (std::size_t kind = 1; kind != element_kinds; ++kind)
      if (element_name(static_cast<ElementKind>(kind)) == type)
        value.element = static_cast<ElementKind>(kind);
    if (value.element == ElementKind::unsupported) entry.fail("has a type that nobody knows");
    if (value.kind == ValueKind::number)
      value.bytes = number_bytes(entry.at("value"), value.element);
  }
  return value;
}

LOCKSTEP_INLINE Json json_of(const std::vector<SavedValue>& values) {
  Json json = Json::object();
  for (const SavedValue& value : values) json.add(value.name, json_of(value));
  return json;
}

LOCKSTEP_INLINE void add_value_tensors(std::string_view whose,
                                       const std::vector<SavedValue>& values,
                                       std::vector<TensorToWrite>& to) {
  for (const SavedValue& value : values) {
    if (!is_tensor(value)) continue;
    to.push_back({value_tensor_name(whose, value.name),
                  value.element,
                  {value.bytes.size() / element_size(value.element)},
                  std::as_bytes(std::span(value.bytes))});
  }
}

LOCKSTEP_INLINE void add_value_tensors(const CheckpointFacts& facts,
                                       std::vector<TensorToWrite>& to) {
  for (std::size_t rank = 0; rank != facts.values.size(); ++rank)
    add_value_tensors(std::to_string(rank), facts.values[rank], to);
  add_value_tensors("common", facts.common, to);
}

LOCKSTEP_INLINE std::vector<SavedValue> read_values(const CheckpointReader& reader,
                                                    const JsonEntry& entries,
                                                    std::string_view whose) {
  std::vector<SavedValue> values;
  for (const Json::Member& member : entries.members()) {
    SavedValue value = value_of(entries.of(member), member.first);
    if (is_tensor(value)) {
      const StoredTensor* const stored = reader.find(value_tensor_name(whose, value.name));
      if (stored == nullptr || stored->kind() != value.element)
        entries.of(member).fail("has no such tensor");
      value.bytes.resize(stored->count * element_size(value.element));
      reader.read(*stored, 0, stored->count, reinterpret_cast<std::byte*>(value.bytes.data()));
    }
    values.push_back(std::move(value));
  }
  return values;
}

LOCKSTEP_INLINE std::vector<SavedValue> read_values(const CheckpointReader& reader,
                                                    std::size_t rank) {
  const std::optional<JsonEntry> all = reader.facts().find("values");
  if (!all || rank >= all->items().size()) return {};
  return read_values(reader, all->item(rank), std::to_string(rank));
}

LOCKSTEP_INLINE std::vector<SavedValue> read_common_values(const CheckpointReader& reader) {
  const std::optional<JsonEntry> common = reader.facts().find("common");
  return common ? read_values(reader, *common, "common") : std::vector<SavedValue>();
}

// Everything else.

LOCKSTEP_INLINE Json json_of(const ReplicaProgress& progress) {
  Json json = Json::object();
  json.add("updates", progress.updates);
  json.add("counted", progress.counted);
  json.add("skipped", progress.skipped);
  json.add("epoch", progress.epoch);
  json.add("knows_epoch", progress.knows_epoch);
  json.add("curve_ahead", progress.curve_ahead);
  json.add("micro_batches", 0);  // of a step under way, for older readers
  if (progress.newest_buffers) json.add("newest_buffers", *progress.newest_buffers);
  if (progress.random_seed) json.add("random_seed", *progress.random_seed);
  if (progress.loss_scale) {
    json.add("loss_scale", Json::object()
                               .add("scale", static_cast<double>(progress.loss_scale->scale))
                               .add("good_steps", progress.loss_scale->good_steps));
  }
  Json numbers = Json::object();
  for (const NamedNumber& number : progress.numbers)
    numbers.set(number.name, std::visit([](auto value) { return Json(value); }, number.value));
  json.add("numbers", std::move(numbers));
  return json;
}

LOCKSTEP_INLINE ReplicaProgress progress_of(const JsonEntry& entry) {
  ReplicaProgress progress;
  progress.updates = entry.at("updates").natural();
  progress.counted = entry.at("counted").natural();
  progress.skipped = entry.at("skipped").natural();
  progress.epoch = entry.at("epoch").natural();
  progress.knows_epoch = entry.at("knows_epoch").boolean();
  progress.curve_ahead = entry.at("curve_ahead").natural();
  if (const auto newest = entry.find("newest_buffers")) progress.newest_buffers = newest->natural();
  if (const auto seed = entry.find("random_seed")) progress.random_seed = seed->natural();
  if (const auto scale = entry.find("loss_scale")) {
    progress.loss_scale.emplace();
    progress.loss_scale->scale = static_cast<float>(scale->at("scale").real());
    progress.loss_scale->good_steps = static_cast<std::uint32_t>(scale->at("good_steps").natural());
  }
  const JsonEntry numbers = entry.at("numbers");
  for (const Json::Member& number : numbers.members()) {
    NamedNumber& named = progress.numbers.emplace_back();
    named.name = number.first;
    if (const auto* natural = number.second.get_if<std::uint64_t>()) {
      named.value = *natural;
    } else if (const auto* integer = number.second.get_if<std::int64_t>()) {
      named.value = *integer;
    } else {
      named.value = numbers.of(number).real();
    }
  }
  return progress;
}

LOCKSTEP_INLINE Json json_of(const SamplerState& state) {
  Json json = Json::object();
  json.add("samples", state.samples);
  json.add("world", state.world.value());
  json.add("seed", state.seed.value());
  json.add("rule", state.rule);
  json.add("epoch", state.epoch.value());
  json.add("first", state.first);
  json.add("position", state.position);
  return json;
}

LOCKSTEP_INLINE SamplerState sampler_state_of(const JsonEntry& entry) {
  SamplerState state;
  state.samples = entry.at("samples").natural();
  state.world = WorldSize{entry.at("world").natural()};
  state.seed = Seed{entry.at("seed").natural()};
  state.rule = entry.at("rule").natural();
  state.epoch = Epoch{entry.at("epoch").natural()};
  state.first = entry.at("first").natural();
  state.position = entry.at("position").natural();
  return state;
}

/// What a file of parameters alone says beside tensors: nothing that depends on how its job has
/// come to them, so that the same parameters are the same file.
LOCKSTEP_INLINE Json parameters_only_facts() {
  return Json::object().add("version", version).add("parameters_only", true);
}

LOCKSTEP_INLINE bool has_parameters_only(const CheckpointReader& reader) {
  return reader.facts().find("parameters_only").has_value();
}

/// The facts as JSON. Texts and lists of numbers among the values are no part of it: they become
/// tensors, which point into the facts.
LOCKSTEP_INLINE Json json_of(const CheckpointFacts& facts) {
  Json json = Json::object();
  json.add("version", facts.version);
  json.add("time", facts.time);
  json.add("policies", Json::array_of(facts.shape.policies));
  json.add("fingerprint", checksum_text(facts.shape.fingerprint));
  json.add("world", facts.shape.world);
  json.add("epoch", facts.epoch);
  json.add("step", facts.progress.updates);
  if (facts.best) json.add("best", *facts.best);
  if (!facts.scores.empty()) {
    Json scores = Json::object();
    for (const Score& score : facts.scores)
      scores.set(score.name, Json::object().add("mean", score.mean).add("count", score.count));
    json.add("scores", std::move(scores));
  }
  json.add("progress", json_of(facts.progress));
  json.add("gradients", Json::object()
                            .add("replicas", facts.shape.replicas)
                            .add("divisor", facts.shape.gradient_divisor)
                            .add("micro_batches", facts.shape.micro_batches));
  if (facts.position) json.add("sampler", json_of(*facts.position));
  Json values = Json::array();
  bool any = false;
  for (const std::vector<SavedValue>& of_rank : facts.values) {
    any = any || !of_rank.empty();
    values.push(json_of(of_rank));
  }
  if (any) json.add("values", std::move(values));
  if (!facts.common.empty()) json.add("common", json_of(facts.common));
  return json;
}

/// A number of ranks, over which loops are made.
LOCKSTEP_INLINE std::size_t rank_count(const JsonEntry& entry) {
  constexpr std::uint64_t most = std::uint64_t{1} << 20;
  const std::uint64_t count = entry.natural();
  if (count == 0 || count > most) entry.fail("is no number of ranks");
  return count;
}

/// The facts of a checkpoint without the program's values.
LOCKSTEP_INLINE CheckpointFacts read_facts(const CheckpointReader& reader) {
  const JsonEntry entry = reader.facts();
  CheckpointFacts facts;
  facts.version = entry.at("version").text();
  facts.time = entry.at("time").text();
  const JsonEntry policies = entry.at("policies");
  for (std::size_t i = 0; i != policies.items().size(); ++i)
    facts.shape.policies.push_back(policies.item(i).text());
  facts.shape.fingerprint = entry.at("fingerprint").checksum();
  facts.shape.world = rank_count(entry.at("world"));
  facts.epoch = entry.at("epoch").natural();
  if (const auto best = entry.find("best")) facts.best = best->real();
  if (const auto scores = entry.find("scores")) {
    std::vector<Score> all;
    for (const Json::Member& score : scores->members())
      all.push_back(
          {score.first, scores->of(score).at("mean").real(), scores->of(score).at("count").real()});
    facts.scores = Scores(std::move(all));
  }
  facts.progress = progress_of(entry.at("progress"));
  facts.micro_batches_under_way = entry.at("progress").at("micro_batches").natural();
  const JsonEntry gradients = entry.at("gradients");
  facts.shape.replicas = rank_count(gradients.at("replicas"));
  facts.shape.gradient_divisor = gradients.at("divisor").real();
  if (!(facts.shape.gradient_divisor >= 1 &&
        facts.shape.gradient_divisor <= static_cast<double>(facts.shape.replicas)))
    gradients.at("divisor").fail("is not between 1 and the number of replicas");
  facts.shape.micro_batches = gradients.at("micro_batches").natural();
  if (const auto sampler = entry.find("sampler")) facts.position = sampler_state_of(*sampler);
  return facts;
}

/// Another rank's file beside that of rank 0.
struct ExpectedShard {
  std::size_t rank;
  std::string name;  // within the folder
};

/// The name of a rank's file, and a file in the folder of `path`. A token is new for every save, so
/// that nothing is overwritten.
LOCKSTEP_INLINE std::string shard_name(std::string_view path, std::string_view token,
                                       std::size_t rank, std::size_t world) {
  constexpr std::string_view ending = ".safetensors";
  std::string_view stem = name_in_folder(path);
  if (stem.ends_with(ending)) stem.remove_suffix(ending.size());
  return text({stem, ".", token, ".rank-", rank, "-of-", world, ending});
}

LOCKSTEP_INLINE std::string beside(std::string_view path, std::string_view name) {
  return text({folder_of(path), "/", name});
}

/// The shards of the file that is about to be replaced. None where another name is linked to that
/// file, which needs them.
LOCKSTEP_INLINE std::vector<std::string> shards_to_replace(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0 || status.st_nlink > 1) return {};
  std::vector<std::string> names;
  try {
    for (const ShardFile& shard : shards_in(SafetensorsFile(path).facts()))
      names.push_back(shard.name);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it was no checkpoint, and has none
  }
  return names;
}

LOCKSTEP_INLINE void remove_beside(std::string_view path, std::string_view name) {
  ::unlink(beside(path, name).c_str());
}

/// Writes rank 0's file: with its rename all files are the checkpoint, and not before. Then removes
/// the shards of the file that it has replaced; where it fails, those of this one.
LOCKSTEP_INLINE void commit(const std::string& path, FileToWrite& file,
                            const std::vector<ShardFile>& shards) {
  if (!shards.empty()) file.facts.set("files", index_of(shards));
  const std::vector<std::string> replaced = shards_to_replace(path);
  try {
    write_file(path, file);
  } catch (...) {
    for (const ShardFile& shard : shards) remove_beside(path, shard.name);
    throw;
  }
  for (const std::string& name : replaced) remove_beside(path, name);
}

/// A file with the tensors of a checkpoint, which are read when they are written.
LOCKSTEP_INLINE FileToWrite joined_file(const CheckpointReader& parts, Json facts,
                                        std::vector<std::byte>& window) {
  FileToWrite file;
  file.facts = std::move(facts);
  for (const StoredTensor& tensor : parts.tensors()) {
    const std::size_t size = element_size(tensor.kind());
    const auto bytes = static_cast<std::size_t>(tensor.count) * size;
    const auto read = [&parts, &tensor, &window, size](std::uint64_t at, std::size_t n) {
      parts.read(tensor, at / size, n / size, window.data());
      return std::span<const std::byte>(window.data(), n);
    };
    file.tensors.push_back({tensor.name,
                            tensor.kind(),
                            tensor.shape,
                            {static_cast<const std::byte*>(nullptr), bytes},
                            read});
  }
  return file;
}

/// The same, with all tensors in the one file. The parts, and rank 0's own that is `part`, are
/// removed.
LOCKSTEP_INLINE void commit_whole(const std::string& path, const std::string& part,
                                  FileToWrite& file, const std::vector<ShardFile>& shards) {
  Json facts = file.facts;  // without the index of the parts
  facts.take("shapes");     // of what the parts do not have whole
  const auto remove_parts = [&] {
    ::unlink(part.c_str());
    for (const ShardFile& shard : shards) remove_beside(path, shard.name);
  };
  try {
    file.facts.set("files", index_of(shards));
    write_file(part, file);
    const CheckpointReader parts(part);
    std::vector<std::byte> window(write_chunk_bytes);
    FileToWrite whole = joined_file(parts, std::move(facts), window);
    whole.metadata = file.metadata;
    commit(path, whole, {});
  } catch (...) {
    remove_parts();
    throw;
  }
  remove_parts();
}

/// How long rank 0 waits for another rank's part of an asynchronous save.
inline constexpr std::chrono::minutes longest_shard_wait{30};

/// The other ranks' files, which are there as soon as they are whole. Nothing where `is_given_up`
/// becomes true. **Host** blocks.
LOCKSTEP_INLINE std::optional<std::vector<ShardFile>> await_shards(
    const std::string& path, const std::vector<ExpectedShard>& expected,
    const std::atomic<bool>& is_given_up) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + longest_shard_wait;
  std::vector<ShardFile> shards;
  std::chrono::milliseconds pause{1};
  while (shards.size() != expected.size()) {
    const ExpectedShard& next = expected[shards.size()];
    const std::string missing = beside(path, next.name);
    if (::access(missing.c_str(), F_OK) == 0) {
      const SafetensorsFile shard(missing);
      shards.push_back({next.name, {shard.bytes(), shard.digest().value_or(0)}});
      continue;
    }
    if (is_given_up.load()) return std::nullopt;
    struct stat folder{};
    if (::stat(folder_of(path).c_str(), &folder) != 0 || folder.st_nlink == 0)
      fail_writing(path, ENOENT);  // what is not there will get no file
    if (Clock::now() > deadline) {
      for (const ShardFile& shard : shards) remove_beside(path, shard.name);
      fail("save",
           {"rank ", next.rank, " has not written its part '", missing, "' within ",
            longest_shard_wait.count(), " minutes"},
           "see whether that rank writes to the same folder");
    }
    sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(32));
  }
  return shards;
}

/// The name of the call that loads it.
LOCKSTEP_INLINE std::string_view operation_of(LoadWhat what) {
  constexpr std::string_view names[] = {"load_parameters", "load", "resume"};
  return names[static_cast<std::size_t>(what)];
}

/// A piece of the job, and the tensors of the file from which it is read: one, except for what
/// ranks keep for themselves, which is the sum of all of them.
struct LoadedPiece {
  StateEntry piece;
  std::vector<const StoredTensor*> sources;
};

/// One rank's part of a load.
struct LoadPlan {
  std::unique_ptr<CheckpointReader> reader;
  CheckpointFacts facts;  // without the program's values
  std::vector<LoadedPiece> pieces;
  std::vector<LoadedPiece> residuals;  // what ranks have of gradients, and did not send
  std::vector<LoadedPiece> averaged;
  std::vector<SavedValue> values;
  std::vector<SavedValue> common;
  LoadReport report;
  std::vector<std::string> notes;
};

using Names = std::vector<std::string>;

/// What a rank finds when it compares the file with its job.
struct LoadFindings {
  Names missing;
  Names unused;      // what no rank uses is unexpected
  Names mismatches;  // in words

  std::string packed() const {
    std::string text;
    for (const Names* names : {&missing, &unused, &mismatches}) {
      std::string list;
      for (const std::string& name : *names) append_sized(list, name);
      append_sized(text, list);
    }
    return text;
  }
  static LoadFindings unpack(std::string_view text) {
    LoadFindings found;
    for (Names* names : {&found.missing, &found.unused, &found.mismatches}) {
      std::string_view list = take_sized(text);
      while (!list.empty()) names->emplace_back(take_sized(list));
    }
    return found;
  }
};

/// Opens a checkpoint, verifies it on rank 0 and compares it with the job on every rank. Throws on
/// all ranks, where it does not fit or cannot be read on one.
class LoadPlanning {
 public:
  LoadPlanning(const StatefulJob& job, const std::string& path, const LoadOptions& options,
               LoadWhat what)
      : job_(job), path_(path), options_(options), what_(what) {}

  LoadPlan run() {
    open();
    judge(together([&] { return match().packed(); }));
    return std::move(plan_);
  }

 private:
  std::string_view operation() const { return operation_of(what_); }
  /// Calls `f()` on all ranks; none goes on where one has failed.
  template <class F>
  std::vector<std::string> together(const F& f) const {
    return store_together(job_.ranks, operation(), f);
  }

  void open();
  LoadFindings match();
  void name_tensors();
  const StoredTensor* find(const std::string& name) const;
  void want(const StateEntry& piece, LoadFindings& found, std::set<const StoredTensor*>& used);
  void want_residual(const StateEntry& piece, LoadFindings& found);
  void want_local(const StateEntry& piece, LoadFindings& found);
  bool fits(const StateEntry& piece, const StoredTensor& stored, LoadFindings& found) const;
  StateEntry own_part(const StateEntry& piece) const;
  void compare_kept_values(LoadFindings& found);
  void judge(const std::vector<std::string>& told);

  const StatefulJob& job_;
  const std::string& path_;
  const LoadOptions& options_;
  LoadWhat what_;
  LoadPlan plan_;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;  // by their names in the job
};

LOCKSTEP_INLINE void LoadPlanning::open() {
  require_same_path(job_.ranks, operation(), together([&] { return path_; }));
  const std::vector<std::string> digests = together([&] {
    plan_.reader = std::make_unique<CheckpointReader>(path_);
    if (what_ != LoadWhat::parameters) {
      if (has_parameters_only(*plan_.reader))
        fail(operation(),
             {"'", path_, "' is a file of parameters and buffers only, and has no training state"},
             "call load_parameters, or name a checkpoint that was saved without parameters_only");
      if (!plan_.reader->facts().find("progress"))
        fail(operation(), {"'", path_, "' was not saved by lockstep, and has no optimizer"},
             "call load_parameters, which loads parameters and buffers of any safetensors file");
      plan_.facts = read_facts(*plan_.reader);
    }
    if (job_.ranks.rank == Rank{0}) plan_.reader->verify();
    const std::uint64_t digest =
        plan_.reader->main_file().digest().value_or(plan_.reader->main_file().bytes());
    return std::string(reinterpret_cast<const char*>(&digest), sizeof digest);
  });
  for (std::size_t rank = 1; rank < digests.size(); ++rank) {
    if (digests[rank] != digests[0])
      fail(operation(), {"rank ", rank, " and rank 0 see different files at '", path_, "'"},
           "give all ranks the same file, which nobody replaces while it is read", job_.ranks.rank);
  }
}

// Names, shapes and types.

LOCKSTEP_INLINE void LoadPlanning::name_tensors() {
  for (const StoredTensor& stored : plan_.reader->tensors()) {
    const StoredName parts = parse_stored_name(stored.name);
    std::string name = stored.name;
    if (parts.kind == StoredName::Kind::other) continue;
    if (options_.rename) {
      const std::string wanted = options_.rename(parts.name);
      if (wanted.empty()) continue;
      name = renamed(parts, wanted);
    }
    const auto [place, is_new] = tensors_.try_emplace(std::move(name), &stored);
    if (!is_new)
      fail(operation(),
           {"both '", place->second->name, "' and '", stored.name, "' of '", path_, "' become '",
            place->first, "'"},
           "give every tensor a name of its own in .rename");
  }
}

LOCKSTEP_INLINE const StoredTensor* LoadPlanning::find(const std::string& name) const {
  const auto place = tensors_.find(name);
  return place == tensors_.end() ? nullptr : place->second;
}

LOCKSTEP_INLINE bool LoadPlanning::fits(const StateEntry& piece, const StoredTensor& stored,
                                        LoadFindings& found) const {
  const std::vector<std::uint64_t> shape(
      piece.whole.extents.begin(),
      piece.whole.extents.begin() + static_cast<std::ptrdiff_t>(piece.whole.rank));
  if (stored.shape != shape) {
    found.mismatches.push_back(
        text({"size mismatch for ", printable(stored.name), ": ", shape_text(stored.shape),
              " in the file, ", shape_text(shape), " in the job"}));
    return false;
  }
  const bool convertible = is_floating(stored.kind()) && is_floating(piece.whole.element);
  const bool may_differ = options_.convert || (piece.role == StateRole::local && !piece.averaged);
  if (stored.kind() == piece.whole.element || (convertible && may_differ)) return true;
  found.mismatches.push_back(
      text({"type mismatch for ", printable(stored.name), ": ", stored.element->name,
            " in the file, ", element_name(piece.whole.element), " in the job",
            convertible ? " (.convert = true rounds it)" : ""}));
  return false;
}

/// Of memory that ranks share each writes a part; replicas of one process leave it to the first.
LOCKSTEP_INLINE StateEntry LoadPlanning::own_part(const StateEntry& piece) const {
  if (!piece.shared) return piece;
  if (job_.is_one_process) return piece.part(0, piece.rank == 0 ? piece.count : 0);
  const std::size_t me = job_.ranks.rank.value();
  const std::size_t share = piece.count / job_.ranks.world;
  const bool is_last = me + 1 == job_.ranks.world;
  return piece.part(me * share, is_last ? piece.count - me * share : share);
}

LOCKSTEP_INLINE void LoadPlanning::want(const StateEntry& piece, LoadFindings& found,
                                        std::set<const StoredTensor*>& used) {
  const StoredTensor* stored = nullptr;
  std::string name = stored_name(piece);
  if (piece.role == StateRole::buffer) {
    const bool own = job_.shape.keeps_own_buffers && what_ != LoadWhat::parameters;
    if (own) stored = find(name);
    name = piece.name;
  }
  if (stored == nullptr) stored = find(name);
  // A file of another program may have one of several names.
  for (const NameAlias& alias : job_.aliases)
    if (stored == nullptr && alias.of == name) stored = find(alias.name);
  if (stored == nullptr) {
    // Without counts of single parameters, theirs is the count of all.
    if (piece.role != StateRole::state || piece.state != "step") found.missing.push_back(name);
    return;
  }
  used.insert(stored);
  if (fits(piece, *stored, found)) plan_.pieces.push_back({own_part(piece), {stored}});
}

/// Replica r of n goes on with what the replicas r, r + n, ... had not sent of their gradients.
LOCKSTEP_INLINE void LoadPlanning::want_residual(const StateEntry& piece, LoadFindings& found) {
  LoadedPiece loaded{piece, {}};
  for (std::size_t k = piece.rank; k < plan_.facts.shape.replicas; k += job_.shape.replicas) {
    StateEntry of_rank = piece;
    of_rank.rank = k;
    const StoredTensor* const stored = find(stored_name(of_rank));
    if (stored != nullptr && fits(piece, *stored, found)) loaded.sources.push_back(stored);
  }
  if (!loaded.sources.empty()) plan_.residuals.push_back(std::move(loaded));
}

/// What a rank had for itself it has again. Where there were more ranks or fewer, all go on with
/// the mean, as after the average that they would have made next.
LOCKSTEP_INLINE void LoadPlanning::want_local(const StateEntry& piece, LoadFindings& found) {
  if (what_ == LoadWhat::parameters) return;
  if (!piece.averaged) return want_residual(piece, found);
  LoadedPiece loaded{piece, {}};
  const bool same = plan_.facts.shape.replicas == job_.shape.replicas;
  for (std::size_t k = 0; k != plan_.facts.shape.replicas; ++k) {
    if (same && k != piece.rank) continue;
    StateEntry of_rank = piece;
    of_rank.rank = k;
    const StoredTensor* const stored = find(stored_name(of_rank));
    if (stored != nullptr && fits(piece, *stored, found)) loaded.sources.push_back(stored);
  }
  if (!loaded.sources.empty()) plan_.averaged.push_back(std::move(loaded));
}

LOCKSTEP_INLINE LoadFindings LoadPlanning::match() {
  name_tensors();
  LoadFindings found;
  std::set<const StoredTensor*> used;
  std::set<std::string_view> known;  // parameters and buffers of the job
  for (const StateEntry& piece : job_.entries(StateUse::loading)) {
    const bool is_plain = piece.role == StateRole::parameter || piece.role == StateRole::buffer;
    if (is_plain) known.insert(piece.name);
    if (piece.role == StateRole::local) {
      want_local(piece, found);
    } else if (is_plain || what_ != LoadWhat::parameters) {
      want(piece, found, used);
    }
  }
  std::set<std::string_view> aliases;
  for (const NameAlias& alias : job_.aliases) aliases.insert(alias.name);
  for (const auto& [name, stored] : tensors_) {
    if (used.contains(stored) || aliases.contains(name)) continue;
    const StoredName parts = parse_stored_name(name);
    const bool is_unknown_state = parts.kind == StoredName::Kind::state &&
                                  what_ != LoadWhat::parameters && parts.extra != "step" &&
                                  known.contains(parts.name);
    if (parts.kind == StoredName::Kind::plain || is_unknown_state) found.unused.push_back(name);
  }
  if (what_ == LoadWhat::job) {
    compare_kept_values(found);
    if (const std::uint64_t batches = plan_.facts.micro_batches_under_way; batches != 0)
      plan_.notes.push_back(text({"saved after ", batches,
                                  " micro-batches of a step, which are forgotten: newer versions "
                                  "save after updates"}));
  }
  return found;
}

LOCKSTEP_INLINE void LoadPlanning::compare_kept_values(LoadFindings& found) {
  const auto compare = [&](const KeptValues& wanted, const std::vector<SavedValue>& saved,
                           std::string_view whose) {
    const ValueDifferences differences = compare_values(wanted, saved);
    for (const std::string& name : differences.missing)
      found.missing.push_back(text({"the value ", name, whose}));
    for (const std::string& words : differences.other_types)
      found.mismatches.push_back(text({"type mismatch for the value ", words}));
    for (const std::string& name : differences.unexpected)
      if (!name.starts_with(reserved_prefix))  // those are a trainer's own
        plan_.notes.push_back(
            text({"the file has a value ", name, whose, " that nobody has asked for"}));
  };
  plan_.common = read_common_values(*plan_.reader);
  compare(options_.common, plan_.common, "");
  const std::size_t me = job_.ranks.rank.value();
  if (me < plan_.facts.shape.world) {
    plan_.values = read_values(*plan_.reader, me);
    compare(options_.values, plan_.values, text({" of rank ", me}));
  } else if (!options_.values.empty()) {
    plan_.notes.push_back(text({"rank ", me, " is new, and its values stay as they are"}));
  }
}

LOCKSTEP_INLINE std::string short_list(const Names& names) {
  constexpr std::size_t most = 24;
  std::string list;
  for (std::size_t i = 0; i < std::min(most, names.size()); ++i)
    list += (i == 0 ? "" : ", ") + printable(names[i]);
  if (names.size() > most) list += text({" and ", names.size() - most, " more"});
  return list;
}

/// Throws unless the findings of all ranks let the job be loaded.
LOCKSTEP_INLINE void LoadPlanning::judge(const std::vector<std::string>& told) {
  std::set<std::string> missing;
  std::set<std::string> mismatches;
  std::map<std::string, std::size_t> unused;
  for (const std::string& text : told) {
    LoadFindings found = LoadFindings::unpack(text);
    missing.insert(found.missing.begin(), found.missing.end());
    mismatches.insert(found.mismatches.begin(), found.mismatches.end());
    for (const std::string& name : found.unused) ++unused[name];
  }
  plan_.report.missing.assign(missing.begin(), missing.end());
  for (const auto& [name, ranks] : unused)
    if (ranks == told.size()) plan_.report.unexpected.push_back(name);
  const bool is_strange =
      options_.strict && !(plan_.report.missing.empty() && plan_.report.unexpected.empty());
  if (mismatches.empty() && !is_strange) return;
  Names problems;
  if (options_.strict && !plan_.report.missing.empty())
    problems.push_back("missing in the file: " + short_list(plan_.report.missing));
  if (options_.strict && !plan_.report.unexpected.empty())
    problems.push_back("unexpected in the file: " + short_list(plan_.report.unexpected));
  problems.insert(problems.end(), mismatches.begin(), mismatches.end());
  std::string problem = text({"'", path_, "' does not fit this job: "});
  for (std::size_t i = 0; i != problems.size(); ++i) problem += (i == 0 ? "" : "; ") + problems[i];
  throw Error(operation(), problem,
              is_strange ? "load a file of the same model and optimizer, translate names with "
                           ".rename, or load what both have with .strict = false"
                         : "load a file of the same model",
              job_.ranks.rank);
}

/// Tensors that are not read to where they belong are read by parts of this size.
inline constexpr std::size_t staging_bytes = std::size_t{8} << 20;
inline constexpr std::size_t staged_elements = staging_bytes / 8;

/// Reads pieces of a checkpoint into a job.
class PieceReader {
 public:
  PieceReader(const StatefulJob& job, const CheckpointReader& reader)
      : job_(job), reader_(reader) {}

  void read(const std::vector<LoadedPiece>& pieces);
  void read_sum(const LoadedPiece& loaded, double factor);

 private:
  /// Calls `f(part)` for parts of a piece that fit into staging memory.
  template <class F>
  static void for_each_part(const StateEntry& piece, const F& f) {
    for (std::size_t at = 0; at < piece.count; at += staged_elements)
      f(piece.part(at, std::min(staged_elements, piece.count - at)));
  }
  void read_through_staging(const StateEntry& piece, const StoredTensor& stored);
  /// One of three memories from which the device copies best.
  std::byte* staging(std::size_t which);

  const StatefulJob& job_;
  const CheckpointReader& reader_;
  SnapshotMemory staging_;
};

LOCKSTEP_INLINE std::byte* PieceReader::staging(std::size_t which) {
  if (staging_.data == nullptr) staging_ = job_.make_memory(3 * staging_bytes);
  return staging_.data + which * staging_bytes;
}

/// What lies in the file as it does in memory is read to where it belongs, by several threads.
LOCKSTEP_INLINE void PieceReader::read(const std::vector<LoadedPiece>& pieces) {
  struct Part {
    StateEntry piece;
    const StoredTensor* stored;
  };
  std::vector<Part> parts;
  for (const LoadedPiece& loaded : pieces) {
    const StateEntry& piece = loaded.piece;
    const StoredTensor& stored = *loaded.sources.front();
    const ElementKind kind = piece.whole.element;
    if (piece.on_host && piece.derived == nullptr && piece.held == kind && stored.kind() == kind) {
      for_each_part(piece, [&](const StateEntry& part) { parts.push_back({part, &stored}); });
    } else {
      read_through_staging(piece, stored);
    }
  }
  share_work(parts.size(), [&](std::size_t i) {
    const StateEntry& piece = parts[i].piece;
    reader_.read(*parts[i].stored, piece.first, piece.count, piece.data);
  });
}

LOCKSTEP_INLINE void PieceReader::read_through_staging(const StateEntry& piece,
                                                       const StoredTensor& stored) {
  const ElementKind kind = piece.whole.element;
  for_each_part(piece, [&](const StateEntry& part) {
    std::byte* from = staging(0);
    reader_.read(stored, part.first, part.count, from);
    if (stored.kind() != kind) {
      convert_elements(staging(1), kind, from, stored.kind(), part.count);
      from = staging(1);
    }
    job_.copy_in(part, from);
  });
}

/// Writes the sum of the sources times `factor`. Through `copy_in` also where it is one tensor: it
/// notes that the parameter was used.
LOCKSTEP_INLINE void PieceReader::read_sum(const LoadedPiece& loaded, double factor) {
  if (loaded.sources.size() == 1 && factor == 1)
    return read_through_staging(loaded.piece, *loaded.sources.front());
  const ElementKind kind = loaded.piece.whole.element;
  for_each_part(loaded.piece, [&](const StateEntry& part) {
    auto* const numbers = reinterpret_cast<double*>(staging(1));
    auto* const sum = reinterpret_cast<double*>(staging(2));
    std::fill(sum, sum + part.count, 0.0);
    for (const StoredTensor* stored : loaded.sources) {
      reader_.read(*stored, part.first, part.count, staging(0));
      convert_elements(staging(1), ElementKind::f64, staging(0), stored->kind(), part.count);
      for (std::size_t i = 0; i != part.count; ++i) sum[i] += factor * numbers[i];
    }
    convert_elements(staging(0), kind, staging(2), ElementKind::f64, part.count);
    job_.copy_in(part, staging(0));
  });
}

/// Steps draw from the seed of the job that is resumed, whatever this one was given. Says so.
LOCKSTEP_INLINE void note_seed(const StatefulJob& job, LoadPlan& plan) {
  const std::optional<std::uint64_t> own = job.progress().random_seed;
  const std::optional<std::uint64_t> saved = plan.facts.progress.random_seed;
  if (own && saved && *own != *saved)
    plan.notes.push_back(text({"random numbers of steps go on from seed ", *saved,
                               " of the checkpoint, not from seed ", *own}));
}

/// Sets how far the job is. Returns by what saved residuals of gradients are multiplied: they are
/// of a scaled loss, and a job whose replicas are more divides by more.
LOCKSTEP_INLINE double set_progress(const StatefulJob& job, const LoadPlan& plan, LoadWhat what) {
  ReplicaProgress progress = plan.facts.progress;
  if (what != LoadWhat::job) progress.random_seed.reset();  // a new run, from its own seed
  job.set_progress(progress);
  if (plan.residuals.empty()) return 1;
  const auto scale = [](const ReplicaProgress& of) {
    return of.loss_scale ? static_cast<double>(of.loss_scale->scale) : 1.0;
  };
  return job.shape.gradient_divisor / plan.facts.shape.gradient_divisor * scale(job.progress()) /
         scale(progress);
}

LOCKSTEP_INLINE Resumed load_job(const StatefulJob& job, const std::string& path,
                                 const LoadOptions& options, LoadWhat what) {
  LoadPlan plan = LoadPlanning(job, path, options, what).run();
  if (what == LoadWhat::job) note_seed(job, plan);
  store_together(job.ranks, operation_of(what), [&] {
    double factor = 1;
    if (what != LoadWhat::parameters) factor = set_progress(job, plan, what);
    PieceReader reader(job, *plan.reader);
    reader.read(plan.pieces);
    for (const LoadedPiece& loaded : plan.residuals) reader.read_sum(loaded, factor);
    for (const LoadedPiece& loaded : plan.averaged)
      reader.read_sum(loaded, 1 / static_cast<double>(loaded.sources.size()));
    set_values(options.values, plan.values);
    set_values(options.common, plan.common);
    return std::string();
  });
  const CheckpointFacts& facts = plan.facts;
  Resumed resumed;
  resumed.path = path;
  resumed.epoch = facts.epoch;
  resumed.step = facts.progress.updates;
  resumed.best = facts.best;
  resumed.position = facts.position;
  resumed.scores = facts.scores;
  resumed.world = WorldSize{facts.shape.world};
  resumed.report = std::move(plan.report);
  resumed.notes = std::move(plan.notes);
  if (what == LoadWhat::job && facts.shape.replicas != job.shape.replicas)
    resumed.notes.push_back(
        text({"saved by ", facts.shape.replicas, " ranks, resumed by ", job.shape.replicas}));
  return resumed;
}

/// What ranks tell each other before they save.
struct SaveAnnouncement {
  std::string_view path;
  std::string_view token;  // of the names of shards; rank 0's counts
  std::string_view values;
  bool is_busy = false;
  bool has_tensors = false;  // does this rank write a file?

  std::string packed() const {
    std::string text{is_busy ? '1' : '0', has_tensors ? '1' : '0'};
    for (const std::string_view piece : {path, token, values}) append_sized(text, piece);
    return text;
  }
  explicit SaveAnnouncement(std::string_view text)
      : is_busy(text[0] == '1'), has_tensors(text[1] == '1') {
    text.remove_prefix(2);
    path = take_sized(text);
    token = take_sized(text);
    values = take_sized(text);
  }
  SaveAnnouncement() = default;
};

/// The file that a rank writes. It points into itself and into the job's memory or a copy of it.
struct RankFile {
  std::string path;
  FileToWrite file;
  std::vector<StateEntry> pieces;
  bool is_copied = false;             // does it wait for copies?
  CheckpointFacts facts;              // of rank 0
  std::vector<ExpectedShard> shards;  // of rank 0
  std::string part;                   // of rank 0, where all files become one: its own
  std::function<void()> written;      // of rank 0
};

/// Rank 0's file, after those of all other ranks.
LOCKSTEP_INLINE void commit_all(RankFile& file, const std::vector<ShardFile>& shards) {
  if (file.part.empty() || shards.empty()) {
    commit(file.path, file.file, shards);
  } else {
    commit_whole(file.path, file.part, file.file, shards);
  }
  if (file.written) file.written();
}

// What a rank writes.

/// A tensor of a file, and the pieces of it that this rank has.
struct CollectedTensor {
  std::string name;
  std::vector<const StateEntry*> pieces;  // in order
};

LOCKSTEP_INLINE std::vector<CollectedTensor> collected_tensors(std::span<const StateEntry> pieces,
                                                               std::span<const NameAlias> aliases) {
  std::vector<CollectedTensor> tensors;
  std::map<std::string, std::size_t> places;
  const auto add = [&](std::string name, const StateEntry& piece) {
    const auto [place, is_new] = places.try_emplace(name, tensors.size());
    if (is_new) tensors.push_back({std::move(name), {}});
    tensors[place->second].pieces.push_back(&piece);
  };
  for (const StateEntry& piece : pieces) {
    std::string name = stored_name(piece);
    if (name == piece.name) {
      // The format has no two names for the same bytes: they are written once more.
      for (const NameAlias& alias : aliases)
        if (alias.of == name) add(alias.name, piece);
    }
    add(std::move(name), piece);
  }
  std::vector<CollectedTensor> result;
  for (CollectedTensor& tensor : tensors) {
    std::ranges::sort(tensor.pieces, {}, &StateEntry::first);
    std::size_t count = 0;
    for (const StateEntry* piece : tensor.pieces) count += piece->count;
    if (count == tensor.pieces.front()->whole.count()) {
      result.push_back(std::move(tensor));
      continue;
    }
    for (const StateEntry* piece : tensor.pieces)
      result.push_back({piece_name(tensor.name, piece->first), {piece}});
  }
  return result;
}

/// The shapes of parameters that rank 0's file does not have whole: ranks have saved them in
/// pieces, and rank 0 may have none.
LOCKSTEP_INLINE void add_shapes(const StatefulJob& job, RankFile& file) {
  std::vector<std::string_view> whole;
  for (const StateEntry& piece : file.pieces) {
    if (piece.role == StateRole::parameter && piece.is_whole()) whole.push_back(piece.name);
  }
  std::ranges::sort(whole);
  Json shapes = Json::object();
  bool has_shapes = false;
  for (const StateEntry& piece : job.entries(StateUse::loading)) {
    if (piece.role != StateRole::parameter || std::ranges::binary_search(whole, piece.name))
      continue;
    const std::span extents(piece.whole.extents.data(), piece.whole.rank);
    shapes.set(piece.name, Json::array_of(extents));
    for (const NameAlias& alias : job.aliases)
      if (alias.of == piece.name) shapes.set(alias.name, Json::array_of(extents));
    has_shapes = true;
  }
  if (has_shapes) file.file.facts.add("shapes", std::move(shapes));
}

/// Can it be written from where it is?
LOCKSTEP_INLINE bool is_as_in_file(const CollectedTensor& tensor) {
  const StateEntry& piece = *tensor.pieces.front();
  return tensor.pieces.size() == 1 && piece.on_host && piece.held == piece.whole.element;
}

/// Bytes of a tensor that the host cannot write from where it is, or not in that type: copied to
/// `window` when they are wanted. The pieces follow each other.
LOCKSTEP_INLINE std::span<const std::byte> copied_chunk(const StatefulJob& job,
                                                        std::span<const StateEntry* const> pieces,
                                                        std::byte* window, std::uint64_t at,
                                                        std::size_t bytes) {
  const std::size_t size = element_size(pieces.front()->whole.element);
  const std::size_t begin = at / size;
  const std::size_t end = begin + bytes / size;
  std::vector<StateEntry> parts;
  std::size_t place = 0;  // of a piece, in elements
  for (const StateEntry* piece : pieces) {
    const std::size_t from = std::max(begin, place);
    const std::size_t to = std::min(end, place + piece->count);
    if (from < to) parts.push_back(piece->part(from - place, to - from));
    place += piece->count;
  }
  std::vector<StateCopy> copies;
  std::byte* next = window;
  for (const StateEntry& part : parts) {
    copies.push_back({next, &part});
    next += part.file_bytes();
  }
  job.copy_out(copies);
  job.await_copies();
  return {window, bytes};
}

/// The tensors of this rank's file. A save that blocks writes them from where they are, or through
/// a small window; one that does not needs a copy of all.
LOCKSTEP_INLINE void StateWriter::add_tensors(const StatefulJob& job, bool copies_all,
                                              RankFile& file) {
  const std::vector<CollectedTensor> tensors = collected_tensors(file.pieces, job.aliases);
  std::size_t copied_bytes = 0;
  std::vector<StateCopy> copies;
  for (const CollectedTensor& tensor : tensors) {
    if (!copies_all) {
      if (!is_as_in_file(tensor)) copied_bytes = write_chunk_bytes;
      continue;
    }
    for (const StateEntry* piece : tensor.pieces) copied_bytes += piece->file_bytes();
    copied_bytes = align_up(copied_bytes);
  }
  if (snapshot_.bytes < copied_bytes) {
    snapshot_ = {};
    snapshot_ = job.make_memory(copied_bytes);
  }
  std::size_t place = 0;
  for (const CollectedTensor& tensor : tensors) {
    const StateEntry& first = *tensor.pieces.front();
    TensorToWrite& written = file.file.tensors.emplace_back();
    written.name = tensor.name;
    written.kind = first.whole.element;
    std::size_t bytes = 0;
    std::size_t count = 0;
    for (const StateEntry* piece : tensor.pieces) {
      bytes += piece->file_bytes();
      count += piece->count;
    }
    if (first.is_whole() || tensor.pieces.size() > 1) {
      written.shape.assign(first.whole.extents.begin(),
                           first.whole.extents.begin() + static_cast<int>(first.whole.rank));
    } else {
      written.shape = {count};
    }
    if (copies_all) {
      written.data = {snapshot_.data + place, bytes};
      for (const StateEntry* piece : tensor.pieces) {
        copies.push_back({snapshot_.data + place, piece});
        place += piece->file_bytes();
      }
      place = align_up(place);
    } else if (is_as_in_file(tensor)) {
      written.data = {first.data, bytes};
    } else {
      written.data = {static_cast<const std::byte*>(nullptr), bytes};
      written.read = [&job, pieces = tensor.pieces, window = snapshot_.data](std::uint64_t at,
                                                                             std::size_t size) {
        return copied_chunk(job, pieces, window, at, size);
      };
    }
  }
  file.is_copied = !copies.empty();
  if (file.is_copied) job.copy_out(copies);
}

/// What a save is to have of what this rank keeps.
LOCKSTEP_INLINE std::vector<StateEntry> saved_pieces(const StatefulJob& job,
                                                     const SaveOptions& options) {
  std::vector<StateEntry> pieces = job.entries(StateUse::saving);
  if (options.parameters_only)
    std::erase_if(pieces, [](const StateEntry& piece) { return stored_name(piece) != piece.name; });
  return pieces;
}

LOCKSTEP_INLINE std::shared_ptr<RankFile> StateWriter::collect(
    const StatefulJob& job, const std::string& path, const SaveOptions& options,
    const std::vector<std::string>& told) {
  const auto file = std::make_shared<RankFile>();
  const std::string_view token = SaveAnnouncement(told[0]).token;
  const std::size_t me = job.ranks.rank.value();
  file->pieces = saved_pieces(job, options);
  if (me == 0) {
    file->path = path;
    if (options.consolidated || options.parameters_only)
      file->part = beside(path, shard_name(path, token, me, told.size()));
    file->written = options.written;
    CheckpointFacts& facts = file->facts;
    facts.version = version;
    facts.time = utc_time();
    facts.shape = job.shape;
    facts.progress = job.progress();
    facts.epoch = options.epoch;
    facts.best = options.best;
    facts.position = options.position;
    facts.scores = options.scores;
    for (std::size_t rank = 0; rank != told.size(); ++rank) {
      const SaveAnnouncement of_rank(told[rank]);
      facts.values.push_back(unpack_values(of_rank.values));
      if (rank != 0 && of_rank.has_tensors)
        file->shards.push_back({rank, shard_name(path, token, rank, told.size())});
    }
    facts.common = unpack_values(pack_values(options.common));
    file->file.facts = options.parameters_only ? parameters_only_facts() : json_of(facts);
    add_shapes(job, *file);
    if (!options.parameters_only) add_value_tensors(facts, file->file.tensors);
  } else {
    file->path = beside(path, shard_name(path, token, me, told.size()));
    file->file.facts.add("version", version).add("shard", me).add("world", told.size());
  }
  add_tensors(job, options.asynchronous, *file);
  // In the order in which parts of several ranks are joined, whatever the number of ranks is.
  if (options.parameters_only) std::ranges::sort(file->file.tensors, {}, &TensorToWrite::name);
  return file;
}

// Saving.

LOCKSTEP_INLINE StateWriter::~StateWriter() {
  if (scope_.is_exception()) is_given_up_ = true;
  writer_.reset();  // it uses the other members
}

LOCKSTEP_INLINE void StateWriter::rethrow_on_all(const StatefulJob& job) {
  try {
    rethrow();
  } catch (const Error& error) {
    const Error named = error.rank() ? error : error.on(job.ranks.rank);
    job.calls.abandon(job.wrapper, named.what());
    throw named;
  }
}

/// Ends the save under way, whose outcome nobody wants to know.
LOCKSTEP_INLINE void StateWriter::give_up() {
  is_given_up_ = true;
  try {
    if (writer_) writer_->wait();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it was thrown on all ranks
  }
  is_given_up_ = false;
}

LOCKSTEP_INLINE void StateWriter::finish_with(const JointRanks& ranks) {
  // First those who wait for nobody: rank 0 would wait in vain for the file of one that failed.
  const auto wait = [&](bool is_turn) {
    store_together(ranks, "save", [&] {
      if (is_turn && writer_) writer_->wait();
      return std::string();
    });
  };
  try {
    if (ranks.world > 1) wait(ranks.rank != Rank{0});
    wait(ranks.rank == Rank{0});
  } catch (...) {
    give_up();
    throw;
  }
}

LOCKSTEP_INLINE void StateWriter::write_now(const StatefulJob& job, RankFile& file) {
  const bool writes_shard = job.ranks.rank != Rank{0} && !file.file.tensors.empty();
  std::vector<ShardFile> shards;
  try {
    const std::vector<std::string> told = store_together(job.ranks, "save", [&] {
      std::string written;
      if (file.is_copied) job.await_copies();
      if (writes_shard) {
        const WrittenFile mine = write_file(file.path, file.file);
        written = {reinterpret_cast<const char*>(&mine), sizeof mine};
      }
      return written;
    });
    for (const ExpectedShard& shard : file.shards) {
      WrittenFile written{};
      told[shard.rank].copy(reinterpret_cast<char*>(&written), sizeof written);
      shards.push_back({shard.name, written});
    }
  } catch (...) {
    // Rank 0 alone could have made these files a checkpoint, and has not.
    for (const ExpectedShard& shard : file.shards) remove_beside(file.path, shard.name);
    throw;
  }
  store_together(job.ranks, "save", [&] {
    if (job.ranks.rank == Rank{0}) commit_all(file, shards);
    return std::string();
  });
}

LOCKSTEP_INLINE void StateWriter::write_later(const StatefulJob& job,
                                              const std::shared_ptr<RankFile>& file) {
  const bool is_first = job.ranks.rank == Rank{0};
  if (!writer_ || (!is_first && file->file.tensors.empty())) return;
  writer_->start([this, is_first, file, await = job.calls.await_copies, wrapper = job.wrapper] {
    if (file->is_copied) await(wrapper);
    if (!is_first) {
      write_file(file->path, file->file);
    } else if (const auto shards = await_shards(file->path, file->shards, is_given_up_)) {
      commit_all(*file, *shards);
    }
  });
}

LOCKSTEP_INLINE bool StateWriter::save_job(const StatefulJob& job, const std::string& path,
                                           const SaveOptions& options) {
  if (!writer_) writer_.emplace(job.ranks.rank);
  std::vector<std::string> told;
  try {
    told = work_together(job.ranks, "save", [&] {
      writer_->rethrow();
      if (job.micro_batches != 0 && !options.parameters_only)
        fail("save", {"the job is between the micro-batches of a step"},
             "save after the last one; a trainer's own save waits for it");
      const std::string token = random_token();
      const std::string values = pack_values(options.values);
      SaveAnnouncement mine;
      mine.path = path;
      mine.token = token;
      mine.values = values;
      mine.is_busy = writer_->is_busy();
      mine.has_tensors = !saved_pieces(job, options).empty();
      return mine.packed();
    });
  } catch (...) {
    give_up();
    throw;
  }
  std::vector<std::string> paths;
  bool is_busy = false;
  for (const std::string& text : told) {
    const SaveAnnouncement of_rank(text);
    paths.emplace_back(of_rank.path);
    is_busy = is_busy || of_rank.is_busy;
  }
  require_same_path(job.ranks, "save", paths);
  if (is_busy && options.when_busy == WhenBusy::skip) return false;
  if (is_busy) finish_with(job.ranks);

  job.synchronize_buffers();
  std::shared_ptr<RankFile> file;
  try {
    work_together(job.ranks, "save", [&] {
      file = collect(job, path, options, told);
      return std::string();
    });
    if (options.asynchronous) {
      write_later(job, file);
    } else {
      write_now(job, *file);
    }
  } catch (...) {
    // Nobody writes these copies any more, but the device may still write to their memory.
    try {
      job.await_copies();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first error counts
    }
    throw;
  }
  return true;
}

LOCKSTEP_INLINE void say(const std::string& line) {
  std::fputs(text({"lockstep: ", line, "\n"}).c_str(), stderr);
}

LOCKSTEP_INLINE CheckpointPlan::CheckpointPlan(CheckpointOptions options)
    : options_(std::move(options)) {
  require_checkpoint_options(options_);
  while (options_.folder.size() > 1 && options_.folder.back() == '/') options_.folder.pop_back();
}

/// What rank 0 tells the others of the best score in the folder: the score's bytes, or nothing.
LOCKSTEP_INLINE std::string CheckpointPlan::told_best() const {
  const auto known = folder_ ? folder_->best_score() : std::nullopt;
  if (!known) return {};
  return {reinterpret_cast<const char*>(&*known), sizeof *known};
}

LOCKSTEP_INLINE void CheckpointPlan::learn_best(const std::string& told) {
  best_.reset();
  if (told.size() != sizeof(double)) return;
  best_.emplace();
  std::memcpy(&*best_, told.data(), sizeof(double));
}

LOCKSTEP_INLINE void CheckpointPlan::open(const JointRanks& ranks) {
  learn_best(store_together(ranks, "checkpoints", [&] {
    if (ranks.rank == Rank{0}) folder_ = std::make_shared<CheckpointFolder>(options_);
    return told_best();
  })[0]);
}

LOCKSTEP_INLINE bool CheckpointPlan::will_resume() const {
  return options_.resume || restart_count() != 0;
}

/// Checkpoints of a folder that are damaged. Where all of them are, their job must not start anew:
/// it would replace the only files from which something might still be saved.
class DamagedCheckpoints {
 public:
  void add(const std::string& path, const std::string& why) {
    say(text({"'", path, "' is passed over: ", why}));
    names_.append(names_.empty() ? "'" : ", '").append(name_in_folder(path)).append("'");
  }
  /// Throws if there are any. `operation` is "launch" for how the job was started: launchers do not
  /// start it again, because it would fail again.
  void require_none(std::string_view operation, const std::string& folder) const {
    if (names_.empty()) return;
    fail(operation, {"no checkpoint in '", folder, "' is valid: ", names_},
         "put back a copy of one, or name another folder to start anew; nothing was deleted");
  }

 private:
  std::string names_;
};

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::find_newest(const JointRanks& ranks) {
  if (!will_resume()) return std::nullopt;
  std::string found = store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    DamagedCheckpoints damaged;
    const auto newest = folder_->newest_valid(
        [&](const std::string& path, const std::string& why) { damaged.add(path, why); });
    if (!newest) damaged.require_none("launch", options_.folder);
    if (!newest) say(text({"no checkpoint in '", options_.folder, "': training starts anew"}));
    return newest ? newest->path : std::string();
  })[0];
  if (found.empty()) return std::nullopt;
  return found;
}

LOCKSTEP_INLINE void CheckpointPlan::begin(const StatefulJob& job) {
  writer_.rethrow_on_all(job);
  if (!has_begun_) begin_after(job, nullptr);
}

LOCKSTEP_INLINE void CheckpointPlan::begin_after(const StatefulJob& job, const Resumed* resumed) {
  const JointRanks& ranks = job.ranks;
  const std::uint64_t updates = resumed != nullptr ? resumed->step : job.updates;
  has_begun_ = true;
  updates_ = updates;
  saved_ = looked_ = Clock::now();
  // Looking for the newest checkpoint may have made a best copy that a job died before.
  learn_best(store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    folder_->begin_at(updates);
    if (resumed != nullptr) {
      // Between two epochs none is under way, and after the last one none comes.
      const std::uint64_t begun = begun_epochs(*resumed);
      say(text({"resumed from '", resumed->path, "', ",
                begun == 0 ? "before the first epoch"
                           : text({resumed->position ? "epoch " : "after epoch ", begun}),
                ", step ", resumed->step}));
      for (const std::string& note : resumed->notes) say(note);
    }
    return told_best();
  })[0]);
}

LOCKSTEP_INLINE CheckpointPlan::RanksLook CheckpointPlan::own_look(std::size_t world) {
  const Clock::time_point now = Clock::now();
  RanksLook mine;
  mine.signal = stop_request_.signal();
  mine.is_due = options_.every_time.count() != 0 && now - saved_ >= options_.every_time ? 1 : 0;
  // A look costs the ranks a meeting, so there are about four in a second. No look is more than 64
  // updates away, since updates may suddenly take long.
  const double seconds = std::chrono::duration<double>(now - looked_).count();
  const double wanted = 0.25 / std::max(seconds / static_cast<double>(updates_per_look_), 1e-9);
  const double most = world == 1 ? 1 : std::min(2.0 * static_cast<double>(updates_per_look_), 64.0);
  mine.updates_per_look = static_cast<std::uint64_t>(std::clamp(wanted, 1.0, most));
  looked_ = now;
  return mine;
}

/// Is it time to save? Ranks may have been asked to stop, too.
LOCKSTEP_INLINE bool CheckpointPlan::look(const JointRanks& ranks) {
  RanksLook all = own_look(ranks.world);
  if (ranks.world != 1) {
    const std::string mine(reinterpret_cast<const char*>(&all), sizeof all);
    for (const std::string& told : ranks.gather(mine)) {
      RanksLook other;
      std::memcpy(&other, told.data(), sizeof other);
      if (all.signal == 0) all.signal = other.signal;
      all.is_due = std::max(all.is_due, other.is_due);
      all.updates_per_look = std::min(all.updates_per_look, other.updates_per_look);
    }
  }
  signal_ = all.signal;
  until_look_ = updates_per_look_ = all.updates_per_look;
  return all.is_due != 0;
}

LOCKSTEP_INLINE void CheckpointPlan::save_if_due(const StatefulJob& job,
                                                 FunctionRef<SaveOptions()> make) {
  begin(job);
  if (!is_due(job.updates)) return;
  bool saves = is_due_by_count(job.updates);
  updates_ = job.updates;
  if (--until_look_ == 0) saves = look(job.ranks) || saves;
  if (saves || signal_ != 0) save_or_stop(job, make(), std::nullopt);
}

LOCKSTEP_INLINE void CheckpointPlan::save_epoch(const StatefulJob& job, SaveOptions options,
                                                bool is_last) {
  begin(job);
  const std::optional<double> score = score_in(options.scores);
  const bool is_best = score && is_better(*score);
  const bool every_epoch = options_.every_steps == 0 && options_.every_time.count() == 0;
  const bool is_due = look(job.ranks);
  if (is_due || is_best || is_last || every_epoch || signal_ != 0)
    save_or_stop(job, std::move(options), is_best ? score : std::nullopt);
}

LOCKSTEP_INLINE std::string CheckpointPlan::save_now(const StatefulJob& job, SaveOptions options) {
  begin(job);
  return save_as(job, std::move(options), std::nullopt, options_.asynchronous);
}

LOCKSTEP_INLINE void CheckpointPlan::save_or_stop(const StatefulJob& job, SaveOptions options,
                                                  std::optional<double> score) {
  const bool stops = signal_ != 0;
  const std::string path = save_as(job, std::move(options), score, options_.asynchronous && !stops);
  if (!stops) return;
  stop_request_.finished();
  throw Stopped(signal_, path);
}

/// The score that the best checkpoint is chosen by; throws where the scores have none.
LOCKSTEP_INLINE std::optional<double> CheckpointPlan::score_in(const Scores& scores) const {
  if (options_.best_by.empty()) return std::nullopt;
  std::string names;
  for (const Score& score : scores) {
    if (score.name == options_.best_by) return score.mean;
    names.append(names.empty() ? "" : ", ").append(score.name);
  }
  fail("checkpoints",
       {"the epoch has no score '", options_.best_by, "' to choose the best by; it has ",
        names.empty() ? "none" : names},
       "evaluate in every epoch, and name one of its scores");
}

/// Is it better than the best so far? NaN never is.
LOCKSTEP_INLINE bool CheckpointPlan::is_better(double score) const {
  if (std::isnan(score)) return false;
  return !best_ || (options_.prefers_higher() ? score > *best_ : score < *best_);
}

/// Saves into the folder, if it is still there. A score makes it the best.
LOCKSTEP_INLINE std::string CheckpointPlan::save_as(const StatefulJob& job, SaveOptions options,
                                                    std::optional<double> score,
                                                    bool asynchronous) {
  store_together(job.ranks, "checkpoints", [&] {
    if (folder_) folder_->require();
    return std::string();
  });
  if (score) best_ = score;
  saved_ = Clock::now();
  if (!options_.best_by.empty()) options.best = best_;
  options.asynchronous = asynchronous;
  // The best one is never left out: it would not come again.
  options.when_busy = score || !asynchronous ? WhenBusy::wait : options_.when_busy;
  if (folder_) {
    options.written = [folder = folder_, updates = job.updates, score] {
      folder->saved(updates);
      if (score) folder->offer_best(updates, *score);
    };
  }
  std::string path = text({options_.folder, "/", checkpoint_name(job.updates)});
  writer_.save_job(job, path, options);
  return path;
}

LOCKSTEP_INLINE std::string checkpoint_at(const JointRanks& ranks, const std::string& where) {
  return store_together(ranks, "resume", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    struct stat status{};
    if (::stat(where.c_str(), &status) != 0) {
      fail("resume", {"'", where, "' cannot be read: ", error_text(errno)},
           "name a checkpoint or a folder of them, or leave resume out to start anew");
    }
    if (!S_ISDIR(status.st_mode)) return where;
    DamagedCheckpoints damaged;
    const auto newest = newest_valid_checkpoint(
        where, verify_checkpoint, [&](const FoundCheckpoint& passed, const std::string& why) {
          damaged.add(passed.path, why);
        });
    if (!newest) {
      damaged.require_none("resume", where);
      fail("resume", {"there is no checkpoint in '", where, "'"},
           "name another folder, or leave resume out to start anew");
    }
    return newest->path;
  })[0];
}

LOCKSTEP_INLINE bool tells_course(const std::string& path) {
  try {
    const CheckpointReader reader(path);
    if (!reader.is_lockstep()) return false;
    for (const SavedValue& value : read_common_values(reader))
      if (value.name == "lockstep/run") return true;
    return false;
  } catch (const Error&) {
    return true;  // who loads it says what is wrong
  }
}

LOCKSTEP_INLINE bool has_course(const JointRanks& ranks, const std::string& path) {
  return !store_together(
              ranks, "resume",
              [&] {
                return std::string(ranks.rank == Rank{0} && tells_course(path) ? "1" : "");
              })[0]
              .empty();
}

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::latest() const {
  const auto found = list_checkpoints(options_.folder);
  if (found.empty()) return std::nullopt;
  return found.front().path;
}

LOCKSTEP_INLINE std::optional<std::string> CheckpointPlan::best_path() const {
  std::string path = text({options_.folder, "/", best_checkpoint_name});
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  return path;
}

}  // namespace lockstep::detail
