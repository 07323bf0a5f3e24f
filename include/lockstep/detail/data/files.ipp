// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of mapped files, NumPy files, token files and staging.

#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <system_error>

#include "lockstep/detail/core/thread.hpp"
#include "lockstep/detail/data/npy.hpp"
#include "lockstep/detail/data/stage.hpp"
#include "lockstep/detail/data/tokens.hpp"

// --- Mapped files ---

namespace lockstep {

LOCKSTEP_INLINE MappedFile::MappedFile(const std::string& path, std::string_view operation,
                                       std::optional<bool> reads_ahead)
    : path_(path), operation_(operation) {
  // O_NONBLOCK: opening a named pipe would wait for its writer.
  file_ = detail::Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file_) detail::fail_reading(operation_, path_, errno);
  struct stat status{};
  if (::fstat(file_.get(), &status) != 0) detail::fail_reading(operation_, path_, errno);
  if (S_ISDIR(status.st_mode)) detail::fail_reading(operation_, path_, EISDIR);
  if (!S_ISREG(status.st_mode)) {
    detail::fail(operation_, {"'", path_, "' is no regular file"},
                 "give a file on a disk: a pipe or a device cannot be mapped");
  }
  written_ = status.st_mtim;
  const auto size = static_cast<std::size_t>(status.st_size);
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const auto half_of_memory = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) / 2 * page;
  reads_at_random_ = !reads_ahead.value_or(size <= half_of_memory);
  if (size == 0) return;  // an empty file cannot be mapped
  void* const begin = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.get(), 0);
  if (begin == MAP_FAILED) {
    detail::fail(
        operation_,
        {"'", path_, "' of ", size, " bytes cannot be mapped: ", detail::error_text(errno)},
        "raise the limit on address space (ulimit -v), or copy the file to a local disk");
  }
  mapping_ = {static_cast<const std::byte*>(begin),
              [size](const std::byte* bytes) { ::munmap(const_cast<std::byte*>(bytes), size); }};
  size_ = size;
  // The advice is optional: some file systems reject it.
  if (reads_at_random_) ::madvise(begin, size, MADV_RANDOM);
}

LOCKSTEP_INLINE void MappedFile::require_intact() const {
  struct stat now{};
  if (::fstat(file_.get(), &now) != 0) detail::fail_reading(operation_, path_, errno);
  const bool same_size = static_cast<std::size_t>(now.st_size) == size();
  const bool same_time =
      now.st_mtim.tv_sec == written_.tv_sec && now.st_mtim.tv_nsec == written_.tv_nsec;
  if (!same_size || !same_time) [[unlikely]]
    fail_changed(static_cast<std::size_t>(now.st_size));
}

LOCKSTEP_INLINE void MappedFile::fail_changed(std::size_t bytes) const {
  const std::string how = bytes == size()
                              ? detail::text({"its ", bytes, " bytes were written to"})
                              : detail::text({"it had ", size(), " bytes and has ", bytes});
  detail::fail(operation_, {"'", path_, "' has changed while it was in use: ", how},
               "start the job again, and put a new file there by a rename (mv), which "
               "running jobs do not see");
}

LOCKSTEP_INLINE void MappedFile::will_read(std::size_t first, std::size_t count) const {
  if (count == 0) return;
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = first / page * page;
  ::madvise(const_cast<std::byte*>(mapping_.get()) + begin, first + count - begin, MADV_WILLNEED);
}

// --- NumPy's files ---

LOCKSTEP_INLINE NpyFile::NpyFile(const std::string& path)
    : file_(std::make_shared<const MappedFile>(path, "NpyFile")),
      header_(detail::parse_npy(file_->bytes(), path)) {}

