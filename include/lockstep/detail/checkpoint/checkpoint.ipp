// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The non-template definitions of this folder.

#include <dirent.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <charconv>
#include <set>
#include <system_error>

#include "lockstep/detail/checkpoint/checkpoints.hpp"
#include "lockstep/detail/checkpoint/folder.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/launch/launch.hpp"
#include "lockstep/detail/launch/supervisor.hpp"
#include "lockstep/version.hpp"

namespace lockstep::detail {

LOCKSTEP_INLINE void say(const std::string& line) {
  std::fputs(text({"lockstep: ", line, "\n"}).c_str(), stderr);
}

/// NaN is never better.
LOCKSTEP_INLINE bool is_better(const CheckpointOptions& options, double score,
                               std::optional<double> best) {
  if (std::isnan(score)) return false;
  return !best || (options.prefers_higher() ? score > *best : score < *best);
}

LOCKSTEP_INLINE CheckpointOptions plain_options(CheckpointOptions options) {
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
  while (options.folder.size() > 1 && options.folder.back() == '/') options.folder.pop_back();
  return options;
}

inline constexpr FileElement file_elements[] = {
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
    {"BOOL", ElementKind::unsupported, 8},
    {"C64", ElementKind::unsupported, 64},
    {"F8_E4M3", ElementKind::unsupported, 8},
    {"F8_E5M2", ElementKind::unsupported, 8},
    {"F8_E8M0", ElementKind::unsupported, 8},
    {"F6_E2M3", ElementKind::unsupported, 6},
    {"F6_E3M2", ElementKind::unsupported, 6},
    {"F4", ElementKind::unsupported, 4},
};

LOCKSTEP_INLINE const FileElement* file_element(std::string_view name) {
  const auto* const found = std::ranges::find(file_elements, name, &FileElement::name);
  return found == std::end(file_elements) ? nullptr : found;
}

LOCKSTEP_INLINE const FileElement* file_element(ElementKind kind) {
  if (kind == ElementKind::unsupported) return nullptr;  // of several types
  const auto* const found = std::ranges::find(file_elements, kind, &FileElement::kind);
  return found == std::end(file_elements) ? nullptr : found;
}

/// The number of elements of a shape from a file; `too_large` on overflow.
LOCKSTEP_INLINE std::uint64_t count_of(std::span<const std::uint64_t> shape) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape)
    if (count != too_large) count = saturating_product(count, extent);
  return count;
}

LOCKSTEP_INLINE void fail_damaged(std::string_view path, std::string_view problem) {
  fail("checkpoint", {"'", path, "' is damaged or no safetensors file: ", problem},
       "copy it again, or take another");
}

LOCKSTEP_INLINE SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a FIFO would wait for its writer.
  file_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!file_ || ::fstat(file_.get(), &status) != 0) fail_reading("checkpoint", path_, errno);
  if (S_ISDIR(status.st_mode)) fail_reading("checkpoint", path_, EISDIR);
  if (!S_ISREG(status.st_mode)) damaged({"it is no regular file"});
  bytes_ = static_cast<std::uint64_t>(status.st_size);
  if (bytes_ < 8) damaged({"it has ", bytes_, " bytes, less than the length of a header"});
  std::uint64_t length = 0;
  read_bytes(0, std::as_writable_bytes(std::span(&length, 1)));
  require_length(length);
  std::string header(8 + length, '\0');
  read_bytes(0, std::as_writable_bytes(std::span(header)));
  parse(header);
}

LOCKSTEP_INLINE void SafetensorsFile::require_length(std::uint64_t length) const {
  if (length < 2) damaged({"its header has ", length, " bytes"});
  if (length > most_header_bytes)
    damaged({"its header claims ", length, " bytes and ", most_header_bytes, " are allowed"});
  if (length > bytes_ - 8)
    damaged({"its header claims ", length, " bytes and ", bytes_ - 8, " are there"});
}

LOCKSTEP_INLINE void SafetensorsFile::read_bytes(std::uint64_t offset,
                                                 std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t n = ::pread(file_.get(), to.data(), to.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_reading("checkpoint", path_, errno);
    if (n == 0) damaged({"it ends at byte ", offset, " and had ", bytes_, " when it was opened"});
    note_storage_progress();
    offset += static_cast<std::uint64_t>(n);
    to = to.subspan(static_cast<std::size_t>(n));
  }
}

LOCKSTEP_INLINE void SafetensorsFile::parse(std::string_view header) {
  if (header[8] != '{') damaged({"its header does not begin with an object"});
  const Json json = Json::parse(header.substr(8), text({"'", path_, "', its header"}));
  const JsonEntry all(json, path_, "header");
  for (const Json::Member& member : all.members()) {
    const JsonEntry entry = all.of(member);
    if (member.first != "__metadata__") {
      tensors_.push_back(parse_tensor(entry, member.first));
      continue;
    }
    for (const Json::Member& one : entry.members())
      metadata_.emplace_back(one.first, entry.of(one).text());
  }
  check_offsets(header.size());
  std::ranges::sort(tensors_, {}, &TensorEntry::name);
  take_facts(header);
}

LOCKSTEP_INLINE TensorEntry SafetensorsFile::parse_tensor(const JsonEntry& entry,
                                                          const std::string& name) const {
  constexpr std::size_t most_axes = 64;
  const std::string type = entry.at("dtype").text();
  const std::vector<std::uint64_t> offsets = entry.at("data_offsets").naturals();
  TensorEntry tensor{name, file_element(type), entry.at("shape").naturals()};
  if (entry.members().size() != 3) entry.fail("has more than dtype, shape and data_offsets");
  if (tensor.element == nullptr) damaged({"tensor '", name, "' has the unknown type '", type, "'"});
  if (tensor.shape.size() > most_axes)
    damaged({"tensor '", name, "' has more than ", most_axes, " axes"});
  if (offsets.size() != 2) damaged({"tensor '", name, "' has other than two offsets"});
  if (offsets[1] < offsets[0])
    damaged({"tensor '", name, "' ends at ", offsets[1], ", before it begins"});
  tensor.begin = offsets[0];
  tensor.bytes = offsets[1] - offsets[0];
  tensor.count = count_of(tensor.shape);
  const std::uint64_t bits = saturating_product(tensor.count, tensor.element->bits);
  if (bits == too_large || bits != saturating_product(tensor.bytes, 8))
    damaged({"tensor '", name, "' of shape ", shape_text(tensor.shape), " and type ", type, " has ",
             tensor.bytes, " bytes"});
  return tensor;
}

LOCKSTEP_INLINE void SafetensorsFile::check_offsets(std::uint64_t data_begin) {
  std::ranges::sort(tensors_, [](const TensorEntry& a, const TensorEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes;
  });
  const std::uint64_t data_bytes = bytes_ - data_begin;
  std::uint64_t offset = 0;
  for (TensorEntry& tensor : tensors_) {
    if (tensor.begin < offset) damaged({"tensor '", tensor.name, "' overlaps the one before it"});
    if (tensor.begin > offset)
      damaged({"no tensor has the bytes before that of '", tensor.name, "'"});
    offset = tensor.begin + tensor.bytes;
    if (offset > data_bytes)
      damaged({"tensor '", tensor.name, "' ends at byte ", offset, " of ", data_bytes,
               ": the file has been cut"});
    tensor.begin += data_begin;
  }
  if (offset != data_bytes)
    damaged({"its tensors have ", offset, " bytes, and ", data_bytes, " are there"});
}

LOCKSTEP_INLINE const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(tensors_, name, {}, &TensorEntry::name);
  return found == tensors_.end() || found->name != name ? nullptr : &*found;
}

LOCKSTEP_INLINE const std::string* SafetensorsFile::metadata(std::string_view key) const {
  const auto found = std::ranges::find(metadata_, key, &std::pair<std::string, std::string>::first);
  return found == metadata_.end() ? nullptr : &found->second;
}

/// The text before the header's checksum, and the placeholder with which the checksum is computed.
inline constexpr std::string_view before_digest = R"("lockstep":"{\"header\":\")";
inline constexpr std::string_view no_digest = "0000000000000000";

LOCKSTEP_INLINE void SafetensorsFile::take_facts(std::string_view header) {
  const std::string* const facts = metadata("lockstep");
  if (facts == nullptr) {
    // One flipped bit must not turn it into another program's file, which has no checksums.
    const std::string* const writer = metadata("writer");
    if (writer != nullptr && writer->starts_with("lockstep "))
      damaged({"lockstep has written it, and its 'lockstep' entry is missing"});
    return;
  }
  // These unescaped quotation marks cannot occur inside of a text.
  const std::size_t mark = header.find(before_digest);
  const std::size_t digits = mark + before_digest.size();
  const auto said = mark == std::string_view::npos
                        ? std::nullopt
                        : checksum_from(header.substr(digits, no_digest.size()));
  if (!said) damaged({"its 'lockstep' entry does not begin with the header's checksum"});
  const std::uint64_t found = Checksum()
                                  .add(header.substr(0, digits))
                                  .add(no_digest)
                                  .add(header.substr(digits + no_digest.size()))
                                  .value();
  if (found != *said) {
    damaged({"its header's checksum is ", checksum_text(found), " and should be ",
             checksum_text(*said)});
  }
  digest_ = found;
  facts_ = Json::parse(*facts, text({"'", path_, "', its 'lockstep' entry"}));
  std::erase_if(metadata_, [](const auto& entry) { return entry.first == "lockstep"; });
  const JsonEntry checksums = this->facts().at("checksums");
  for (const Json::Member& member : checksums.members()) {
    auto* const tensor = const_cast<TensorEntry*>(find(member.first));
    if (tensor == nullptr)
      damaged({"it has a checksum of '", member.first, "' and no such tensor"});
    tensor->checksum = checksums.of(member).checksum();
  }
  for (const TensorEntry& tensor : tensors_)
    if (!tensor.checksum) damaged({"it has no checksum of tensor '", tensor.name, "'"});
}

LOCKSTEP_INLINE void SafetensorsFile::read(const TensorEntry& tensor, std::uint64_t first_byte,
                                           std::span<std::byte> to) const {
  check(first_byte <= tensor.bytes && to.size() <= tensor.bytes - first_byte,
        "read no more of a tensor than there is");
  read_bytes(tensor.begin + first_byte, to);
}

LOCKSTEP_INLINE void SafetensorsFile::verify(const TensorEntry& tensor) const {
  if (!tensor.checksum) return;
  constexpr std::uint64_t most = std::uint64_t{256} << 10;  // fits into a cache
  std::vector<std::byte> memory(static_cast<std::size_t>(std::min(tensor.bytes, most)));
  Checksum checksum;
  for (std::uint64_t done = 0; done != tensor.bytes;) {
    const auto part = std::span(memory).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(memory.size(), tensor.bytes - done)));
    read(tensor, done, part);
    checksum.add(part);
    done += part.size();
  }
  if (checksum.value() != *tensor.checksum)
    damaged({"the data of tensor '", tensor.name, "' is not what was written"});
}

/// The header and its checksum. The header's size does not depend on the tensors' checksums.
LOCKSTEP_INLINE std::pair<std::string, std::uint64_t> header_of(
    const std::string& path, const FileToWrite& file, std::span<const TensorToWrite* const> order,
    std::span<const std::uint64_t> checksums) {
  JsonLine tensors;
  JsonLine sums;
  std::uint64_t offsets[2] = {};
  for (std::size_t i = 0; i < order.size(); ++i) {
    const TensorToWrite& tensor = *order[i];
    offsets[1] = offsets[0] + tensor.data.size();
    tensors.add(tensor.name, JsonLine()
                                 .add("dtype", tensor.element()->name)
                                 .add_array("shape", tensor.shape)
                                 .add_array("data_offsets", offsets));
    sums.add(tensor.name, checksum_text(checksums[i]));
    offsets[0] = offsets[1];
  }
  JsonLine facts;
  facts.add("header", no_digest).add(file.facts).add("checksums", sums);
  JsonLine metadata;
  metadata.add("format", "pt").add("writer", text({"lockstep ", version}));
  for (const auto& [key, value] : file.metadata) metadata.add(key, value);
  metadata.add("lockstep", facts.text());
  const JsonLine header = JsonLine().add("__metadata__", metadata).add(tensors);
  if (!facts.is_utf8() || !header.is_utf8())
    fail("checkpoint", {"'", path, "' cannot be written: a name or text of it is not UTF-8"},
         "write names and texts in UTF-8, and save bytes as numbers");
  std::string out = std::string(8, '\0') + header.text();
  out.append(align_up(out.size(), 8) - out.size(), ' ');
  for (int i = 0; i < 8; ++i) out[i] = static_cast<char>((out.size() - 8) >> (8 * i));
  const std::uint64_t digest = Checksum().add(out).value();
  out.replace(out.find(before_digest) + before_digest.size(), no_digest.size(),
              checksum_text(digest));
  return {std::move(out), digest};
}