namespace detail {

static_assert(std::endian::native == std::endian::little,
              "lockstep: .npy files are read as they lie there, little-endian, and this machine is "
              "not");

inline constexpr std::string_view npy_magic = "\x93NUMPY";
inline constexpr std::size_t most_npy_axes = 64;  // NumPy's limit

LOCKSTEP_INLINE std::string_view npy_type(ElementKind kind) {
  constexpr std::array<std::string_view, element_kinds> types{
      "", "f8", "f4", "f2", "V2", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"};
  return types[static_cast<std::size_t>(kind)];
}

LOCKSTEP_INLINE ElementKind npy_kind(std::string_view type) {
  for (std::size_t kind = 1; kind != element_kinds; ++kind) {
    if (npy_type(static_cast<ElementKind>(kind)) == type) return static_cast<ElementKind>(kind);
  }
  return ElementKind::unsupported;
}

LOCKSTEP_INLINE bool is_npy(std::span<const std::byte> bytes) {
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())
      .starts_with(npy_magic);
}

/// The header is a Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
LOCKSTEP_INLINE NpyHeader parse_npy(std::span<const std::byte> file, const std::string& path) {
  const std::string_view bytes(reinterpret_cast<const char*>(file.data()), file.size());
  const auto reject = [&](std::size_t at, std::initializer_list<TextPart> problem,
                          std::string_view advice =
                              "copy the file again, or save it again with numpy.save") {
    fail("NpyFile", {"'", path, "', byte ", at, ": ", text(problem)}, advice);
  };
  if (!is_npy(file))
    reject(0, {"\\x93NUMPY is expected"},
           "give a file of numpy.save; an .npz is an archive of them: unpack it first");
  const auto byte = [&](std::size_t at) -> std::size_t {
    return static_cast<unsigned char>(bytes[at]);
  };
  if (bytes.size() < 12) reject(bytes.size(), {"the file ends within the first twelve bytes"});
  if (byte(6) < 1 || byte(6) > 3 || byte(7) != 0)
    reject(6, {"version ", byte(6), ".", byte(7), " of the format"},
           "versions 1.0, 2.0 and 3.0 are read: save the array with numpy.save");
  const bool is_wide = byte(6) > 1;
  const std::size_t first = is_wide ? 12 : 10;
  const std::size_t length =
      byte(8) | byte(9) << 8 | (is_wide ? byte(10) << 16 | byte(11) << 24 : 0);
  if (length > bytes.size() - first)
    reject(8, {"a header of ", length, " bytes, and ", bytes.size() - first, " are there"});

  NpyHeader header;
  header.begin = first + length;
  std::string_view rest;  // of the dict
  const auto at = [&] { return header.begin - rest.size(); };
  const auto accept = [&](std::string_view token) {
    rest.remove_prefix(std::min(rest.find_first_not_of(" \t\r\n"), rest.size()));
    if (!rest.starts_with(token)) return false;
    rest.remove_prefix(token.size());
    return true;
  };
  const auto require = [&](bool is_there, std::string_view what) {
    if (!is_there) reject(at(), {what, " is expected"});
  };
  const auto find_value = [&](std::string_view key) {
    rest = bytes.substr(first, length);
    const std::size_t found = rest.find(key);
    if (found == rest.npos) reject(first, {"'", key, "' is expected in the header"});
    rest.remove_prefix(found + key.size());
    require((accept("'") || accept("\"")) && accept(":"), "':'");
  };

  find_value("fortran_order");
  if (accept("True"))
    reject(at(), {"the elements are in Fortran order"},
           "save it in C order: numpy.ascontiguousarray(a)");
  require(accept("False"), "False or True");

  find_value("descr");
  if (accept("["))
    reject(at(), {"the elements are records of several fields"},
           "save an array of its own for every field");
  require(accept("'") || accept("\""), "a text in quotation marks");
  const std::string_view type = rest.substr(0, rest.find_first_of("'\""));
  const std::string_view name = type.substr(std::min<std::size_t>(1, type.size()));
  header.kind = npy_kind(name);
  if (header.kind == ElementKind::unsupported)
    reject(at(), {"elements of type '", type, "', which the library does not have"},
           "save it in another type, such as a.astype('<f4') or, for bool, a.astype('u1')");
  const std::size_t size = element_size(header.kind);
  const bool has_order = size > 1 && header.kind != ElementKind::bf16;
  if (type[0] != '<' && (type[0] != '|' || has_order))
    reject(at(), {"'", has_order ? "<" : "|", name, "' is expected instead of '", type, "'"},
           "save it as little-endian: a.astype(a.dtype.newbyteorder('<'))");

  find_value("shape");
  require(accept("("), "'('");
  std::size_t needed = size;
  while (!accept(")")) {
    std::size_t extent = 0;
    const auto end = std::from_chars(rest.data(), rest.data() + rest.size(), extent);
    require(end.ec == std::errc(), "the extent of an axis");
    rest.remove_prefix(static_cast<std::size_t>(end.ptr - rest.data()));
    accept("L");  // the suffix of Python 2's long integers
    require(accept(",") || rest.starts_with(")"), "','");
    header.shape.push_back(extent);
    needed = saturating_product(needed, extent);
  }

  if (header.begin % size != 0)
    reject(header.begin, {"the elements begin here, at no multiple of their ", size, " bytes"});
  const std::size_t has = bytes.size() - header.begin;
  if (has < needed)
    reject(bytes.size(), {"the file ends; shape ", npy_shape_text(header.shape), " of ",
                          element_name(header.kind), " needs ", needed, " bytes from byte ",
                          header.begin, " on, and ", has, " are there"});
  if (has > needed)
    reject(header.begin + needed,
           {"the end is expected; ", has - needed, " bytes follow the ", needed, " of shape ",
            npy_shape_text(header.shape), " of ", element_name(header.kind)});
  return header;
}

LOCKSTEP_INLINE void fail_npy_kind(const std::string& path, ElementKind has, ElementKind wanted,
                                   std::string_view what) {
  fail("NpyArray",
       {"the elements of '", path, "' are ", element_name(has), " and are ", what, " ",
        element_name(wanted)},
       text({"ask for ", element_name(has), ", or save it with a.astype('<", npy_type(wanted),
             "')"}));
}

LOCKSTEP_INLINE void write_npy_bytes(const std::string& path, ElementKind kind,
                                     std::span<const std::byte> bytes,
                                     std::span<const std::size_t> shape) {
  std::size_t needed = element_size(kind);
  for (const std::size_t extent : shape) needed = saturating_product(needed, extent);
  if (needed != bytes.size() || shape.size() > most_npy_axes) {
    fail("write_npy",
         {"'", path, "' would have shape ", npy_shape_text(shape), " and ",
          bytes.size() / element_size(kind), " elements"},
         "give as many elements as the shape has, and at most 64 axes");
  }
  std::string header(npy_magic);
  header.append("\1\0\0\0", 4);  // version 1.0, and a placeholder for the length
  header += text({"{'descr': '", element_size(kind) > 1 ? "<" : "|", npy_type(kind),
                  "', 'fortran_order': False, 'shape': ", npy_shape_text(shape), ", }"});
  // 64 axes of twenty digits fit into the 16-bit length of version 1.
  header.append(align_up(header.size() + 1, 64) - header.size() - 1, ' ');
  header += '\n';
  const std::size_t length = header.size() - 10;
  header[8] = static_cast<char>(length);
  header[9] = static_cast<char>(length >> 8);
  TemporaryFile out("write_npy", path, header.size() + bytes.size());
  out.append(std::as_bytes(std::span(header)));
  out.append(bytes);
  out.commit();
}

LOCKSTEP_INLINE bool is_integer(ElementKind kind) { return kind >= ElementKind::i8; }

LOCKSTEP_INLINE void check_npy_labels(const NpyFile& inputs, const NpyFile& labels,
                                      ElementKind wanted) {
  const auto reject = [](std::initializer_list<TextPart> problem, std::string_view advice) {
    fail("npy_dataset", problem, advice);
  };
  if (inputs.shape().empty() || inputs.bytes().empty() != (inputs.shape()[0] == 0)) {
    reject({"'", inputs.path(), "' has shape ", npy_shape_text(inputs.shape()), ", which is no ",
            "number of rows"},
           "save inputs of shape (samples, ...), with at least one element in a sample");
  }
  const auto& shape = labels.shape();
  if (shape.empty() || shape.size() > 2 || (shape.size() == 2 && shape[1] != 1)) {
    reject({"the labels in '", labels.path(), "' have shape ", npy_shape_text(shape)},
           "save one label for every sample: shape (samples,) or (samples, 1)");
  }
  if (shape[0] != inputs.shape()[0]) {
    reject({"'", inputs.path(), "' has ", inputs.shape()[0], " rows and '", labels.path(), "' ",
            shape[0], " labels"},
           "give files of the same set");
  }
  if (labels.kind() != wanted && !(is_integer(labels.kind()) && is_integer(wanted)))
    fail_npy_kind(labels.path(), labels.kind(), wanted, "to be labels of");
}

LOCKSTEP_INLINE std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element) {
  const std::size_t size = element_size(file.kind());
  std::uint64_t value = 0;
  std::memcpy(&value, file.bytes().data() + element * size, size);
  const bool is_signed = file.kind() < ElementKind::u8;
  const std::size_t unused = 64 - 8 * size;
  if (is_signed) return static_cast<std::int64_t>(value << unused) >> unused;
  if (!std::in_range<std::int64_t>(value)) return std::nullopt;
  return static_cast<std::int64_t>(value);
}