LOCKSTEP_INLINE ShardFile write_file(const std::string& path, const FileToWrite& file) {
  std::vector<const TensorToWrite*> order;
  std::uint64_t bytes = 0;
  for (const TensorToWrite& tensor : file.tensors) {
    if (tensor.element() == nullptr)
      fail("checkpoint",
           {"'", path, "' cannot be written: tensor '", tensor.name,
            "' has elements that safetensors files do not have"},
           "save it in another type");
    order.push_back(&tensor);
    bytes += tensor.data.size();
  }
  // Sorting by element size aligns every element without padding.
  std::ranges::stable_sort(order, std::greater(),
                           [](const TensorToWrite* tensor) { return tensor->element()->bits; });
  std::vector<std::uint64_t> checksums(order.size());
  const std::string draft = header_of(path, file, order, checksums).first;
  bytes += draft.size();
  try {  // the reader must accept what is written
    SafetensorsFile(path, draft, bytes);
  } catch (const Error& error) {
    fail("checkpoint", {"'", path, "' cannot be written, it could not be read: ", error.problem()},
         "give everything a name and a size of its own, and keep large values as tensors");
  }

  TemporaryFile out("checkpoint", path, bytes);
  out.seek(draft.size());
  for (std::size_t i = 0; i != order.size(); ++i) {
    const TensorToWrite& tensor = *order[i];
    Checksum checksum;
    const std::size_t all = tensor.data.size();
    for (std::size_t at = 0; at != all;) {  // a chunk is written while it is in the cache
      const std::size_t size = std::min(all - at, write_chunk_bytes);
      const auto chunk = tensor.read ? tensor.read(at, size) : tensor.data.subspan(at, size);
      checksum.add(chunk);
      out.append(chunk);
      at += size;
    }
    checksums[i] = checksum.value();
  }
  const auto [header, digest] = header_of(path, file, order, checksums);
  out.seek(0);
  out.append(std::as_bytes(std::span(header)));
  out.commit();
  return {std::string(name_in_folder(path)), bytes, digest};
}

[[noreturn]] LOCKSTEP_INLINE void fail_locked(const std::string& folder, const std::string& path) {
  std::string owner = read_file(path.c_str());
  owner.resize(std::min({owner.find('\n'), owner.size(), std::size_t{1000}}));
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
    // Some network file systems have no locks; the job saves its checkpoints without one.
    say(text({"checkpoints: '", folder_, "' cannot be locked (", error_text(error),
              "): see to it that no other job uses this folder"}));
    return;
  }
  // On a full disk this text cannot be written; the lock holds without it.
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

/// Removes `end` from the end of `name`; false where `name` does not end so.
LOCKSTEP_INLINE bool cut_end(std::string_view& name, std::string_view end) {
  if (!name.ends_with(end)) return false;
  name.remove_suffix(end.size());
  return true;
}

LOCKSTEP_INLINE bool cut_digits(std::string_view& name) {
  const std::size_t last = name.find_last_not_of("0123456789");
  const std::size_t first = last == std::string_view::npos ? 0 : last + 1;
  const bool has_digits = first != name.size();
  name = name.substr(0, first);
  return has_digits;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checkpoint_step(std::string_view name) {
  if (!name.starts_with(checkpoint_prefix)) return {};
  std::uint64_t step = 0;
  const char* const digits = name.data() + checkpoint_prefix.size();
  const auto end = std::from_chars(digits, name.data() + name.size(), step);
  // Only one spelling per step: a checkpoint of another spelling would never be replaced.
  return end.ec == std::errc() && checkpoint_name(step) == name ? std::optional(step)
                                                                : std::nullopt;
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
  return mark != std::string_view::npos && name.substr(0, mark).ends_with(checkpoint_suffix);
}

LOCKSTEP_INLINE std::vector<std::string> files_in(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  if (!entries) return names;
  while (const dirent* const entry = ::readdir(entries.get())) {
    struct stat status{};
    const int flags = AT_SYMLINK_NOFOLLOW;
    if (::fstatat(::dirfd(entries.get()), entry->d_name, &status, flags) != 0) continue;
    if (S_ISREG(status.st_mode)) names.emplace_back(entry->d_name);
  }
  return names;
}

/// The steps of the checkpoints in a folder, the newest first.
LOCKSTEP_INLINE std::vector<std::uint64_t> steps_in(const std::string& folder) {
  std::vector<std::uint64_t> steps;
  for (const std::string& name : files_in(folder)) {
    if (const auto step = checkpoint_step(name)) steps.push_back(*step);
  }
  std::ranges::sort(steps, std::greater());
  return steps;
}

LOCKSTEP_INLINE std::optional<std::string> newest_valid_checkpoint(const std::string& folder,
                                                                   SkippedCheckpoint skipped) {
  std::vector<std::string> candidates;
  for (const std::uint64_t step : steps_in(folder))
    candidates.push_back(text({folder, "/", checkpoint_name(step)}));
  std::string best = text({folder, "/", best_checkpoint_name});
  if (::access(best.c_str(), F_OK) == 0) candidates.push_back(std::move(best));
  for (std::string& candidate : candidates) {
    try {
      const CheckpointReader reader(candidate);
      if (!reader.is_lockstep())
        fail("checkpoints", {"'", candidate, "' was not written by lockstep"},
             "load its parameters with load_parameters");
      reader.verify();
      return std::move(candidate);
    } catch (const Error& error) {
      skipped(candidate, error.problem());
    }
  }
  return std::nullopt;
}

LOCKSTEP_INLINE std::optional<double> recorded_score(const std::string& path,
                                                     std::string_view name) {
  const SafetensorsFile main(path);
  const auto scores = main.facts().find("scores");
  const auto score = scores ? scores->find(name) : std::nullopt;
  return score ? std::optional(score->at("mean").real()) : std::nullopt;
}

/// Replaces `best` by `checkpoint` atomically.
LOCKSTEP_INLINE void replace_best_copy(const std::string& checkpoint, const std::string& best) {
  constexpr std::string_view operation = "checkpoints";
  const std::string name = text({best, temporary_infix, random_token()});
  if (::link(checkpoint.c_str(), name.c_str()) == 0) {
    const int error = ::rename(name.c_str(), best.c_str()) == 0 ? 0 : errno;
    ::unlink(name.c_str());  // rename keeps it if both names are links to one file
    if (error != 0) fail_writing(operation, best, error);
    sync_folder_of(operation, best);
    return;
  }
  // A file system without hard links needs a copy.
  const Descriptor source(::open(checkpoint.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status{};
  if (!source || ::fstat(source.get(), &status) != 0) fail_reading(operation, checkpoint, errno);
  TemporaryFile copy(operation, best, static_cast<std::uint64_t>(status.st_size));
  std::vector<std::byte> buffer(write_chunk_bytes);
  for (ssize_t n = 1; n != 0;) {
    n = ::read(source.get(), buffer.data(), buffer.size());
    if (n < 0 && errno != EINTR) fail_reading(operation, checkpoint, errno);
    if (n > 0) copy.append({buffer.data(), static_cast<std::size_t>(n)});
  }
  copy.commit();
}

LOCKSTEP_INLINE CheckpointFolder::CheckpointFolder(CheckpointOptions options,
                                                   std::chrono::milliseconds patience)
    : options_(plain_options(std::move(options))),
      lock_((make_folder("checkpoints", options_.folder), options_.folder), patience) {
  remove_orphans();
  if (options_.best_by.empty() || ::access(best_path().c_str(), F_OK) != 0) return;
  try {
    best_score_ = recorded_score(best_path(), options_.best_by);
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): a copy that cannot be read has none
  }
}

LOCKSTEP_INLINE std::optional<std::string> CheckpointFolder::newest_valid(
    SkippedCheckpoint skipped) {
  const std::lock_guard lock(mutex_);
  auto found =
      newest_valid_checkpoint(path(), [&](const std::string& passed, const std::string& why) {
        if (const auto step = checkpoint_step(name_in_folder(passed))) is_valid_[*step] = false;
        skipped(passed, why);
      });
  const auto step = found ? checkpoint_step(name_in_folder(*found)) : std::nullopt;
  if (!step) return found;
  is_valid_[*step] = true;
  if (!options_.best_by.empty()) take_if_best(*step);
  return found;
}

LOCKSTEP_INLINE void CheckpointFolder::begin_at(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t found : steps_in(path())) {
    const auto known = is_valid_.find(found);
    if (found <= step || (known != is_valid_.end() && !known->second)) continue;
    // Launchers do not restart after a "launch" error: a restart would resume this checkpoint.
    fail("launch",
         {"'", path(), "' holds a checkpoint of step ", found, ", and this job begins at step ",
          step},
         "add --resume to go on from there, or name another folder");
  }
}

LOCKSTEP_INLINE bool CheckpointFolder::offer_best(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  return take_if_best(step);
}

LOCKSTEP_INLINE bool CheckpointFolder::take_if_best(std::uint64_t step) {
  lock_.require();
  const auto score = recorded_score(path_of(step), options_.best_by);
  if (!score || !is_better(options_, *score, best_score_)) return false;
  replace_best_copy(path_of(step), best_path());
  best_score_ = score;
  remove_orphans(step);
  return true;
}

LOCKSTEP_INLINE void CheckpointFolder::remove_orphans(std::optional<std::uint64_t> saved) {
  // The shards of an unreadable checkpoint are unknown, so they stay.
  std::set<std::string> needed;
  std::set<std::string> unreadable;
  const std::vector<std::string> names = files_in(path());
  for (const std::string& name : names) {
    if (name != best_checkpoint_name && !checkpoint_step(name)) continue;
    try {
      const SafetensorsFile main(text({path(), "/", name}));
      for (ShardFile& shard : shards_in(main.facts())) needed.insert(std::move(shard.name));
    } catch (const Error&) {
      unreadable.insert(name);
    }
  }
  const bool knows_best = !unreadable.contains(std::string(best_checkpoint_name));
  for (const std::string& name : names) {
    const std::string main = text({shard_stem(name), checkpoint_suffix});
    const auto step = checkpoint_step(main);
    const bool is_orphan = step && (!saved || *step <= *saved) && knows_best &&
                           !needed.contains(name) && !unreadable.contains(main);
    if (is_orphan || (!saved && is_temporary_name(name))) remove_file(name);
  }
}

LOCKSTEP_INLINE void CheckpointFolder::saved(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  is_valid_[step] = true;
  std::size_t valid = 0;
  bool is_removed = false;
  for (const std::uint64_t one : steps_in(path())) {
    const auto known = is_valid_.find(one);
    const bool is_valid = known != is_valid_.end() && known->second;
    const bool is_damaged = known != is_valid_.end() && !known->second;
    if (valid < options_.keep && !is_damaged) {
      valid += is_valid ? 1 : 0;
    } else if (remove_file(checkpoint_name(one))) {
      // The checkpoint goes before its shards: if the job dies in between, none lacks its shards.
      is_removed = true;
      is_valid_.erase(one);
    }
  }
  if (is_removed) remove_orphans(step);
}

LOCKSTEP_INLINE bool CheckpointFolder::remove_file(const std::string& name) {
  const std::string file = text({path(), "/", name});
  if (::unlink(file.c_str()) == 0 || errno == ENOENT) return true;
  const std::string why = error_text(errno);
  // A file too many does not stop training, but the user should know.
  if (!std::exchange(has_complained_, true))
    say(text({"checkpoints: '", file, "' cannot be removed: ", why}));
  return false;
}

struct StopSignal {
  int number;
  struct sigaction before{};
  bool is_taken = false;   // is our handler installed?
  std::string too_late{};  // the message when the time limit expires
};

/// Shared by all stop requests. The handler reads only atomics and what preceded its installation.
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

  static StopState& of_process() {
    // Never destroyed, since a signal may come at any time.
    static StopState& state = *new StopState;
    return state;
  }

  void clear() {
    asked.store(0);
    is_finished.store(false);
  }

  /// Starts the time limit, or stops it with 0. timer_settime is async-signal-safe.
  void set_timer(std::chrono::milliseconds time) {
    if (!has_timer) return;
    itimerspec left{};
    left.it_value.tv_sec = static_cast<time_t>(time.count() / 1000);
    left.it_value.tv_nsec = static_cast<long>(time.count() % 1000 * 1'000'000);
    ::timer_settime(timer, 0, &left, nullptr);
  }

  static void handle(int number, siginfo_t* info, void* context) {
    const int error = errno;
    of_process().take(number, info, context);
    errno = error;
  }
  void take(int number, siginfo_t* info, void* context) {
    const struct sigaction& before = signals[number == SIGTERM ? 0 : 1].before;
    if (process.load(std::memory_order_relaxed) != ::getpid()) {
      // In a forked child, the signal does what it did before.
      ::sigaction(number, &before, nullptr);
      ::raise(number);
    } else if (info != nullptr && info->si_code == SI_TIMER && info->si_value.sival_ptr == this) {
      const int first = asked.load(std::memory_order_relaxed);
      if (first == 0) return;
      const std::string& message = signals[first == SIGUSR1 ? 1 : 0].too_late;
      [[maybe_unused]] const ssize_t n = ::write(2, message.data(), message.size());
      ::_exit(128 + first);
    } else {
      int nobody = 0;
      if (asked.compare_exchange_strong(nobody, number) &&
          !is_finished.load(std::memory_order_relaxed))
        set_timer(limit);
      if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
      } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
      }
    }
  }

  /// The time limit arrives as one of these signals: it needs no other signal and no thread.
  void install() {
    for (StopSignal& signal : signals) {
      signal.too_late = text(
          {"lockstep: ", signal_name(signal.number), " asked this process to stop ",
           seconds_text(limit),
           " ago, and its step and the checkpoint have not come to an end; it ends now, and the ",
           "newest checkpoint is an older one: raise LOCKSTEP_GRACE_SECONDS\n"});
      ::sigaction(signal.number, nullptr, &signal.before);
    }
    const auto is_ignored = [](const StopSignal& signal) {
      return (signal.before.sa_flags & SA_SIGINFO) == 0 && signal.before.sa_handler == SIG_IGN;
    };
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = is_ignored(signals[0]) ? SIGUSR1 : SIGTERM;
    event.sigev_value.sival_ptr = this;
    has_timer = ::timer_create(CLOCK_MONOTONIC, &event, &timer) == 0;
    struct sigaction ours{};
    ours.sa_sigaction = &StopState::handle;
    ours.sa_flags = SA_SIGINFO | SA_RESTART;
    // The handlers must not interrupt each other.
    ::sigemptyset(&ours.sa_mask);
    for (const StopSignal& signal : signals) ::sigaddset(&ours.sa_mask, signal.number);
    for (StopSignal& signal : signals)
      signal.is_taken = !is_ignored(signal) && ::sigaction(signal.number, &ours, nullptr) == 0;
  }

  void put_back() {
    // The timer goes first: its signal must not reach another handler.
    if (std::exchange(has_timer, false)) ::timer_delete(timer);
    for (StopSignal& signal : signals) {
      // A handler that others installed since stays.
      struct sigaction now{};
      if (std::exchange(signal.is_taken, false) && ::sigaction(signal.number, nullptr, &now) == 0 &&
          (now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &StopState::handle)
        ::sigaction(signal.number, &signal.before, nullptr);
    }
  }
};