LOCKSTEP_INLINE void fail_npy_label(const NpyFile& file, std::size_t sample, ElementKind wanted) {
  const std::optional<std::int64_t> value = npy_integer(file, sample);
  const std::string number = value ? text({*value}) : std::string("above 9223372036854775807");
  fail("npy_dataset",
       {"'", file.path(), "', byte ", file.byte_of(sample), ": the label of sample ", sample,
        " is ", number, ", which ", element_name(wanted), " does not hold"},
       "ask for labels of a wider type, or check that these are labels");
}

// --- Files of tokens ---

LOCKSTEP_INLINE TokenFiles::TokenFiles(std::span<const std::string> paths, ElementKind token,
                                       std::size_t length, const TokenOptions& options) {
  if (length == 0)
    fail("TokenDataset", {"windows of no tokens"}, "give the number of tokens that a model reads");
  if (paths.empty()) fail("TokenDataset", {"no files"}, "give the path of one, or of several");
  const std::size_t token_bytes = element_size(token);
  const std::size_t stride = options.stride == 0 ? length : options.stride;
  stride_bytes_ = stride * token_bytes;
  for (const std::string& path : paths) {
    const auto reject = [&](std::initializer_list<TextPart> problem, std::string_view advice) {
      fail("TokenDataset", {"'", path, "'", text(problem)}, advice);
    };
    auto file = std::make_shared<const MappedFile>(path, "TokenDataset");
    const std::size_t size = file->size();
    std::size_t begin = options.header_bytes;
    // Otherwise the header of a .npy file would be read as tokens.
    if (begin == 0 && is_npy(file->bytes())) {
      const NpyHeader header = parse_npy(file->bytes(), path);
      if (header.kind != token) fail_npy_kind(path, header.kind, token, "read as tokens of");
      if (header.shape.size() != 1)
        reject({" has shape ", npy_shape_text(header.shape)}, "save tokens with one axis");
      begin = header.begin;
    }
    if (begin % token_bytes != 0)
      reject({": tokens of ", token_bytes, " bytes cannot begin at byte ", begin},
             "check header_bytes");
    if (size < begin)
      reject({" ends at byte ", size, ", and its header should have ", begin, " bytes"},
             "check header_bytes, or copy the file again");
    if ((size - begin) % token_bytes != 0)
      reject({" ends at byte ", size, ", within a token: from byte ", begin, " on, each has ",
              token_bytes, " bytes"},
             "copy the file again, or ask for tokens of the type that was written");
    const std::size_t tokens = (size - begin) / token_bytes;
    if (tokens <= length)
      reject({" has ", tokens, " tokens, and a window needs ", length, " and one more"},
             "ask for shorter windows, or check that this is the file");
    files_.push_back({std::move(file), begin, windows_});
    windows_ += (tokens - length - 1) / stride + 1;
  }
}