LOCKSTEP_INLINE StopRequest::StopRequest() {
  const std::chrono::milliseconds limit = termination_grace(true);
  StopState& state = StopState::of_process();
  const std::lock_guard lock(state.mutex);
  // A forked child does not inherit the job's requests.
  if (state.process.load() != ::getpid()) state.requests = 0;
  if (state.requests++ != 0) return;
  // A signal to an earlier job does not concern this one.
  state.put_back();
  state.clear();
  state.process.store(::getpid());
  state.limit = limit;
  state.install();
}

LOCKSTEP_INLINE StopRequest::~StopRequest() {
  StopState& state = StopState::of_process();
  const std::lock_guard lock(state.mutex);
  if (state.requests == 0) return;  // in a forked child
  --state.requests;
  if (state.requests == 0 && state.asked.load() == 0 && !state.is_finished.load()) state.put_back();
}

LOCKSTEP_INLINE int StopRequest::signal() const {
  return StopState::of_process().asked.load(std::memory_order_relaxed);
}

LOCKSTEP_INLINE void StopRequest::finished() {
  StopState& state = StopState::of_process();
  const std::lock_guard lock(state.mutex);
  state.is_finished.store(true);
  state.set_timer({});
}

LOCKSTEP_INLINE void StopRequest::forget() {
  StopState& state = StopState::of_process();
  const std::lock_guard lock(state.mutex);
  state.set_timer({});
  state.clear();
  if (state.requests == 0) state.put_back();
}

LOCKSTEP_INLINE JsonLine index_of(std::span<const ShardFile> shards) {
  std::vector<JsonLine> files;
  for (const ShardFile& shard : shards)
    files.push_back(JsonLine()
                        .add("name", shard.name)
                        .add("bytes", shard.bytes)
                        .add("digest", checksum_text(shard.digest)));
  return JsonLine().add_array("files", files);
}

LOCKSTEP_INLINE std::vector<ShardFile> shards_in(const JsonEntry& facts) {
  std::vector<ShardFile> shards;
  const auto files = facts.find("files");
  std::set<std::string> names;
  for (std::size_t i = 0; files && i < files->items().size(); ++i) {
    const JsonEntry file = files->item(i);
    const std::string name = file.at("name").text();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || name == name_in_folder(facts.file()))
      file.at("name").fail("is not the name of another file in the same folder");
    if (!names.insert(name).second) files->fail("has a name twice");
    shards.push_back({name, file.at("bytes").natural(), file.at("digest").checksum()});
  }
  return shards;
}

/// `name@12` is the piece of `name` from element 12 on.
LOCKSTEP_INLINE std::optional<std::pair<std::string_view, std::uint64_t>> as_piece(
    std::string_view name) {
  const std::size_t sign = name.rfind('@');
  if (sign == std::string_view::npos) return std::nullopt;
  std::uint64_t first = 0;
  const auto end = std::from_chars(name.data() + sign + 1, name.data() + name.size(), first);
  const std::string_view whole = name.substr(0, sign);
  if (end.ec != std::errc() || piece_name(whole, first) != name) return std::nullopt;
  return std::pair(whole, first);
}

/// Tensor names with this prefix are the library's; all others are parameters and buffers.
inline constexpr std::string_view reserved_prefix = "lockstep/";

/// The parts of a tensor's name: `lockstep/state/<parameter>/<state>`,
/// `lockstep/local/<rank>/<parameter>/<state>` or `lockstep/buffer/<rank>/<buffer>`. `name` is
/// empty for the library's other tensors.
struct StoredName {
  std::string_view before;
  std::string_view name;
  std::string_view after;  // the slash and the state

  explicit StoredName(std::string_view all) : name(all) {
    if (!all.starts_with(reserved_prefix)) return;
    const std::string_view rest = all.substr(reserved_prefix.size());
    const std::string_view role = rest.substr(0, rest.find('/'));
    const bool has_rank = role == "local" || role == "buffer";
    const bool has_state = role == "local" || role == "state";
    std::size_t begin = reserved_prefix.size() + role.size();
    if (has_rank && begin < all.size()) begin = all.find('/', begin + 1);
    const std::size_t end = has_state ? all.rfind('/') : all.size();
    const bool is_known = (has_rank || has_state) && begin < end;
    before = is_known ? all.substr(0, begin + 1) : all;
    name = is_known ? all.substr(begin + 1, end - begin - 1) : std::string_view();
    if (is_known) after = all.substr(end);
  }
  bool is_plain() const { return before.empty(); }
  bool is_state() const { return before == "lockstep/state/"; }
};

LOCKSTEP_INLINE CheckpointReader::CheckpointReader(const std::string& path) {
  files_.emplace_back(path);
  shards_ = shards_in(facts());
  if (!shards_.empty()) prefer_open_files(shards_.size() + 16);
  const auto reject = [&](std::string_view problem) {
    fail("checkpoint", {"'", path, "' is not whole: ", problem},
         "bring all its files into one folder, or take another checkpoint");
  };
  for (const ShardFile& shard : shards_) {
    const std::string shard_path = text({folder_of(path), "/", shard.name});
    try {
      files_.emplace_back(shard_path);
    } catch (const Error& error) {
      reject(error.problem());
    }
    const SafetensorsFile& file = files_.back();
    if (file.bytes() != shard.bytes || file.digest() != shard.digest) {
      reject(text({"its shard '", shard_path, "' is not the one that was saved with it (",
                   file.bytes(), " bytes, digest ", checksum_text(file.digest().value_or(0)), "; ",
                   shard.bytes, " and ", checksum_text(shard.digest), " are expected)"}));
    }
  }
  collect();
}

LOCKSTEP_INLINE void CheckpointReader::collect() {
  using Shape = std::vector<std::uint64_t>;
  const SafetensorsFile& main = files_.front();
  std::map<std::string_view, Shape> recorded;
  if (const auto shapes = facts().find("shapes")) {
    for (const Json::Member& shape : shapes->members())
      recorded.emplace(shape.first, shapes->of(shape).naturals());
  }
  /// The shape of the parameter or buffer to which a tensor belongs.
  const auto owner_shape = [&](std::string_view name) -> const Shape* {
    const StoredName parts(name);
    if (parts.is_plain() || parts.name.empty()) return nullptr;
    if (const TensorEntry* const whole = main.find(parts.name)) return &whole->shape;
    const auto found = recorded.find(parts.name);
    return found == recorded.end() ? nullptr : &found->second;
  };
  // The name of the whole tensor, and the offset of the entry in it.
  const auto whole_of = [&](const TensorEntry& entry) {
    const auto piece =
        main.is_lockstep() && entry.shape.size() == 1 ? as_piece(entry.name) : std::nullopt;
    const std::pair<std::string_view, std::uint64_t> itself(entry.name, 0);
    if (!piece || recorded.contains(piece->first)) return piece.value_or(itself);
    // A parameter's own name may be `a@1`, a state's never.
    const StoredName parts(entry.name);
    if (parts.is_plain() || (!parts.is_state() && owner_shape(entry.name))) return itself;
    if (owner_shape(piece->first) == nullptr)
      fail_damaged(path(), text({"nothing says how large '", piece->first, "' is"}));
    return *piece;
  };

  std::map<std::string_view, std::vector<StoredPiece>> found;  // by the name of the whole tensor
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& entry : file.tensors()) {
      const auto [whole, first] = whole_of(entry);
      found[whole].push_back({first, entry.count, &file, &entry});
    }
  }
  for (auto& [name, pieces] : found) {
    std::ranges::sort(pieces, {},
                      [](const StoredPiece& piece) { return std::pair(piece.first, piece.count); });
    const TensorEntry& entry = *pieces.front().entry;
    StoredTensor tensor{std::string(name), entry.element, entry.shape, entry.count,
                        std::move(pieces)};
    const bool is_whole = std::ranges::any_of(
        tensor.pieces, [&](const StoredPiece& piece) { return piece.entry->name == name; });
    if (is_whole && tensor.pieces.size() > 1) {
      fail_damaged(path(), text({"'", tensor.name, "' is in '", tensor.pieces[0].file->path(),
                                 "' and again in '", tensor.pieces[1].file->path(), "'"}));
    }
    if (!is_whole) {
      const auto shape = recorded.find(tensor.name);
      tensor.shape = shape != recorded.end() ? shape->second : *owner_shape(tensor.name);
      join(tensor);
    }
    tensors_.push_back(std::move(tensor));
  }
}