LOCKSTEP_INLINE void fail_token(const std::string& path, std::size_t byte, std::int64_t token,
                                std::uint64_t vocabulary) {
  fail("TokenDataset",
       {"'", path, "', byte ", byte, ": token ", token, " in a vocabulary of ", vocabulary},
       "check the type of the tokens, header_bytes and the vocabulary of the model");
}

// --- Staging ---

inline constexpr std::string_view staging = "stage_locally";

/// A snapshot of a path: a file, or a folder with its contents.
struct StageTree {
  struct Item {
    std::string name;
    std::uint64_t bytes;
    timespec time;
    bool is_folder;
  };

  explicit StageTree(std::string root) {
    constexpr auto by_name = [](const FTSENT** a, const FTSENT** b) {
      return std::strcmp((*a)->fts_name, (*b)->fts_name);
    };
    char* const paths[] = {root.data(), nullptr};
    const std::unique_ptr<FTS, int (*)(FTS*)> walk(
        ::fts_open(paths, FTS_LOGICAL | FTS_NOCHDIR, by_name), ::fts_close);
    if (!walk) fail_reading(staging, root, errno);
    while (const FTSENT* const entry = ::fts_read(walk.get())) {
      const std::string path = entry->fts_path;
      const bool is_folder = entry->fts_info == FTS_D;
      if (entry->fts_info == FTS_DP) continue;  // a folder, after its contents
      if (entry->fts_errno != 0 || entry->fts_info == FTS_SLNONE)
        fail_reading(staging, path, entry->fts_errno != 0 ? entry->fts_errno : ENOENT);
      if (entry->fts_info == FTS_DC)
        fail(staging, {"'", path, "' leads to a folder that it is in"}, "remove that link");
      if (entry->fts_info != FTS_F && !is_folder)
        fail(staging, {"'", path, "' is neither a file nor a folder"},
             "name or leave one of the two");
      // An LMDB's lock file lists readers on the source's host: it is no data and may change.
      if (path.ends_with("/lock.mdb") &&
          ::access((folder_of(path) + "/data.mdb").c_str(), F_OK) == 0)
        continue;
      const struct stat& status = *entry->fts_statp;
      const timespec time = is_folder ? timespec{} : status.st_mtim;
      const auto size = is_folder ? 0 : static_cast<std::uint64_t>(status.st_size);
      const std::string_view name =
          std::string_view(path).substr(std::min(path.size(), root.size() + 1));
      facts += text({is_folder ? "folder" : "file", " ", size, " ", time.tv_sec, " ", time.tv_nsec,
                     " ", name.size(), " ", name, "\n"});
      items.push_back({path.substr(root.size()), size, time, is_folder});
      bytes += size;
    }
    if (errno != 0) fail_reading(staging, root, errno);
  }