/// Checks that the pieces form the whole tensor.
LOCKSTEP_INLINE void CheckpointReader::join(StoredTensor& tensor) const {
  const auto damaged = [&](std::initializer_list<TextPart> problem) {
    fail_damaged(path(), text({"the pieces of '", tensor.name, "' ", text(problem)}));
  };
  tensor.count = count_of(tensor.shape);
  if (tensor.count == too_large) damaged({"have a shape that is too large"});
  std::uint64_t offset = 0;
  for (const StoredPiece& piece : tensor.pieces) {
    if (piece.entry->element != tensor.element) damaged({"have different types"});
    if (piece.first != offset)
      damaged({piece.first < offset ? "overlap at element " : "lack element ",
               std::min(offset, piece.first)});
    offset += piece.count;
    if (offset > tensor.count) break;
  }
  if (offset != tensor.count) damaged({"have ", offset, " elements of ", tensor.count});
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
  using Task = std::pair<const SafetensorsFile*, const TensorEntry*>;
  std::vector<Task> tasks;
  for (const SafetensorsFile& file : files_) {
    for (const TensorEntry& tensor : file.tensors()) tasks.emplace_back(&file, &tensor);
  }
  std::ranges::sort(tasks, std::greater(), [](const Task& task) { return task.second->bytes; });

  // Large tensors first, by several threads.
  share_work(tasks.size(), [&](std::size_t i) { tasks[i].first->verify(*tasks[i].second); });
}

using Names = std::vector<std::string>;

/// Texts as one message, each after its length.
template <class Texts = std::initializer_list<std::string_view>>
std::string packed(const Texts& texts) {
  std::string all;
  for (const std::string_view one : texts) {
    const std::uint64_t size = one.size();
    all.append(reinterpret_cast<const char*>(&size), sizeof size).append(one);
  }
  return all;
}

LOCKSTEP_INLINE std::vector<std::string_view> unpacked(std::string_view all) {
  std::vector<std::string_view> texts;
  while (!all.empty()) {
    std::uint64_t size = 0;
    std::memcpy(&size, all.data(), sizeof size);
    texts.push_back(all.substr(sizeof size, size));
    all.remove_prefix(sizeof size + size);
  }
  return texts;
}