  std::vector<Item> items;  ///< folders before their contents
  std::uint64_t bytes = 0;
  std::string facts;  ///< names, sizes and times, to compare trees
};

LOCKSTEP_INLINE void remove_tree(const std::string& path) {
  constexpr auto remove = [](const char* each, const struct stat*, int, FTW*) {
    std::remove(each);
    return 0;
  };
  constexpr int open_folders = 16;
  ::nftw(path.c_str(), remove, open_folders, FTW_DEPTH | FTW_PHYS);
}

LOCKSTEP_INLINE std::string real_path(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> found(::realpath(path.c_str(), nullptr), ::free);
  if (!found) fail_reading(staging, path, errno);
  return found.get();
}

/// A source, its copy, and the files beside the copy: a record of source and copy and, while the
/// copy is made, the lock and a temporary. One process of a host copies while others wait: the lock
/// is an flock on a file in which the owner writes its identity and progress, and the system
/// releases that of a dead process. Only the owner makes the temporary, so that one name is enough
/// and the next owner removes what a killed process has left.
class Staging {
 public:
  Staging(const std::string& from, const std::string& to, const std::string& name, StageTree source)
      : from_(from),
        folder_(to),
        beside_(text({to, "/.", name})),
        identity_(text({"a copy of '", real_path(folder_of(from)), "/", name, "'"})),
        local_(text({to, "/", name})),
        source_(std::move(source)) {
    std::replace(identity_.begin(), identity_.end(), '\n', ' ');  // a single line of the record
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    if (!lock_) return;
    [[maybe_unused]] const bool is_empty = ::ftruncate(lock_.get(), 0) == 0;
    // Closing is not enough: a process that was forked meanwhile has the file open, too.
    ::flock(lock_.get(), LOCK_UN);
  }