/// A value as bytes of a message, and back.
std::string bytes_of(const auto& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <class T>
T value_in(std::string_view bytes) {
  T value{};
  bytes.copy(reinterpret_cast<char*>(&value), sizeof value);
  return value;
}

/// A rank's message about its work: `.` and the result, or `!` and the error.
LOCKSTEP_INLINE std::string outcome_of(std::string_view operation,
                                       FunctionRef<std::string()> work) {
  try {
    return "." + work();
  } catch (const Error& error) {
    return "!" + packed({error.operation(), error.problem(), error.advice()});
  } catch (const std::exception& error) {
    return "!" + packed({operation, error.what(), "see to that, and call it again"});
  }
}

/// The results of all ranks, or the first rank's error.
LOCKSTEP_INLINE std::vector<std::string> results_of(std::vector<std::string> all) {
  for (std::size_t rank = 0; rank != all.size(); ++rank) {
    if (all[rank].front() != '!') continue;
    const auto error = unpacked(std::string_view(all[rank]).substr(1));
    throw Error(error[0], error[1], error[2], Rank{rank});
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

/// `store_together` for work that does not wait for storage, without heartbeats.
LOCKSTEP_INLINE std::vector<std::string> work_together(const JointRanks& ranks,
                                                       std::string_view operation,
                                                       FunctionRef<std::string()> work) {
  return results_of(ranks.gather(outcome_of(operation, work)));
}

LOCKSTEP_INLINE std::vector<std::string> store_together(const JointRanks& ranks,
                                                        std::string_view operation,
                                                        FunctionRef<std::string()> work,
                                                        const StoragePatience& patience) {
  if (ranks.world == 1) return work_together(ranks, operation, work);
  using Clock = std::chrono::steady_clock;
  constexpr std::string_view dead = "see whether the disk or its server still answers";
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<std::string> mine;  // this rank's outcome
  std::vector<std::string> all;
  std::exception_ptr failure;
  // Used by the heartbeat thread only.
  const Clock::time_point begun = Clock::now();
  Clock::time_point progressed = begun;
  std::uint64_t progress = storage_progress().load();
  std::chrono::milliseconds next_report = patience.first_report;
  bool is_given_up = false;

  // This rank's next message: `~` while it works, then the outcome.
  const auto next = [&]() -> std::string {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, patience.heartbeat, [&] { return mine.has_value(); });
    if (mine) return *mine;
    const Clock::time_point now = Clock::now();
    if (const std::uint64_t count = storage_progress().load(); count != progress) {
      progress = count;
      progressed = now;
    }
    const auto seconds = [&](Clock::time_point since) {
      return std::chrono::duration_cast<std::chrono::seconds>(now - since).count();
    };
    if (now - progressed >= patience.longest) {
      is_given_up = true;
      const std::string problem =
          text({"its storage has made no progress for ", seconds(progressed), " s"});
      return "!" + packed({operation, problem, dead});
    }
    if (now - begun >= next_report) {
      next_report *= 2;
      say(text({"rank ", ranks.rank, ", ", operation, ": waiting for storage for ", seconds(begun),
                " s; the other ranks wait too"}));
    }
    return "~";
  };
  // Messages are exchanged until all ranks have outcomes, or one (still blocked) gives up.
  const auto run = [&] {
    for (bool works = true, is_dead = false; works && !is_dead;) {
      all = ranks.gather(next());
      works = false;
      for (const std::string& of_rank : all) {
        works = works || of_rank.front() == '~';
        is_dead = is_dead || (of_rank.front() == '!' && of_rank.ends_with(dead));
      }
    }
    // The error ends this process while its work still blocks: partial files must not stay.
    if (is_given_up) remove_temporary_files();
  };
  Thread thread;
  try {
    thread = Thread(
        ThreadName{"lockstep alive", "the thread that says that this rank waits for storage"}, run,
        [&](std::exception_ptr thrown) { failure = std::move(thrown); });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Without the thread the exchange begins after the work; the others wait up to their timeout.
  }
  std::string outcome = outcome_of(operation, work);
  {
    const std::lock_guard lock(mutex);
    mine = std::move(outcome);
    changed.notify_all();
  }
  if (!thread.is_running()) run();
  thread.join();
  if (failure) std::rethrow_exception(failure);
  return results_of(std::move(all));
}

LOCKSTEP_INLINE void do_together(const JointRanks& ranks, std::string_view operation,
                                 FunctionRef<void()> work) {
  store_together(ranks, operation, [&] {
    work();
    return std::string();
  });
}

/// The name of a piece's whole tensor in a file. Buffers of ranks other than 0 have their own.
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

/// `whose` is a rank or `common`.
LOCKSTEP_INLINE std::string value_tensor_name(std::string_view whose, std::string_view name) {
  return text({"lockstep/value/", whose, "/", name});
}

/// The current values as a message: descriptions, then name, type and bytes of every tensor.
LOCKSTEP_INLINE std::string pack_values(const StateValues& values) {
  JsonLine descriptions;
  Names texts(1);
  for (const StateValue& value : values) {
    JsonLine one = JsonLine().add("type", value.type());
    const std::string_view bytes = value.save(one);
    descriptions.add(value.name(), one);
    if (value.kind() == ElementKind::unsupported) continue;
    texts.insert(texts.end(), {value.name(), bytes_of(value.kind()), std::string(bytes)});
  }
  texts[0] = descriptions.members();
  return packed(texts);
}

/// The descriptions of packed values; adds their tensors, which point into `all`, to a file.
LOCKSTEP_INLINE JsonLine unpack_values(std::string_view whose, std::string_view all,
                                       std::vector<TensorToWrite>& to) {
  const std::vector<std::string_view> texts = unpacked(all);
  for (std::size_t i = 1; i < texts.size(); i += 3) {
    const auto kind = value_in<ElementKind>(texts[i + 1]);
    to.push_back({value_tensor_name(whose, texts[i]),
                  kind,
                  {texts[i + 2].size() / element_size(kind)},
                  std::as_bytes(std::span(texts[i + 2]))});
  }
  return JsonLine(texts[0]);
}

// The names of the header's numbers, for the writer and the reader.

inline constexpr std::pair<const char*, std::uint64_t ReplicaProgress::*> progress_numbers[] = {
    {"updates", &ReplicaProgress::updates},
    {"counted", &ReplicaProgress::counted},
    {"skipped", &ReplicaProgress::skipped},
    {"epoch", &ReplicaProgress::epoch},
    {"curve_ahead", &ReplicaProgress::curve_ahead}};
inline constexpr std::pair<const char*, std::optional<std::uint64_t> ReplicaProgress::*>
    optional_progress_numbers[] = {{"newest_buffers", &ReplicaProgress::newest_buffers},
                                   {"random_seed", &ReplicaProgress::random_seed}};
inline constexpr const char* sampler_numbers[] = {"samples", "world", "seed",    "rule",
                                                  "epoch",   "first", "position"};

/// Calls `f(entry)` for the last entry of each name.
void for_each_last(const auto& entries, const auto& f) {
  for (auto at = entries.begin(); at != entries.end(); ++at) {
    const auto has_name = [&](const auto& later) { return later.name == at->name; };
    if (std::none_of(at + 1, entries.end(), has_name)) f(*at);
  }
}

LOCKSTEP_INLINE JsonLine json_of(const ReplicaProgress& progress) {
  JsonLine json;
  for (const auto& [name, member] : progress_numbers) json.add(name, progress.*member);
  for (const auto& [name, member] : optional_progress_numbers)
    if (const auto& number = progress.*member) json.add(name, *number);
  json.add("knows_epoch", progress.knows_epoch);
  if (progress.loss_scale) {
    json.add("loss_scale", JsonLine()
                               .add_exact("scale", progress.loss_scale->scale)
                               .add("good_steps", progress.loss_scale->good_steps));
  }
  JsonLine numbers;
  // A rule made of several rules may list a name more than once: the last number is the job's.
  for_each_last(progress.numbers, [&](const NamedNumber& number) {
    const auto add = [&]<class T>(T value) {
      if constexpr (std::same_as<T, double>) numbers.add_exact(number.name, value);
      if constexpr (!std::same_as<T, double>) numbers.add(number.name, value);
    };
    std::visit(add, number.value);
  });
  return json.add("numbers", numbers);
}

LOCKSTEP_INLINE ReplicaProgress progress_of(const JsonEntry& entry) {
  ReplicaProgress progress;
  for (const auto& [name, member] : progress_numbers) progress.*member = entry.at(name).natural();
  for (const auto& [name, member] : optional_progress_numbers)
    if (const auto number = entry.find(name)) progress.*member = number->natural();
  progress.knows_epoch = entry.at("knows_epoch").boolean();
  if (const auto scale = entry.find("loss_scale")) {
    progress.loss_scale.emplace();
    progress.loss_scale->scale = static_cast<float>(scale->at("scale").real());
    progress.loss_scale->good_steps = static_cast<std::uint32_t>(scale->at("good_steps").natural());
  }
  const JsonEntry numbers = entry.at("numbers");
  for (const Json::Member& member : numbers.members()) {
    const JsonEntry number = numbers.of(member);
    NamedNumber& named = progress.numbers.emplace_back(NamedNumber{member.first, {}});
    if (number.get_if<std::uint64_t>() != nullptr) {
      named.value = number.natural();
    } else if (number.get_if<std::int64_t>() != nullptr) {
      named.value = number.integer();
    } else {
      named.value = number.real();
    }
  }
  return progress;
}

/// The metadata of a checkpoint, without the program's values.
LOCKSTEP_INLINE JsonLine facts_of(const StatefulJob& job, const SaveOptions& options) {
  const ReplicaProgress progress = job.progress();
  JsonLine json;
  json.add("version", version)
      .add("time", utc_text("%Y-%m-%dT%H:%M:%SZ"))
      .add_array("policies", job.shape.policies)
      .add("fingerprint", checksum_text(job.shape.fingerprint))
      .add("world", job.shape.world)
      .add("epoch", options.epoch)
      .add("step", progress.updates);
  if (options.best) json.add_exact("best", *options.best);
  JsonLine scores;
  for_each_last(options.scores, [&](const Score& score) {  // an epoch may have the same score twice
    scores.add(score.name,
               JsonLine().add_exact("mean", score.mean).add_exact("count", score.count));
  });
  if (!scores.empty()) json.add("scores", scores);
  json.add("progress", json_of(progress));
  json.add("gradients", JsonLine()
                            .add("replicas", job.shape.replicas)
                            .add_exact("divisor", job.shape.gradient_divisor));
  if (const auto& at = options.position) {
    const std::uint64_t numbers[] = {at->samples, at->world.value(), at->seed.value(),
                                     at->rule,    at->epoch.value(), at->first,
                                     at->position};
    JsonLine sampler;
    for (std::size_t i = 0; i != std::size(numbers); ++i)
      sampler.add(sampler_numbers[i], numbers[i]);
    json.add("sampler", sampler);
  }
  return json;
}

/// A number of ranks, bounded since loops run over it.
LOCKSTEP_INLINE std::size_t rank_count(const JsonEntry& entry) {
  constexpr std::uint64_t most = std::uint64_t{1} << 20;
  const std::uint64_t count = entry.natural();
  if (count == 0 || count > most) entry.fail("is no number of ranks");
  return count;
}

/// The file name of a rank's shard. The token is new for every save, so nothing is overwritten.
LOCKSTEP_INLINE std::string shard_name(std::string_view path, std::string_view token,
                                       std::size_t rank, std::size_t world) {
  std::string_view stem = name_in_folder(path);
  cut_end(stem, checkpoint_suffix);
  return text({stem, ".", token, ".rank-", rank, "-of-", world, checkpoint_suffix});
}

LOCKSTEP_INLINE std::string beside(std::string_view path, std::string_view name) {
  return text({folder_of(path), "/", name});
}
LOCKSTEP_INLINE void remove_shards(std::string_view path, std::span<const ShardFile> shards) {
  for (const ShardFile& shard : shards) ::unlink(beside(path, shard.name).c_str());
}

/// The shards of the file to be replaced; none if it has another hard link, which needs them.
LOCKSTEP_INLINE std::vector<ShardFile> shards_to_replace(const std::string& path) {
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0 || status.st_nlink > 1) return {};
  try {
    return shards_in(SafetensorsFile(path).facts());
  } catch (const Error&) {  // it was no checkpoint, and has none
    return {};
  }
}

/// The file that a rank writes. It points into itself and into the job's memory or a copy.
struct RankFile {
  std::string path;
  FileToWrite file;
  std::vector<StateEntry> pieces;
  bool is_copied = false;         // are there copies to wait for?
  JsonLine shapes;                // rank 0: of tensors that its own file does not have whole
  Names values;                   // rank 0: every rank's, then the common ones, packed
  std::vector<ShardFile> shards;  // rank 0: the other ranks' files
  std::string part;               // rank 0, for one consolidated file: its own temporary part
  std::function<void()> written;  // rank 0

  /// Writes rank 0's file after all others; its rename commits the checkpoint. Then removes the
  /// shards of the replaced file or, on failure, those of this one.
  void commit() {
    const std::vector<ShardFile> replaced = shards_to_replace(path);
    JsonLine facts = file.facts;
    if (!shards.empty()) file.facts.add(shapes).add(index_of(shards));
    if (!shards.empty() && !part.empty()) {
      write_whole(std::move(facts));
    } else {
      try {
        write_file(path, file);
      } catch (...) {
        remove_shards(path, shards);
        throw;
      }
    }
    remove_shards(path, replaced);
    if (written) written();
  }

 private:
  /// Joins all files into one, chunk by chunk, and removes them.
  void write_whole(JsonLine facts) {
    const std::shared_ptr<void> parts_end(nullptr, [&](void*) {  // on every exit
      ::unlink(part.c_str());
      remove_shards(path, shards);
    });
    write_file(part, file);
    const CheckpointReader parts(part);
    std::vector<std::byte> window(write_chunk_bytes);
    FileToWrite whole{{}, std::move(facts), {}};
    for (const StoredTensor& tensor : parts.tensors()) {
      const std::size_t size = element_size(tensor.kind());
      TensorToWrite& written = whole.tensors.emplace_back();
      written.name = tensor.name;
      written.kind = tensor.kind();
      written.shape = tensor.shape;
      written.data = {static_cast<const std::byte*>(nullptr), tensor.count * size};
      written.read = [&parts, &tensor, &window, size](std::uint64_t at, std::size_t n) {
        parts.read(tensor, at / size, n / size, window.data());
        return std::span<const std::byte>(window.data(), n);
      };
    }
    write_file(path, whole);
  }
};

inline constexpr std::chrono::minutes longest_shard_wait{30};

/// Waits for the other ranks' files, each of which appears when it is complete, and fills in their
/// sizes and digests. False when `is_given_up` becomes true. **Host** blocks.
LOCKSTEP_INLINE bool await_shards(const std::string& path, std::span<ShardFile> shards,
                                  const std::atomic<bool>& is_given_up) {
  const Deadline deadline = Deadline::after(longest_shard_wait);
  for (std::size_t i = 0; i != shards.size(); ++i) {
    const std::string missing = beside(path, shards[i].name);
    std::chrono::milliseconds pause{1};
    while (::access(missing.c_str(), F_OK) != 0) {
      if (is_given_up.load()) return false;
      struct stat folder{};
      if (::stat(folder_of(path).c_str(), &folder) != 0 || folder.st_nlink == 0)
        fail_writing("checkpoint", path, ENOENT);  // the folder is gone, so no file will come
      if (deadline.passed()) {
        remove_shards(path, shards.first(i));
        fail("save",
             {"rank ", shards[i].rank, " has not written its part '", missing, "' within ",
              longest_shard_wait.count(), " minutes"},
             "see whether that rank writes to the same folder");
      }
      sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(32));
    }
    const SafetensorsFile shard(missing);
    shards[i].bytes = shard.bytes();
    shards[i].digest = shard.digest().value_or(0);
  }
  return true;
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

/// The size of a staging buffer, for tensors that cannot be read in place.
inline constexpr std::size_t staging_bytes = std::size_t{8} << 20;
inline constexpr std::size_t staged_elements = staging_bytes / 8;

/// Calls `f(part)` for parts of a piece that fit into a staging buffer.
void for_each_part(const StateEntry& piece, const auto& f) {
  for (std::size_t at = 0; at < piece.count; at += staged_elements)
    f(piece.part(at, std::min(staged_elements, piece.count - at)));
}

/// One rank's part of a load: opens a checkpoint, verifies it on rank 0 and compares it with the
/// job on every rank before the job changes. An error on one rank is thrown on all.
class StateLoader {
 public:
  StateLoader(const StatefulJob& job, const std::string& path, const LoadOptions& options,
              LoadWhat what)
      : job_(job), path_(path), options_(options), what_(what) {}

  Resumed run() {
    open();
    judge(store_together(job_.ranks, operation(), [&] {
      match();
      return packed({packed(missing_), packed(unused_), packed(mismatches_)});
    }));
    if (what_ == LoadWhat::job) note_differences();
    do_together(job_.ranks, operation(), [&] { read(); });
    resumed_.path = path_;
    return std::move(resumed_);
  }

 private:
  /// The tensors of a piece in the file; local states are a sum or mean of several.
  using Sources = std::vector<const StoredTensor*>;

  std::string_view operation() const {
    constexpr std::string_view names[] = {"load_parameters", "load", "resume"};
    return names[static_cast<std::size_t>(what_)];
  }

  void open() {
    require_same_path(job_.ranks, operation(),
                      store_together(job_.ranks, operation(), [&] { return path_; }));
    const std::vector<std::string> digests = store_together(job_.ranks, operation(), [&] {
      reader_ = std::make_unique<CheckpointReader>(path_);
      if (what_ != LoadWhat::parameters) {
        if (reader_->facts().find("parameters_only"))
          fail(
              operation(),
              {"'", path_, "' is a file of parameters and buffers only, and has no training state"},
              "call load_parameters, or name a checkpoint that was saved without parameters_only");
        if (!reader_->facts().find("progress"))
          fail(operation(), {"'", path_, "' was not saved by lockstep, and has no optimizer"},
               "call load_parameters, which loads parameters and buffers of any safetensors file");
        read_facts(reader_->facts());
      }
      if (job_.ranks.rank == Rank{0}) reader_->verify();
      return bytes_of(reader_->main_file().digest().value_or(reader_->main_file().bytes()));
    });
    for (std::size_t rank = 1; rank < digests.size(); ++rank) {
      if (digests[rank] != digests[0])
        fail(operation(), {"rank ", rank, " and rank 0 see different files at '", path_, "'"},
             "give all ranks the same file, which nobody replaces while it is read",
             job_.ranks.rank);
    }
  }

  void read_facts(const JsonEntry& facts) {
    resumed_.world = WorldSize{rank_count(facts.at("world"))};
    resumed_.epoch = facts.at("epoch").natural();
    if (const auto best = facts.find("best")) resumed_.best = best->real();
    if (const auto scores = facts.find("scores")) {
      std::vector<Score> all;
      for (const Json::Member& member : scores->members()) {
        const JsonEntry score = scores->of(member);
        all.push_back({member.first, score.at("mean").real(), score.at("count").real()});
      }
      resumed_.scores = Scores(std::move(all));
    }
    progress_ = progress_of(facts.at("progress"));
    resumed_.step = progress_.updates;
    const JsonEntry gradients = facts.at("gradients");
    replicas_ = rank_count(gradients.at("replicas"));
    gradient_divisor_ = gradients.at("divisor").real();
    if (!(gradient_divisor_ >= 1 && gradient_divisor_ <= static_cast<double>(replicas_)))
      gradients.at("divisor").fail("is not between 1 and the number of replicas");
    if (const auto sampler = facts.find("sampler")) {
      std::uint64_t n[std::size(sampler_numbers)];
      for (std::size_t i = 0; i != std::size(n); ++i)
        n[i] = sampler->at(sampler_numbers[i]).natural();
      resumed_.position =
          SamplerState{n[0], WorldSize{n[1]}, Seed{n[2]}, n[3], Epoch{n[4]}, n[5], n[6]};
    }
  }

  void name_tensors() {
    for (const StoredTensor& stored : reader_->tensors()) {
      const StoredName parts(stored.name);
      std::string name = stored.name;
      if (parts.name.empty() && !parts.is_plain()) continue;
      if (options_.rename) {
        const std::string wanted = options_.rename(parts.name);
        if (wanted.empty()) continue;
        name = text({parts.before, wanted, parts.after});
      }
      const auto [found, is_new] = tensors_.try_emplace(std::move(name), &stored);
      if (!is_new)
        fail(operation(),
             {"both '", found->second->name, "' and '", stored.name, "' of '", path_, "' become '",
              found->first, "'"},
             "give every tensor a name of its own in .rename");
    }
  }

  const StoredTensor* find(const std::string& name) const {
    const auto offset = tensors_.find(name);
    return offset == tensors_.end() ? nullptr : offset->second;
  }

  bool fits(const StateEntry& piece, const StoredTensor& stored) {
    const auto shape = std::span(piece.whole.extents).first(piece.whole.rank);
    if (!std::ranges::equal(stored.shape, shape)) {
      mismatches_.push_back(
          text({"size mismatch for ", printable(stored.name), ": ", shape_text(stored.shape),
                " in the file, ", shape_text(shape), " in the job"}));
      return false;
    }
    const bool convertible = is_floating(stored.kind()) && is_floating(piece.whole.element);
    const bool may_differ = options_.convert || (piece.role == StateRole::local && !piece.averaged);
    if (stored.kind() == piece.whole.element || (convertible && may_differ)) return true;
    mismatches_.push_back(
        text({"type mismatch for ", printable(stored.name), ": ", stored.element->name,
              " in the file, ", element_name(piece.whole.element), " in the job",
              convertible ? " (.convert = true rounds it)" : ""}));
    return false;
  }

  /// Each rank writes its part of shared memory; of replicas in one process the first writes all.
  StateEntry own_part(const StateEntry& piece) const {
    if (!piece.shared) return piece;
    if (job_.is_one_process) return piece.part(0, piece.rank == 0 ? piece.count : 0);
    const std::size_t me = job_.ranks.rank.value();
    const std::size_t share = piece.count / job_.ranks.world;
    const bool is_last = me + 1 == job_.ranks.world;
    return piece.part(me * share, is_last ? piece.count - me * share : share);
  }

  /// The stored tensor of a piece; `name` is the one to report as missing.
  const StoredTensor* find_for(const StateEntry& piece, std::string& name) const {
    name = stored_name(piece);
    if (piece.role == StateRole::buffer) {
      const bool own = job_.shape.keeps_own_buffers && what_ != LoadWhat::parameters;
      if (const StoredTensor* const stored = own ? find(name) : nullptr) return stored;
      name = piece.name;
    }
    if (const StoredTensor* const stored = find(name)) return stored;
    // A file of another program may use one of several aliases.
    for (const NameAlias& alias : job_.aliases) {
      const StoredTensor* const stored = alias.of == name ? find(alias.name) : nullptr;
      if (stored != nullptr) return stored;
    }
    return nullptr;
  }

  /// A rank gets back its own local state. If the number of replicas is now n, replica r sums the
  /// gradient residuals of the saved replicas r, r + n, ...; of averaged states all take the mean.
  void want_own(const StateEntry& piece) {
    const bool all = piece.averaged && replicas_ != job_.shape.replicas;
    Sources sources;
    StateEntry of_rank = piece;
    for (of_rank.rank = all ? 0 : piece.rank; of_rank.rank < replicas_;
         of_rank.rank += all ? 1 : job_.shape.replicas) {
      const StoredTensor* const stored = find(stored_name(of_rank));
      if (stored != nullptr && fits(piece, *stored)) sources.push_back(stored);
    }
    if (!sources.empty()) pieces_.emplace_back(piece, std::move(sources));
  }

  void match() {
    name_tensors();
    const bool trains = what_ != LoadWhat::parameters;
    std::set<const StoredTensor*> used;
    std::set<std::string_view> known;  // parameters and buffers of the job
    for (const StateEntry& piece : job_.entries(StateUse::loading)) {
      const bool is_plain = piece.role == StateRole::parameter || piece.role == StateRole::buffer;
      if (is_plain) known.insert(piece.name);
      if (!is_plain && !trains) continue;
      if (piece.role == StateRole::local) {
        want_own(piece);
        continue;
      }
      std::string name;
      const StoredTensor* const stored = find_for(piece, name);
      if (stored != nullptr) {
        used.insert(stored);
        if (fits(piece, *stored)) pieces_.emplace_back(own_part(piece), Sources{stored});
      } else if (piece.role != StateRole::state || piece.state != "step") {
        // Without a parameter's own update count, the common count holds.
        missing_.push_back(name);
      }
    }
    for (const NameAlias& alias : job_.aliases)
      if (const StoredTensor* const stored = find(alias.name)) used.insert(stored);
    for (const auto& [name, stored] : tensors_) {
      const StoredName parts(name);
      const bool is_unknown_state =
          parts.is_state() && trains && parts.after != "/step" && known.contains(parts.name);
      if (!used.contains(stored) && (parts.is_plain() || is_unknown_state)) unused_.push_back(name);
    }
    if (what_ != LoadWhat::job) return;
    match_values(options_.common, reader_->facts().find("common"), "common", "");
    const std::size_t me = job_.ranks.rank.value();
    if (me < resumed_.world.value()) {
      const std::optional<JsonEntry> all = reader_->facts().find("values");
      const bool is_saved = all && me < all->items().size();
      match_values(options_.values, is_saved ? std::optional(all->item(me)) : std::nullopt,
                   std::to_string(me), text({" of rank ", me}));
    } else if (!options_.values.empty()) {
      resumed_.notes.push_back(text({"rank ", me, " is new, and its values stay as they are"}));
    }
  }

  void match_values(const StateValues& wanted, const std::optional<JsonEntry>& all,
                    std::string_view whose, std::string_view of_whom) {
    std::set<std::string_view> known;
    for (const StateValue& value : wanted) {
      known.insert(value.name());
      const std::optional<JsonEntry> saved = all ? all->find(value.name()) : std::nullopt;
      if (!saved) {  // a hand-written loop's file has no trainer's values
        if (!value.name().starts_with(reserved_prefix))
          missing_.push_back(text({"the value ", value.name(), of_whom}));
        continue;
      }
      if (const std::string type = saved->at("type").text(); type != value.type()) {
        mismatches_.push_back(text({"type mismatch for the value ", value.name(), " is ", type,
                                    " in the file and ", value.type(), " here"}));
        continue;
      }
      std::string bytes;
      if (value.kind() != ElementKind::unsupported) {
        const StoredTensor* const stored = reader_->find(value_tensor_name(whose, value.name()));
        if (stored == nullptr || stored->kind() != value.kind()) saved->fail("has no such tensor");
        bytes.resize(stored->count * element_size(value.kind()));
        reader_->read(*stored, 0, stored->count, reinterpret_cast<std::byte*>(bytes.data()));
      }
      value.check(*saved, bytes);
      set_values_.push_back(
          [&value, from = *saved, bytes = std::move(bytes)] { value.load(from, bytes); });
    }
    for (std::size_t i = 0; all && i != all->members().size(); ++i) {
      const std::string& name = all->members()[i].first;
      if (!known.contains(name) && !name.starts_with(reserved_prefix))  // reserved for trainers
        resumed_.notes.push_back(
            text({"the file has a value ", name, of_whom, " that nobody has asked for"}));
    }
  }

  /// Throws unless the findings of all ranks allow the load.
  void judge(const std::vector<std::string>& gathered) {
    std::set<std::string> missing;
    std::set<std::string> mismatches;
    std::map<std::string, std::size_t> unused;  // unexpected if unused by every rank
    for (const std::string& of_rank : gathered) {
      const auto lists = unpacked(of_rank);
      for (const std::string_view name : unpacked(lists[0])) missing.emplace(name);
      for (const std::string_view name : unpacked(lists[1])) ++unused[std::string(name)];
      for (const std::string_view mismatch : unpacked(lists[2])) mismatches.emplace(mismatch);
    }
    LoadReport& report = resumed_.report;
    report.missing.assign(missing.begin(), missing.end());
    for (const auto& [name, ranks] : unused)
      if (ranks == gathered.size()) report.unexpected.push_back(name);
    std::string problems;
    const auto add = [&](std::string_view before, const std::string& problem) {
      problems += text({problems.empty() ? "" : "; ", before, problem});
    };
    if (options_.strict && !report.missing.empty())
      add("missing in the file: ", printable(listed(report.missing)));
    if (options_.strict && !report.unexpected.empty())
      add("unexpected in the file: ", printable(listed(report.unexpected)));
    const bool is_strange = !problems.empty();
    for (const std::string& mismatch : mismatches) add("", mismatch);
    if (problems.empty()) return;
    fail(operation(), {"'", path_, "' does not fit this job: ", problems},
         is_strange ? "load a file of the same model and optimizer, translate names with .rename, "
                      "or load what both have with .strict = false"
                    : "load a file of the same model",
         job_.ranks.rank);
  }

  void note_differences() {
    Names& notes = resumed_.notes;
    // Steps draw from the checkpoint's seed, not from this job's.
    const std::optional<std::uint64_t> own = job_.progress().random_seed;
    const std::optional<std::uint64_t> saved = progress_.random_seed;
    if (own && saved && *own != *saved)
      notes.push_back(text({"random numbers of steps go on from seed ", *saved,
                            " of the checkpoint, not from seed ", *own}));
    if (replicas_ != job_.shape.replicas)
      notes.push_back(text({"saved by ", replicas_, " ranks, resumed by ", job_.shape.replicas}));
  }

  /// Returns a factor for saved gradient residuals: loss scale and gradient divisor may differ.
  double set_progress() {
    if (what_ == LoadWhat::parameters) return 1;
    if (what_ != LoadWhat::job) progress_.random_seed.reset();  // a new run keeps its own seed
    job_.set_progress(progress_);
    const auto scale = [](const ReplicaProgress& of) {
      return of.loss_scale ? static_cast<double>(of.loss_scale->scale) : 1.0;
    };
    return job_.shape.gradient_divisor / gradient_divisor_ * scale(job_.progress()) /
           scale(progress_);
  }

  /// Tensors that have the same layout in file and memory are read in place, by several threads.
  void read() {
    const double residual_factor = set_progress();
    std::vector<std::pair<StateEntry, const StoredTensor*>> direct;
    for (const auto& [piece, sources] : pieces_) {
      const StoredTensor* const stored = sources.front();
      const ElementKind kind = piece.whole.element;
      if (piece.role == StateRole::local) continue;
      if (piece.on_host && piece.derived == nullptr && piece.held == kind &&
          stored->kind() == kind) {
        for_each_part(piece, [&](const StateEntry& part) { direct.emplace_back(part, stored); });
      } else {
        read_sum(piece, sources, 1);
      }
    }
    share_work(direct.size(), [&](std::size_t i) {
      const auto& [piece, stored] = direct[i];
      reader_->read(*stored, piece.first, piece.count, piece.data);
    });
    for (const auto& [piece, sources] : pieces_) {  // a rank's own parameters come last
      const double mean_factor = 1 / static_cast<double>(sources.size());
      if (piece.role == StateRole::local)
        read_sum(piece, sources, piece.averaged ? mean_factor : residual_factor);
    }
    for (const std::function<void()>& set_value : set_values_) set_value();
  }

  /// One of three staging buffers, in memory that the device copies from fastest.
  std::byte* staging(std::size_t which) {
    if (!staging_) staging_ = job_.make_memory(3 * staging_bytes);
    return staging_.get() + which * staging_bytes;
  }

  /// Writes the sum of the sources times `factor`, through staging buffers.
  void read_sum(const StateEntry& piece, const Sources& sources, double factor) {
    const ElementKind kind = piece.whole.element;
    const bool is_copy = sources.size() == 1 && factor == 1;
    for_each_part(piece, [&](const StateEntry& part) {
      std::byte* from = staging(0);
      auto* const numbers = reinterpret_cast<double*>(staging(1));
      auto* const sum = reinterpret_cast<double*>(staging(2));
      if (!is_copy) std::fill(sum, sum + part.count, 0.0);
      for (const StoredTensor* stored : sources) {
        reader_->read(*stored, part.first, part.count, staging(0));
        const ElementKind to = is_copy ? kind : ElementKind::f64;
        if (is_copy && stored->kind() == kind) continue;
        convert_elements(staging(1), to, staging(0), stored->kind(), part.count);
        from = staging(1);
        for (std::size_t i = 0; !is_copy && i != part.count; ++i) sum[i] += factor * numbers[i];
      }
      if (!is_copy) {
        convert_elements(staging(0), kind, staging(2), ElementKind::f64, part.count);
        from = staging(0);
      }
      job_.copy_in(part, from);
    });
  }

  const StatefulJob& job_;
  const std::string& path_;
  const LoadOptions& options_;
  LoadWhat what_;
  std::unique_ptr<CheckpointReader> reader_;
  // From the checkpoint.
  Resumed resumed_;
  ReplicaProgress progress_;
  std::size_t replicas_ = 1;
  double gradient_divisor_ = 1;
  std::map<std::string, const StoredTensor*, std::less<>> tensors_;  // by name in the job
  std::vector<std::pair<StateEntry, Sources>> pieces_;
  std::vector<std::function<void()>> set_values_;
  Names missing_;
  Names unused_;
  Names mismatches_;  // as messages
  std::shared_ptr<std::byte> staging_;
};

LOCKSTEP_INLINE Resumed load_job(const StatefulJob& job, const std::string& path,
                                 const LoadOptions& options, LoadWhat what) {
  return StateLoader(job, path, options, what).run();
}

/// A tensor of a file and this rank's pieces of it, in order.
using CollectedTensor = std::pair<std::string, std::vector<const StateEntry*>>;

LOCKSTEP_INLINE std::vector<CollectedTensor> collected_tensors(std::span<const StateEntry> pieces,
                                                               std::span<const NameAlias> aliases) {
  std::vector<CollectedTensor> tensors;
  std::map<std::string, std::size_t> indices;
  const auto add = [&](const std::string& name, const StateEntry& piece) {
    const auto [found, is_new] = indices.try_emplace(name, tensors.size());
    if (is_new) tensors.push_back({name, {}});
    tensors[found->second].second.push_back(&piece);
  };
  for (const StateEntry& piece : pieces) {
    const std::string name = stored_name(piece);
    // The format has no aliases: the bytes are written once per name.
    for (const NameAlias& alias : aliases)
      if (name == piece.name && alias.of == name) add(alias.name, piece);
    add(name, piece);
  }
  std::vector<CollectedTensor> result;
  for (auto& [name, of_tensor] : tensors) {
    std::ranges::sort(of_tensor, {}, &StateEntry::first);
    std::size_t count = 0;
    for (const StateEntry* piece : of_tensor) count += piece->count;
    if (count == of_tensor.front()->whole.count()) {
      result.emplace_back(std::move(name), std::move(of_tensor));
      continue;
    }
    for (const StateEntry* piece : of_tensor)
      result.push_back({piece_name(name, piece->first), {piece}});
  }
  return result;
}

/// The shapes of parameters that rank 0's file does not have whole, because ranks save pieces.
LOCKSTEP_INLINE JsonLine missing_shapes(const StatefulJob& job,
                                        std::span<const StateEntry> pieces) {
  std::set<std::string_view> known;
  for (const StateEntry& piece : pieces)
    if (piece.role == StateRole::parameter && piece.is_whole()) known.insert(piece.name);
  JsonLine shapes;
  for (const StateEntry& piece : job.entries(StateUse::loading)) {
    if (piece.role != StateRole::parameter || !known.insert(piece.name).second) continue;
    const std::span extents(piece.whole.extents.data(), piece.whole.rank);
    shapes.add_array(piece.name, extents);
    for (const NameAlias& alias : job.aliases)
      if (alias.of == piece.name) shapes.add_array(alias.name, extents);
  }
  return shapes.empty() ? shapes : JsonLine().add("shapes", shapes);
}

/// Can the tensor be written in place?
LOCKSTEP_INLINE bool is_as_in_file(std::span<const StateEntry* const> pieces) {
  const StateEntry& piece = *pieces.front();
  return pieces.size() == 1 && piece.on_host && piece.held == piece.whole.element;
}

/// Bytes of a tensor that cannot be written in place, from consecutive pieces, copied to `window`.
LOCKSTEP_INLINE std::span<const std::byte> copied_chunk(const StatefulJob& job,
                                                        std::span<const StateEntry* const> pieces,
                                                        std::byte* window, std::uint64_t at,
                                                        std::size_t bytes) {
  const std::size_t size = element_size(pieces.front()->whole.element);
  const std::size_t begin = at / size;
  const std::size_t end = begin + bytes / size;
  std::vector<StateCopy> copies;
  std::byte* next = window;
  std::size_t offset = 0;  // of a piece
  for (const StateEntry* piece : pieces) {
    const std::size_t from = std::max(begin, offset);
    const std::size_t to = std::min(end, offset + piece->count);
    if (from < to) {
      copies.push_back({next, piece->part(from - offset, to - from)});
      next += copies.back().piece.file_bytes();
    }
    offset += piece->count;
  }
  job.copy_out(copies);
  job.await_copies();
  return {window, bytes};
}

/// A blocking save writes tensors in place or through a window; an asynchronous one copies all.
/// `memory(bytes)` returns memory for the copies.
LOCKSTEP_INLINE void add_tensors(const StatefulJob& job, bool copies_all, RankFile& file,
                                 FunctionRef<std::byte*(std::size_t)> memory) {
  const std::vector<CollectedTensor> tensors = collected_tensors(file.pieces, job.aliases);
  const auto stored_bytes = [](std::span<const StateEntry* const> pieces) {
    std::size_t bytes = 0;
    for (const StateEntry* piece : pieces) bytes += piece->file_bytes();
    return bytes;
  };
  std::size_t copied_bytes = 0;
  for (const auto& [name, pieces] : tensors) {
    if (copies_all) {
      copied_bytes += align_up(stored_bytes(pieces));
    } else if (!is_as_in_file(pieces)) {
      copied_bytes = write_chunk_bytes;
    }
  }
  std::vector<StateCopy> copies;
  std::byte* offset = memory(copied_bytes);
  for (const auto& [name, pieces] : tensors) {
    const StateEntry& first = *pieces.front();
    const auto extents = std::span(first.whole.extents).first(first.whole.rank);
    const std::size_t bytes = stored_bytes(pieces);
    TensorToWrite& written = file.file.tensors.emplace_back();
    written.name = name;
    written.kind = first.whole.element;
    written.shape = {first.count};
    if (first.is_whole() || pieces.size() > 1) written.shape.assign(extents.begin(), extents.end());
    if (copies_all) {
      written.data = {offset, bytes};
      for (std::byte* to = offset; const StateEntry* piece : pieces) {
        copies.push_back({to, *piece});
        to += piece->file_bytes();
      }
      offset += align_up(bytes);
    } else if (is_as_in_file(pieces)) {
      written.data = {first.data, bytes};
    } else {
      written.data = {static_cast<const std::byte*>(nullptr), bytes};
      written.read = [&job, own = pieces, window = offset](std::uint64_t at, std::size_t size) {
        return copied_chunk(job, own, window, at, size);
      };
    }
  }
  file.is_copied = !copies.empty();
  if (file.is_copied) job.copy_out(copies);
}

LOCKSTEP_INLINE std::vector<StateEntry> saved_pieces(const StatefulJob& job,
                                                     const SaveOptions& options) {
  std::vector<StateEntry> pieces = job.entries(StateUse::saving);
  if (options.parameters_only)
    std::erase_if(pieces, [](const StateEntry& piece) { return stored_name(piece) != piece.name; });
  return pieces;
}

/// The fields of a rank's message before a save; rank 0's token names all shards.
enum Announced : std::uint8_t { its_path, its_token, its_values, is_writing, has_tensors };

/// This rank's file, without the job's tensors. `gathered` has every rank's announcement.
LOCKSTEP_INLINE std::shared_ptr<RankFile> rank_file(const StatefulJob& job, const std::string& path,
                                                    const SaveOptions& options,
                                                    const Names& gathered) {
  const auto file = std::make_shared<RankFile>();
  const std::string_view token = unpacked(gathered[0])[its_token];
  const std::size_t me = job.ranks.rank.value();
  const std::size_t world = gathered.size();
  const std::string own = beside(path, shard_name(path, token, me, world));
  JsonLine& facts = file->file.facts;
  file->path = me == 0 ? path : own;
  file->pieces = saved_pieces(job, options);
  if (me != 0) {
    facts.add("version", version).add("shard", me).add("world", world);
  } else {
    if (options.consolidated || options.parameters_only) file->part = own;
    file->written = options.written;
    file->shapes = missing_shapes(job, file->pieces);
    for (std::size_t rank = 0; rank != world; ++rank) {
      const auto of_rank = unpacked(gathered[rank]);
      file->values.emplace_back(of_rank[its_values]);
      if (rank != 0 && !of_rank[has_tensors].empty())
        file->shards.push_back({shard_name(path, token, rank, world), 0, 0, rank});
    }
    file->values.push_back(pack_values(options.common));
    if (options.parameters_only) {
      // Nothing about the run that led to these parameters: equal parameters make equal files.
      facts.add("version", version).add("parameters_only", true);
    } else {
      facts = facts_of(job, options);
      std::vector<JsonLine> values;
      for (std::size_t i = 0; i <= world; ++i)
        values.push_back(unpack_values(i == world ? "common" : std::to_string(i), file->values[i],
                                       file->file.tensors));
      const JsonLine common = std::move(values.back());
      values.pop_back();
      if (!std::ranges::all_of(values, &JsonLine::empty)) facts.add_array("values", values);
      if (!common.empty()) facts.add("common", common);
    }
  }
  return file;
}

LOCKSTEP_INLINE void write_now(const StatefulJob& job, RankFile& file) {
  const bool is_first = job.ranks.rank == Rank{0};
  try {
    const std::vector<std::string> gathered = store_together(job.ranks, "save", [&] {
      if (file.is_copied) job.await_copies();
      if (is_first || file.file.tensors.empty()) return std::string();
      const ShardFile written = write_file(file.path, file.file);
      return packed({bytes_of(written.bytes), bytes_of(written.digest)});
    });
    for (ShardFile& shard : file.shards) {
      const auto written = unpacked(gathered[shard.rank]);
      shard.bytes = value_in<std::uint64_t>(written[0]);
      shard.digest = value_in<std::uint64_t>(written[1]);
    }
  } catch (...) {
    // Rank 0 has not committed these files, and nobody else can.
    remove_shards(file.path, file.shards);
    throw;
  }
  do_together(job.ranks, "save", [&] {
    if (is_first) file.commit();
  });
}

/// The path that `find(skipped)` finds in a folder, or nothing; prints damaged checkpoints. Throws
/// where all are damaged: a new run would replace the only files to rescue data from.
LOCKSTEP_INLINE std::string find_or_reject(
    std::string_view operation, const std::string& folder,
    FunctionRef<std::optional<std::string>(SkippedCheckpoint)> find) {
  std::string damaged;
  const auto found = find([&](const std::string& path, const std::string& why) {
    say(text({"'", path, "' is passed over: ", why}));
    damaged.append(damaged.empty() ? "'" : ", '").append(name_in_folder(path)).append("'");
  });
  if (!found && !damaged.empty())
    fail(operation, {"no checkpoint in '", folder, "' is valid: ", damaged},
         "put back a copy of one, or name another folder to start anew; nothing was deleted");
  return found.value_or("");
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
    std::string found = find_or_reject("resume", where, [&](SkippedCheckpoint skipped) {
      return newest_valid_checkpoint(where, skipped);
    });
    if (found.empty())
      fail("resume", {"there is no checkpoint in '", where, "'"},
           "name another folder, or leave resume out to start anew");
    return found;
  })[0];
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE bool CheckpointOptions::prefers_higher() const {
  if (higher_is_better) return *higher_is_better;
  constexpr std::string_view lower[] = {"loss", "error", "perplexity"};
  return std::ranges::none_of(lower, [&](auto name) { return best_by.find(name) != best_by.npos; });
}

LOCKSTEP_INLINE StateValues& StateValues::add(const StateValue& value) {
  if (!detail::is_utf8(value.name()))
    detail::fail("StateValues", {"the name ", value.name(), " is not UTF-8"}, "write it in UTF-8");
  if (std::ranges::find(values_, value.name(), &StateValue::name) != values_.end())
    detail::fail("StateValues", {"two values have the name ", value.name()},
                 "give each a name of its own");
  values_.push_back(value);
  return *this;
}

LOCKSTEP_INLINE Saver::~Saver() {
  if (scope_.is_exception()) is_given_up_ = true;
  writer_.reset();  // its thread uses the other members
}

LOCKSTEP_INLINE void Saver::rethrow_on_all(const Job& job) {
  try {
    if (writer_) writer_->rethrow();
  } catch (const Error& error) {
    const Error named = error.rank() ? error : error.on(job.ranks.rank);
    job.abort(named.what());
    throw named;
  }
}

/// Ends the pending save and ignores its outcome.
LOCKSTEP_INLINE void Saver::give_up() {
  is_given_up_ = true;
  try {
    if (writer_) writer_->wait();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it was thrown on all ranks
  }
  is_given_up_ = false;
}

LOCKSTEP_INLINE void Saver::finish_with(const detail::JointRanks& ranks) {
  // Rank 0 comes last: it would wait in vain for the shard of a rank that failed.
  const auto wait = [&](bool is_turn) {
    do_together(ranks, "save", [&] {
      if (is_turn && writer_) writer_->wait();
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

LOCKSTEP_INLINE void Saver::write_later(const Job& job,
                                        const std::shared_ptr<detail::RankFile>& file) {
  const bool is_first = job.ranks.rank == Rank{0};
  if (!writer_ || (!is_first && file->file.tensors.empty())) return;
  writer_->start([this, is_first, file, await_copies = job.copies_waiter()] {
    if (file->is_copied) await_copies();
    if (!is_first) {
      write_file(file->path, file->file);
    } else if (detail::await_shards(file->path, file->shards, is_given_up_)) {
      file->commit();
    }
  });
}

LOCKSTEP_INLINE void Saver::save_job(const Job& job, const std::string& path,
                                     const SaveOptions& options) {
  if (!writer_) writer_.emplace(job.ranks.rank, alarm_);
  std::vector<std::string> gathered;
  try {
    gathered = work_together(job.ranks, "save", [&] {
      writer_->rethrow();
      if (job.micro_batches != 0 && !options.parameters_only)
        detail::fail("save", {"the job is between the micro-batches of a step"},
                     "save after the last one; a trainer's own save waits for it");
      return detail::packed({path, detail::random_token(), detail::pack_values(options.values),
                             writer_->is_busy() ? "1" : "",
                             saved_pieces(job, options).empty() ? "" : "1"});
    });
  } catch (...) {
    give_up();
    throw;
  }
  std::vector<std::string> paths;
  bool is_busy = false;
  for (const std::string& text : gathered) {
    const auto of_rank = detail::unpacked(text);
    paths.emplace_back(of_rank[detail::its_path]);
    is_busy = is_busy || !of_rank[detail::is_writing].empty();
  }
  require_same_path(job.ranks, "save", paths);
  if (is_busy) finish_with(job.ranks);

  job.synchronize_buffers();
  std::shared_ptr<detail::RankFile> file;
  const auto memory = [&](std::size_t bytes) {
    if (snapshot_bytes_ < bytes) {
      snapshot_.reset();
      snapshot_bytes_ = 0;
      snapshot_ = job.make_memory(bytes);
      snapshot_bytes_ = bytes;
    }
    return snapshot_.get();
  };
  try {
    work_together(job.ranks, "save", [&] {
      file = rank_file(job, path, options, gathered);
      add_tensors(job, options.asynchronous, *file, memory);
      // A file joined from several ranks' parts has this order: the world size must not matter.
      if (options.parameters_only)
        std::ranges::sort(file->file.tensors, {}, &detail::TensorToWrite::name);
      return std::string();
    });
    if (options.asynchronous) {
      write_later(job, file);
    } else {
      write_now(job, *file);
    }
  } catch (...) {
    // The device may still be writing to the copies.
    try {
      job.await_copies();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first error counts
    }
    throw;
  }
}

LOCKSTEP_INLINE Checkpoints::Checkpoints(CheckpointOptions options, std::atomic<bool>* alarm)
    : options_(detail::plain_options(std::move(options))),
      saver_(alarm != nullptr ? alarm : &due_.at_once) {}

LOCKSTEP_INLINE void Checkpoints::learn_best(const detail::JointRanks& ranks,
                                             detail::FunctionRef<void()> prepare) {
  const std::string best = store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    prepare();
    const std::optional<double> known = folder_->best_score();
    return known ? detail::bytes_of(*known) : std::string();
  })[0];
  best_ = best.empty() ? std::nullopt : std::optional(detail::value_in<double>(best));
}

LOCKSTEP_INLINE void Checkpoints::open(const detail::JointRanks& ranks) {
  learn_best(ranks, [&] { folder_ = std::make_shared<detail::CheckpointFolder>(options_); });
}

LOCKSTEP_INLINE bool Checkpoints::will_resume() const {
  return options_.resume || detail::restart_count() != 0;
}

LOCKSTEP_INLINE std::optional<std::string> Checkpoints::find_newest(
    const detail::JointRanks& ranks) {
  if (!will_resume()) return std::nullopt;
  std::string found = store_together(ranks, "checkpoints", [&] {
    if (ranks.rank != Rank{0}) return std::string();
    std::string newest = detail::find_or_reject(
        "launch", options_.folder,
        [&](detail::SkippedCheckpoint skipped) { return folder_->newest_valid(skipped); });
    if (newest.empty())
      detail::say(detail::text({"no checkpoint in '", options_.folder, "': training starts anew"}));
    return newest;
  })[0];
  return found.empty() ? std::nullopt : std::optional(std::move(found));
}

LOCKSTEP_INLINE void Checkpoints::begin(const detail::StatefulJob& job) {
  due_.wait = 0;
  due_.at_once = false;
  saver_.rethrow(job);
  if (!has_begun_) begin_after(job, nullptr);
}

LOCKSTEP_INLINE void Checkpoints::begin_after(const detail::StatefulJob& job,
                                              const Resumed* resumed) {
  has_begun_ = true;
  due_.wait = 0;
  updates_ = resumed != nullptr ? resumed->step : job.updates;
  look_at_ = updates_ + updates_per_look_;
  saved_ = looked_ = Clock::now();
  // Finding the newest checkpoint may have made it the best copy.
  learn_best(job.ranks, [&] {
    folder_->begin_at(updates_);
    if (resumed == nullptr) return;
    // Between two epochs and after the last one, no epoch is in progress.
    const std::uint64_t begun = detail::begun_epochs(*resumed);
    const std::string when =
        begun == 0 ? "before the first epoch"
                   : detail::text({resumed->position ? "epoch " : "after epoch ", begun});
    detail::say(
        detail::text({"resumed from '", resumed->path, "', ", when, ", step ", resumed->step}));
    for (const std::string& note : resumed->notes) detail::say(note);
  });
}

/// Is a timed save due on any rank? Ranks also exchange stop signals here.
LOCKSTEP_INLINE bool Checkpoints::look(const detail::StatefulJob& job) {
  const Clock::time_point now = Clock::now();
  // A collective: about four times a second, and at least every 64 updates, which may slow down.
  const std::size_t world = job.ranks.world;
  const auto last = static_cast<double>(updates_per_look_);
  const double seconds = std::chrono::duration<double>(now - looked_).count();
  const double wanted = 0.25 / std::max(seconds / last, 1e-9);
  const double most = world == 1 ? 1 : std::min(2 * last, 64.0);
  const bool is_due = options_.every_time.count() != 0 && now - saved_ >= options_.every_time;
  using Request = std::array<std::uint64_t, 3>;  // signal, is due, updates per look
  Request all = {static_cast<std::uint64_t>(stop_request_.signal()), is_due ? 1u : 0u,
                 static_cast<std::uint64_t>(std::clamp(wanted, 1.0, most))};
  looked_ = now;
  if (world != 1) {
    for (const std::string& of_rank : job.ranks.gather(detail::bytes_of(all))) {
      const Request other = detail::value_in<Request>(of_rank);
      if (all[0] == 0) all[0] = other[0];
      all[1] = std::max(all[1], other[1]);
      all[2] = std::min(all[2], other[2]);
    }
  }
  signal_ = static_cast<int>(all[0]);
  updates_per_look_ = all[2];
  look_at_ = job.updates + updates_per_look_;
  return all[1] != 0;
}

LOCKSTEP_INLINE void Checkpoints::save_if_due(const detail::StatefulJob& job,
                                              detail::FunctionRef<SaveOptions()> make) {
  begin(job);
  // Between micro-batches nothing can be saved: what is due then is due after the next update.
  if (job.updates != updates_ && job.micro_batches == 0) {
    const std::uint64_t every = options_.every_steps;
    bool saves = every != 0 && job.updates / every != updates_ / every;
    const bool went_back = job.updates < updates_;  // an older state was loaded
    updates_ = job.updates;
    if (went_back || job.updates >= look_at_) saves = look(job) || saves;
    if (saves || signal_ != 0) save_or_stop(job, make(), std::nullopt);
  }
  due_.since = updates_;
  due_.wait = updates_to_go();
}

LOCKSTEP_INLINE void Checkpoints::save_epoch(const detail::StatefulJob& job, SaveOptions options,
                                             bool is_last) {
  begin(job);
  const std::optional<double> score = better_score(options.scores);
  const bool every_epoch = options_.every_steps == 0 && options_.every_time.count() == 0;
  const bool is_due = look(job);
  if (is_due || score || is_last || every_epoch || signal_ != 0)
    save_or_stop(job, std::move(options), score);
}

LOCKSTEP_INLINE void Checkpoints::save_or_stop(const detail::StatefulJob& job, SaveOptions options,
                                               std::optional<double> score) {
  const bool stops = signal_ != 0;
  const std::string path = save_as(job, std::move(options), score, options_.asynchronous && !stops);
  if (!stops) return;
  stop_request_.finished();
  throw Stopped(signal_, path);
}

/// The score named `best_by`, if it is the best so far; throws where no score has this name.
LOCKSTEP_INLINE std::optional<double> Checkpoints::better_score(const Scores& scores) const {
  if (options_.best_by.empty()) return std::nullopt;
  std::string names;
  for (const Score& score : scores) {
    if (score.name == options_.best_by)
      return detail::is_better(options_, score.mean, best_) ? std::optional(score.mean)
                                                            : std::nullopt;
    names.append(names.empty() ? "" : ", ").append(score.name);
  }
  detail::fail("checkpoints",
               {"the epoch has no score '", options_.best_by, "' to choose the best by; it has ",
                names.empty() ? "none" : names},
               "evaluate in every epoch, and name one of its scores");
}

/// Saves into the folder, which must still exist. `score` is given if it is the best so far.
LOCKSTEP_INLINE std::string Checkpoints::save_as(const detail::StatefulJob& job,
                                                 SaveOptions options, std::optional<double> score,
                                                 bool asynchronous) {
  do_together(job.ranks, "checkpoints", [&] {
    if (folder_) folder_->require();
  });
  if (score) best_ = score;
  saved_ = Clock::now();
  if (!options_.best_by.empty()) options.best = best_;
  options.asynchronous = asynchronous;
  if (folder_) {
    options.written = [folder = folder_, updates = job.updates, score] {
      folder->saved(updates);
      if (score) folder->offer_best(updates);
    };
  }
  std::string path = detail::text({options_.folder, "/", detail::checkpoint_name(job.updates)});
  saver_.save(job, path, options);
  return path;
}

LOCKSTEP_INLINE std::optional<std::string> Checkpoints::latest() const {
  const auto steps = detail::steps_in(options_.folder);
  if (steps.empty()) return std::nullopt;
  return detail::text({options_.folder, "/", detail::checkpoint_name(steps.front())});
}

LOCKSTEP_INLINE std::optional<std::string> Checkpoints::best_path() const {
  std::string path = detail::text({options_.folder, "/", detail::best_checkpoint_name});
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  return path;
}

}  // namespace lockstep