  std::string stage(std::chrono::milliseconds patience) {
    // Usually the copy exists, and no lock is needed.
    if (has_copy()) return local_;
    take_lock(patience);
    source_ = StageTree(from_);
    if (has_copy()) return local_;  // another process has made it meanwhile
    std::fputs(damage_.c_str(), stderr);
    remove_tree(temporary_);
    const std::shared_ptr<void> end(nullptr, [&](void*) { remove_tree(temporary_); });  // always
    make_copy();
    return local_;
  }

 private:
  /// Throws if the owner's progress does not change within `patience`.
  void take_lock(std::chrono::milliseconds patience) {
    const std::string path = beside_ + ".lock";
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!file) detail::fail_writing(staging, path, errno);
    Deadline end = Deadline::after(patience);
    Deadline line = Deadline::after(std::chrono::seconds(1));
    std::string owner;
    while (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) {
        fail(staging, {"'", path, "' cannot be locked: ", error_text(errno)},
             "name a folder on a disk of this host");
      }
      std::string now = read_file(path.c_str());
      now.resize(std::min(now.find("  "), now.size()));
      if (now.empty()) now = "another process";
      if (std::exchange(owner, now) != now) end = Deadline::after(patience);
      const std::string busy = text({"'", local_, "' is being staged by ", owner});
      if (end.passed()) {
        fail(staging, {busy, ", which has made no progress for ", seconds_text(patience)},
             "end that process, or give stage_locally a longer patience");
      }
      if (line.passed()) {
        std::fputs(text({"lockstep: ", staging, ": ", busy, "; waiting for it\n"}).c_str(), stderr);
        line = Deadline::after(std::chrono::minutes(1));
      }
      sleep_for(std::chrono::milliseconds(20));
    }
    lock_ = std::move(file);
    write_progress("");
  }

  /// Writes progress in one call that never shortens the file, so that readers see a whole text.
  void write_progress(const std::string& done) const {
    std::string line = owner_ + done;
    line.resize(owner_.size() + 80, ' ');
    [[maybe_unused]] const ssize_t n = ::pwrite(lock_.get(), line.data(), line.size(), 0);
  }

  std::string record_of(const StageTree& copy) const {
    return text({identity_, "\n", source_.facts, copy.facts});
  }

  /// Does a current copy exist? Throws if its path is taken; `damage_` reports a changed copy.
  bool has_copy() {
    struct stat status{};
    if (::lstat(local_.c_str(), &status) != 0) return false;
    const std::string found = read_file(record_.c_str());
    const std::string_view other = std::string_view(found).substr(0, found.find('\n'));
    if (found.empty() || (other.starts_with("a copy of ") && other != identity_)) {
      fail(staging,
           {"'", local_, "' is ",
            found.empty() ? "there, and was not staged" : text({other, ", and not ", identity_})},
           "remove it if it is not needed, or name another folder");
    }
    if (!found.starts_with(text({identity_, "\n", source_.facts}))) return false;
    if (found == record_of(StageTree(local_))) return true;
    damage_ = text(
        {"lockstep: ", staging, ": '", local_, "' is not as it was staged; it is staged again\n"});
    return false;
  }

  void make_copy() {
    // Detects a full disk before anything is written.
    if (free_bytes() < source_.bytes) fail_writing(ENOSPC);
    require(::mkdir(temporary_.c_str(), 0777));
    for (const StageTree::Item& item : source_.items) {
      if (item.is_folder) require(::mkdir((copy_ + item.name).c_str(), 0777));
      if (!item.is_folder) copy_file(item);
    }
    for (const StageTree::Item& item : source_.items)
      if (item.is_folder) sync(copy_ + item.name);
    if (StageTree(from_).facts != source_.facts) fail_changed(from_);

    const std::string record = temporary_ + "/record";
    const Descriptor out(::open(record.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
    if (!out || !write_all(out.get(), record_of(StageTree(copy_)))) fail_writing(errno);
    require(::fsync(out.get()));
    // The record precedes the copy; until then it matches nothing: older files have other times.
    require(::rename(record.c_str(), record_.c_str()));
    move_into_place();
    sync(folder_);
  }

  void copy_file(const StageTree::Item& item) {
    const std::string from = from_ + item.name;
    const std::string to = copy_ + item.name;
    const Descriptor in(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
    if (!in) fail_reading(staging, from, errno);
    const Descriptor out(::open(to.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!out) fail_writing(errno);
    for (std::uint64_t left = item.bytes; left != 0;) {
      const ssize_t n =
          ::sendfile(out.get(), in.get(), nullptr, std::min<std::uint64_t>(left, 64_MiB));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_writing(errno);
      if (n == 0) fail_changed(from);
      left -= static_cast<std::uint64_t>(n);
      copied_ += static_cast<std::uint64_t>(n);
      write_progress(text({", ", copied_, " of ", source_.bytes, " bytes so far"}));
    }
    const timespec times[2] = {{0, UTIME_OMIT}, item.time};
    require(::futimens(out.get(), times));
    require(::fsync(out.get()));
  }

  /// A folder is exchanged with the old copy, which is then removed; a file is replaced.
  void move_into_place() {
    struct stat old{};
    const bool is_there = ::lstat(local_.c_str(), &old) == 0;
    if (is_there && (source_.items[0].is_folder || S_ISDIR(old.st_mode))) {
      if (::renameat2(AT_FDCWD, copy_.c_str(), AT_FDCWD, local_.c_str(), RENAME_EXCHANGE) == 0)
        return;
      if (errno != EINVAL && errno != ENOSYS) fail_writing(errno);
      remove_tree(local_);  // this file system cannot exchange
    }
    require(::rename(copy_.c_str(), local_.c_str()));
  }

  std::uint64_t free_bytes() const {
    struct statvfs room{};
    if (::statvfs(folder_.c_str(), &room) != 0) return 0;
    return std::uint64_t{room.f_bavail} * room.f_frsize;
  }
  void sync(const std::string& folder) {
    const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // fsync of a folder fails with EINVAL on file systems that do not need it.
    if (!opened || (::fsync(opened.get()) != 0 && errno != EINVAL)) fail_writing(errno);
  }
  void require(int result) {
    if (result != 0) fail_writing(errno);
  }
  [[noreturn]] void fail_writing(int error) {
    remove_tree(temporary_);  // frees its space
    if (error != ENOSPC && error != EDQUOT) detail::fail_writing(staging, local_, error);
    fail(staging,
         {"'", folder_, "' has no room for '", from_, "' (", error_text(error),
          "): ", source_.bytes, " bytes are needed and ", free_bytes(), " are free"},
         "make room there, or name a folder on another disk");
  }
  [[noreturn]] static void fail_changed(const std::string& path) {
    fail(staging, {"'", path, "' changed while it was copied"},
         "stage it when nothing writes to it any more");
  }

  std::string from_;
  std::string folder_;
  std::string beside_;    ///< prefix of all paths beside the copy
  std::string identity_;  ///< names the source
  std::string local_;     ///< the copy
  std::string record_ = beside_ + ".staged";
  std::string temporary_ = text({beside_, temporary_infix, "copy"});
  std::string copy_ = temporary_ + "/copy";
  StageTree source_;
  std::string damage_;
  std::uint64_t copied_ = 0;  ///< bytes
  Descriptor lock_;
  std::string owner_ = owner_text();
};

}  // namespace detail

LOCKSTEP_INLINE std::string stage_locally(const std::string& path, const std::string& folder,
                                          std::chrono::milliseconds patience) {
  using namespace detail;
  const auto without_slashes = [](std::string name) {
    while (name.size() > 1 && name.ends_with('/')) name.pop_back();
    return name;
  };
  std::string from = without_slashes(path);
  if (const std::string_view name = name_in_folder(from);
      name.empty() || name == "." || name == "..")
    from = real_path(from);
  const std::string name(name_in_folder(from));
  if (name.empty()) fail(staging, {"'", path, "' has no name"}, "name a file or a folder");

  const StageTree source(from);
  const std::string to = folder.empty() ? "." : without_slashes(folder);
  make_folder(staging, to);
  if (real_path(to) == real_path(folder_of(from)))
    return text({to, "/", name});  // it is there already
  if (text({real_path(to), "/"}).starts_with(text({real_path(from), "/"})))
    fail(staging, {"'", to, "' is inside of '", path, "'"}, "name a folder outside of it");
  return Staging(from, to, name, source).stage(patience);
}

}  // namespace lockstep
