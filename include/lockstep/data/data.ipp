// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder that are no templates, but for `write_lmdb`'s, which need
/// liblmdb.

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/deadline.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/core/utility.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/loader.hpp"
#include "lockstep/data/mapped_file.hpp"
#include "lockstep/data/npy.hpp"
#include "lockstep/data/pipeline.hpp"
#include "lockstep/data/sampler.hpp"
#include "lockstep/data/stage.hpp"
#include "lockstep/data/tokens.hpp"

// --- Mapped files ---

namespace lockstep {

namespace detail {

inline constexpr std::string_view changed_file_advice =
    "start the job again, and put a new file in its place by a rename (mv), which running jobs do "
    "not see";

/// Half of this machine's memory, in bytes.
LOCKSTEP_INLINE std::size_t half_of_memory() {
  static const std::size_t bytes = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES)) / 2 *
                                   static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace detail

LOCKSTEP_INLINE MappedFile::MappedFile(const std::string& path, Access access,
                                       std::string_view operation)
    : path_(path), operation_(operation), access_(access) {
  // Without O_NONBLOCK a pipe of this name would wait for its writer.
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
  if (access_ == Access::automatic)
    access_ = size > detail::half_of_memory() ? Access::random : Access::usual;
  if (size == 0) return;  // the kernel maps nothing of an empty file
  void* const begin = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file_.get(), 0);
  if (begin == MAP_FAILED) {
    detail::fail(
        operation_,
        {"'", path_, "' of ", size, " bytes cannot be mapped: ", detail::error_text(errno)},
        "raise the limit on address space (ulimit -v), or copy the file to a local disk");
  }
  bytes_ = {static_cast<const std::byte*>(begin), size};
  // Advice is no demand: a file system that has none to give says so, and is read all the same.
  if (access_ == Access::random) ::madvise(begin, size, MADV_RANDOM);
  if (access_ == Access::sequential) ::madvise(begin, size, MADV_SEQUENTIAL);
}

LOCKSTEP_INLINE MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      operation_(std::move(other.operation_)),
      file_(std::move(other.file_)),
      bytes_(std::exchange(other.bytes_, {})),
      written_(other.written_),
      access_(other.access_) {}

LOCKSTEP_INLINE MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(operation_, other.operation_);
  std::swap(file_, other.file_);
  std::swap(bytes_, other.bytes_);
  std::swap(written_, other.written_);
  std::swap(access_, other.access_);
  return *this;
}

LOCKSTEP_INLINE MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

LOCKSTEP_INLINE void MappedFile::require_intact() const {
  struct stat now{};
  if (::fstat(file_.get(), &now) != 0) detail::fail_reading(operation_, path_, errno);
  const bool same_size = static_cast<std::size_t>(now.st_size) == bytes_.size();
  const bool same_time =
      now.st_mtim.tv_sec == written_.tv_sec && now.st_mtim.tv_nsec == written_.tv_nsec;
  if (same_size && same_time) [[likely]]
    return;
  if (same_size) fail_written();
  detail::fail(operation_,
               {"'", path_, "' has changed while it was in use: it had ", bytes_.size(),
                " bytes and has ", static_cast<std::size_t>(now.st_size)},
               detail::changed_file_advice);
}

LOCKSTEP_INLINE void MappedFile::fail_written() const {
  detail::fail(operation_,
               {"'", path_, "' has changed while it was in use: its ", bytes_.size(),
                " bytes were written to"},
               detail::changed_file_advice);
}

LOCKSTEP_INLINE void MappedFile::will_read(std::size_t first, std::size_t count) const {
  if (count == 0) return;
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = first / page * page;
  ::madvise(const_cast<std::byte*>(bytes_.data()) + begin, first + count - begin, MADV_WILLNEED);
}

}  // namespace lockstep

// --- NumPy's files ---

namespace lockstep {

namespace detail {

static_assert(std::endian::native == std::endian::little,
              "lockstep: .npy files are read as they lie there, little-endian, and this machine is "
              "not");

inline constexpr std::string_view npy_magic = "\x93NUMPY";
inline constexpr std::size_t most_npy_axes = 64;  // as many as NumPy has

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

LOCKSTEP_INLINE std::string npy_shape_text(std::span<const std::size_t> shape) {
  std::string out = "(";
  for (const std::size_t extent : shape) {
    if (out.size() > 1) out += ' ';
    Word(extent).append_to(out);
    out += ',';
  }
  if (shape.size() > 1) out.pop_back();  // a tuple of one has a comma
  return out += ')';
}

/// Walks through a header, which is a dict of Python's, and says what it expects where.
class NpyCursor {
 public:
  NpyCursor(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  NpyHeader header() {
    NpyHeader header;
    header.begin = open();
    expect('{');
    bool has_order = false;
    bool has_shape = false;
    for (bool more = !accept('}'); more;) {
      const std::size_t place = place_;
      const std::string_view key = string();
      expect(':');
      if (key == "descr" && header.kind == ElementKind::unsupported) {
        header.kind = kind();
      } else if (key == "fortran_order" && !std::exchange(has_order, true)) {
        require_c_order();
      } else if (key == "shape" && !std::exchange(has_shape, true)) {
        header.shape = shape();
      } else {
        refuse(place, {"'", key, "' is there twice or for no reason"});
      }
      const bool comma = accept(',');
      more = !accept('}');
      if (more && !comma) refuse(place_, {"',' or '}' is expected"});
    }
    skip_blanks();
    if (place_ != end_) refuse(place_, {"the header should end behind its '}'"});
    if (header.kind == ElementKind::unsupported || !has_order || !has_shape)
      refuse(first_, {"'descr', 'fortran_order' and 'shape' are expected"});
    check_size(header);
    return header;
  }

 private:
  static constexpr std::string_view again = "copy the file again, or save it again with numpy.save";

  [[noreturn, gnu::cold]] void refuse(std::size_t place, std::initializer_list<Word> problem,
                                      std::string_view advice = again) const {
    fail("NpyFile", {"'", path_, "', byte ", place, ": ", text(problem)}, advice);
  }

  std::size_t byte(std::size_t place) const { return static_cast<unsigned char>(bytes_[place]); }

  /// What is before the dict. Returns where the elements begin.
  std::size_t open() {
    const std::size_t size = bytes_.size();
    if (!bytes_.starts_with(npy_magic.substr(0, std::min(size, npy_magic.size()))) || size == 0)
      refuse(0, {"\\x93NUMPY is expected"},
             "give a file of numpy.save; an .npz is an archive of them: unpack it first");
    if (size < 10) refuse(size, {"the file ends within the first ten bytes"});
    const std::size_t version = byte(6);
    if (version < 1 || version > 3 || byte(7) != 0)
      refuse(6, {"version ", version, ".", byte(7), " of the format"},
             "versions 1.0, 2.0 and 3.0 are read: save the array with numpy.save");
    const bool is_wide = version > 1;
    if (is_wide && size < 12) refuse(size, {"the file ends within the first twelve bytes"});
    std::size_t length = byte(8) | byte(9) << 8;
    if (is_wide) length |= byte(10) << 16 | byte(11) << 24;
    first_ = place_ = is_wide ? 12 : 10;
    if (length > size - first_)
      refuse(8, {"a header of ", length, " bytes, and ", size - first_, " are there"});
    return end_ = first_ + length;
  }

  void skip_blanks() {
    while (place_ != end_ && std::string_view(" \t\r\n").find(bytes_[place_]) != bytes_.npos)
      ++place_;
  }

  bool accept(char c) {
    skip_blanks();
    if (place_ == end_ || bytes_[place_] != c) return false;
    ++place_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) refuse(place_, {"'", std::string_view(&c, 1), "' is expected"});
  }

  bool accept_word(std::string_view word) {
    skip_blanks();
    if (!bytes_.substr(place_, end_ - place_).starts_with(word)) return false;
    place_ += word.size();
    return true;
  }

  std::string_view string() {
    const bool is_double = accept('"');
    if (!is_double && !accept('\'')) refuse(place_, {"a text in quotation marks is expected"});
    const std::size_t first = place_;
    while (place_ != end_ && bytes_[place_] != (is_double ? '"' : '\'')) {
      if (bytes_[place_] == '\\') refuse(place_, {"a text without '\\' is expected"});
      ++place_;
    }
    if (place_ == end_) refuse(place_, {"the header ends within a text"});
    return bytes_.substr(first, place_++ - first);
  }

  ElementKind kind() {
    skip_blanks();
    const std::size_t place = place_;
    if (accept('['))
      refuse(place, {"the elements are records of several fields"},
             "save an array of its own for every field");
    const std::string_view type = string();
    const std::string_view name = type.substr(std::min<std::size_t>(1, type.size()));
    const ElementKind kind = type.empty() ? ElementKind::unsupported : npy_kind(name);
    if (kind == ElementKind::unsupported)
      refuse(place, {"elements of type '", type, "', which the library does not have"},
             "save it in another type, such as a.astype('<f4') or, for bool, a.astype('u1')");
    const bool has_order = element_size(kind) > 1 && kind != ElementKind::bf16;
    if (type[0] == '>' && has_order)
      refuse(place, {"the elements are big-endian, '", type, "'"},
             "save it as little-endian: a.astype(a.dtype.newbyteorder('<'))");
    if (type[0] != '<' && (type[0] != '|' || has_order))
      refuse(place, {"'", has_order ? "<" : "|", name, "' is expected instead of '", type, "'"});
    return kind;
  }

  void require_c_order() {
    skip_blanks();
    const std::size_t place = place_;
    if (accept_word("False")) return;
    if (!accept_word("True")) refuse(place, {"False or True is expected"});
    refuse(place, {"the elements are in Fortran order"},
           "save it in C order: numpy.ascontiguousarray(a)");
  }

  std::vector<std::size_t> shape() {
    std::vector<std::size_t> extents;
    expect('(');
    bool comma = true;
    while (!accept(')')) {
      if (!comma) refuse(place_, {"',' is expected"});
      if (extents.size() == most_npy_axes) refuse(place_, {"more than ", most_npy_axes, " axes"});
      extents.push_back(natural());
      comma = accept(',');
    }
    if (extents.size() == 1 && !comma) refuse(place_, {"a tuple is expected"});
    return extents;
  }

  std::size_t natural() {
    skip_blanks();
    const std::size_t place = place_;
    std::size_t value = 0;
    for (; place_ != end_ && bytes_[place_] >= '0' && bytes_[place_] <= '9'; ++place_) {
      if (__builtin_mul_overflow(value, std::size_t{10}, &value) ||
          __builtin_add_overflow(value, static_cast<std::size_t>(bytes_[place_] - '0'), &value))
        refuse(place, {"an extent that no memory has"});
    }
    if (place_ == place) refuse(place, {"a number is expected"});
    accept_word("L");  // Python 2 wrote it behind its long numbers
    return value;
  }

  void check_size(const NpyHeader& header) const {
    const std::size_t size = element_size(header.kind);
    if (header.begin % size != 0)
      refuse(header.begin, {"the elements begin here, at no multiple of their ", size, " bytes"});
    std::size_t needed = size;
    for (const std::size_t extent : header.shape) needed = saturating_product(needed, extent);
    const std::size_t has = bytes_.size() - header.begin;
    if (has < needed)
      refuse(bytes_.size(), {"the file ends; shape ", npy_shape_text(header.shape), " of ",
                             element_name(header.kind), " needs ", needed, " bytes from byte ",
                             header.begin, " on, and ", has, " are there"});
    if (has > needed)
      refuse(header.begin + needed,
             {"the end is expected; ", has - needed, " bytes follow the ", needed, " of shape ",
              npy_shape_text(header.shape), " of ", element_name(header.kind)});
  }

  std::string_view bytes_;
  const std::string& path_;
  std::size_t first_ = 0;  ///< of the dict
  std::size_t place_ = 0;
  std::size_t end_ = 0;  ///< of the header
};

LOCKSTEP_INLINE bool is_npy(std::span<const std::byte> bytes) {
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())
      .starts_with(npy_magic);
}

LOCKSTEP_INLINE NpyHeader parse_npy(std::span<const std::byte> bytes, const std::string& path) {
  return NpyCursor({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path).header();
}

LOCKSTEP_INLINE void fail_npy_kind(const std::string& path, ElementKind has, ElementKind wanted,
                                   std::string_view what) {
  fail("NpyArray",
       {"the elements of '", path, "' are ", element_name(has), " and are ", what, " ",
        element_name(wanted)},
       text({"ask for ", element_name(has), ", or save it with a.astype('<", npy_type(wanted),
             "')"}));
}

LOCKSTEP_INLINE void fail_npy_row(const std::string& path, std::size_t row, std::size_t rows) {
  fail("NpyArray", {"there is no row ", row, " in '", path, "', which has ", rows},
       "ask for rows below their number");
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
  header.append("\1\0\0\0", 4);  // version 1.0, and the place of the length
  header += text({"{'descr': '", element_size(kind) > 1 ? "<" : "|", npy_type(kind),
                  "', 'fortran_order': False, 'shape': ", npy_shape_text(shape), ", }"});
  // 64 axes of twenty digits fit into the 16 bits that version 1 has for the length.
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

}  // namespace detail

LOCKSTEP_INLINE NpyFile::NpyFile(const std::string& path, Access access)
    : file_(std::make_shared<const MappedFile>(path, access, "NpyFile")),
      header_(detail::parse_npy(file_->bytes(), path)) {}

}  // namespace lockstep

namespace lockstep::detail {

LOCKSTEP_INLINE bool is_integer(ElementKind kind) { return kind >= ElementKind::i8; }

LOCKSTEP_INLINE void check_npy_labels(const NpyFile& inputs, const NpyFile& labels,
                                      ElementKind wanted) {
  const auto refuse = [](std::initializer_list<Word> problem, std::string_view advice) {
    fail("npy_dataset", problem, advice);
  };
  if (inputs.shape().empty() || inputs.bytes().empty() != (inputs.shape()[0] == 0)) {
    refuse({"'", inputs.path(), "' has shape ", npy_shape_text(inputs.shape()), ", which is no ",
            "number of rows"},
           "save inputs of shape (samples, ...), with at least one element in a sample");
  }
  const auto& shape = labels.shape();
  if (shape.empty() || shape.size() > 2 || (shape.size() == 2 && shape[1] != 1)) {
    refuse({"the labels in '", labels.path(), "' have shape ", npy_shape_text(shape)},
           "save one label for every sample: shape (samples,) or (samples, 1)");
  }
  if (shape[0] != inputs.shape()[0]) {
    refuse({"'", inputs.path(), "' has ", inputs.shape()[0], " rows and '", labels.path(), "' ",
            shape[0], " labels"},
           "give files of the same set");
  }
  if (labels.kind() != wanted && !(is_integer(labels.kind()) && is_integer(wanted)))
    fail_npy_kind(labels.path(), labels.kind(), wanted, "to be labels of");
}

/// Calls `f` with a null pointer to the integer type of a kind.
template <class F>
auto with_integer(ElementKind kind, const F& f) {
  switch (kind) {
    case ElementKind::i8:
      return f(static_cast<std::int8_t*>(nullptr));
    case ElementKind::i16:
      return f(static_cast<std::int16_t*>(nullptr));
    case ElementKind::i32:
      return f(static_cast<std::int32_t*>(nullptr));
    case ElementKind::u8:
      return f(static_cast<std::uint8_t*>(nullptr));
    case ElementKind::u16:
      return f(static_cast<std::uint16_t*>(nullptr));
    case ElementKind::u32:
      return f(static_cast<std::uint32_t*>(nullptr));
    case ElementKind::u64:
      return f(static_cast<std::uint64_t*>(nullptr));
    default:
      return f(static_cast<std::int64_t*>(nullptr));
  }
}

LOCKSTEP_INLINE std::optional<std::int64_t> npy_integer(const NpyFile& file, std::size_t element) {
  return with_integer(file.kind(), [&]<class T>(T*) -> std::optional<std::int64_t> {
    T value;
    std::memcpy(&value, file.bytes().data() + element * sizeof(T), sizeof(T));
    if (!std::in_range<std::int64_t>(value)) return std::nullopt;
    return static_cast<std::int64_t>(value);
  });
}

LOCKSTEP_INLINE void fail_npy_label(const NpyFile& file, std::size_t sample, ElementKind wanted) {
  const std::optional<std::int64_t> value = npy_integer(file, sample);
  const std::string number = value ? text({*value}) : std::string("above 9223372036854775807");
  fail("npy_dataset",
       {"'", file.path(), "', byte ", file.place_of(sample), ": the label of sample ", sample,
        " is ", number, ", which ", element_name(wanted), " does not hold"},
       "ask for labels of a wider type, or check that these are labels");
}

// --- Files of tokens ---

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

// --- LMDB files ---

/// Where a database of an LMDB file begins, and what it is (`MDB_db` of liblmdb 0.9).
struct LmdbTree {
  std::uint32_t pad;  ///< of the first database: the size of a page; of fixed values: their size
  std::uint16_t flags;
  std::uint16_t depth;
  std::uint64_t branch_pages, leaf_pages, overflow_pages, entries;
  std::uint64_t root;

  bool is_empty() const { return root == ~std::uint64_t{}; }
};

/// A meta page as a 64-bit program writes it (`MDB_page` and `MDB_meta`).
struct LmdbMeta {
  std::uint64_t page;
  std::uint64_t flags;
  std::uint32_t magic;
  std::uint32_t version;
  std::uint64_t address;
  std::uint64_t map_bytes;
  LmdbTree free, main;
  std::uint64_t last_page;
  std::uint64_t transaction;
};
static_assert(sizeof(LmdbTree) == 48 && sizeof(LmdbMeta) == 152 &&
              std::endian::native == std::endian::little);

/// Reads the trees of an LMDB file as liblmdb 0.9 writes them. liblmdb itself trusts its files: a
/// flipped byte lets it read behind the mapping or abort, inside of its own search. Here every
/// place and every page number is compared with what there is before it is used.
class LmdbFile {
 public:
  using Visit = FunctionRef<void(std::string_view key, LmdbRecord record)>;

  LmdbFile(const std::string& path, const LmdbOptions& options)
      : mapped(path, options.read_ahead ? Access::usual : Access::random, "lmdb_dataset"),
        page_bytes_(read_meta(0).free.pad) {
    const LmdbMeta first = read_meta(0);
    const LmdbMeta second = read_meta(page_bytes_);
    if (second.free.pad != page_bytes_) fail_page(1, "has another size than the first");
    newest = second.transaction > first.transaction ? second : first;
    pages_ = mapped.size() / page_bytes_;
    if (newest.last_page >= pages_) {
      fail("lmdb_dataset",
           {"'", path, "' is cut off: it has ", mapped.size(), " bytes, and its last page, ",
            newest.last_page, ", ends behind them"},
           "copy or download the file again");
    }
    tree = find(options.database);
  }

  /// The number of the last transaction, now.
  std::uint64_t transaction() const {
    return std::max(read<LmdbMeta>(mapped.bytes(), 0).transaction,
                    read<LmdbMeta>(mapped.bytes(), page_bytes_).transaction);
  }

  /// The record of a key, where keys have the usual order; no data where there is none.
  LmdbRecord get(std::string_view key) const { return get(tree, key); }

  /// All records in the order of their keys; each value of a key that has several is one.
  void for_each(Visit visit) const {
    std::size_t left = pages_;
    if (!tree.is_empty()) list_tree(tree, {}, left, visit);
  }

  [[noreturn, gnu::cold]] void fail_page(std::uint64_t number, std::string_view how) const {
    fail("lmdb_dataset", {"'", mapped.path(), "' is damaged: page ", number, " ", how},
         "copy or download the file again, or write the set again");
  }

  MappedFile mapped;
  LmdbMeta newest{};
  LmdbTree tree{};  ///< of the database that is read

 private:
  enum : std::uint16_t { branch = 1, leaf = 2, fixed_values = 0x20 };   // of pages
  enum : std::uint16_t { own_pages = 1, subtree = 2, duplicates = 4 };  // of nodes
  static constexpr std::size_t header_bytes = 16;                       // of a page
  static constexpr std::size_t node_bytes = 8;                          // before its key
  static constexpr std::size_t most_levels = 32;

  /// A page, or a part of a leaf that has the form of one.
  struct Page {
    std::span<const std::byte> bytes;
    std::uint64_t number;

    std::uint16_t word(std::size_t at) const { return read<std::uint16_t>(bytes, at); }
    std::uint16_t flags() const { return word(10); }
    std::size_t count() const { return (word(12) - header_bytes) / 2; }
  };
  struct Node {
    std::string_view key;
    std::uint64_t child;  ///< of a branch
    std::size_t size;     ///< of a leaf: of its value
    std::uint16_t flags;
    std::span<const std::byte> rest;  ///< of the page, behind the key
  };

  /// The caller has seen that it is inside.
  template <class T>
  static T read(std::span<const std::byte> bytes, std::size_t at) {
    T value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }

  LmdbMeta read_meta(std::size_t offset) const {
    if (mapped.size() < offset + sizeof(LmdbMeta)) {
      fail("lmdb_dataset",
           {"'", mapped.path(), "' has ", mapped.size(), " bytes, and the meta page at offset ",
            offset, " of an LMDB file ends behind them"},
           "copy or download the file again");
    }
    const auto meta = read<LmdbMeta>(mapped.bytes(), offset);
    if (meta.magic != 0xBEEFC0DE) {
      fail(
          "lmdb_dataset",
          {"'", mapped.path(), "' is no LMDB file of a 64-bit little-endian machine: the four ",
           "bytes at offset ", offset + 16, " are not its mark, 0xBEEFC0DE"},
          "give an LMDB file, or the folder that holds its data.mdb; bring that of another machine "
          "here by mdb_dump and mdb_load");
    }
    if (meta.version != 1 || !std::has_single_bit(meta.free.pad) || meta.free.pad < 256 ||
        meta.free.pad > 32768) {
      fail("lmdb_dataset",
           {"'", mapped.path(), "' is an LMDB file of format ", meta.version, " with pages of ",
            meta.free.pad, " bytes, and format 1 with 256 to 32768 is read"},
           "copy the file again, or bring it here by mdb_dump and mdb_load");
    }
    return meta;
  }

  /// The database of this name, or the main one.
  LmdbTree find(const std::string& name) const {
    if (name.empty()) return newest.main;
    const LmdbRecord tree = newest.main.flags == 0 ? get(newest.main, name) : LmdbRecord{};
    if (tree.size != sizeof(LmdbTree)) {
      fail("lmdb_dataset", {"'", mapped.path(), "' has no database '", name, "'"},
           "leave LmdbOptions::database out for the main one; `mdb_stat -a` lists all");
    }
    return read<LmdbTree>({tree.data, tree.size}, 0);
  }

  LmdbRecord get(const LmdbTree& in, std::string_view key) const {
    std::uint64_t number = in.root;
    for (std::size_t level = 0; level != most_levels && !in.is_empty(); ++level) {
      const Page here = page(number);
      const bool is_branch = (here.flags() & branch) != 0;
      // The last node whose key is not above this one. A branch's first has no key.
      std::size_t at = 0;
      for (std::size_t behind = here.count(); behind - at > 1;) {
        const std::size_t middle = at + (behind - at) / 2;
        (node(here, middle).key <= key ? at : behind) = middle;
      }
      const Node found = node(here, at);
      if (is_branch) {
        number = found.child;
      } else {
        return found.key == key ? value(here, found) : LmdbRecord{};
      }
    }
    if (!in.is_empty()) fail_page(number, "is deeper than a tree can be");
    return {};
  }

  Page page(std::uint64_t number) const {
    if (number >= pages_) fail_page(number, "is behind the end of the file");
    return checked({mapped.bytes().subspan(number * page_bytes_, page_bytes_), number});
  }

  Page checked(const Page& page) const {
    if (page.bytes.size() < header_bytes || page.word(12) <= header_bytes ||
        page.word(12) > page.bytes.size())
      fail_page(page.number, "has bounds that no page has");
    if ((page.flags() & (branch | leaf)) == 0)
      fail_page(page.number, "is neither a branch nor a leaf");
    return page;
  }

  Node node(const Page& page, std::size_t i) const {
    const std::size_t at = page.word(header_bytes + 2 * i);
    if (at + node_bytes > page.bytes.size()) fail_page(page.number, "has a node outside of it");
    const std::uint16_t low = page.word(at);
    const std::uint16_t high = page.word(at + 2);
    const std::uint16_t flags = page.word(at + 4);
    const std::size_t key_bytes = page.word(at + 6);
    const auto rest = page.bytes.subspan(at + node_bytes);
    if (key_bytes > rest.size()) fail_page(page.number, "has a key that ends behind it");
    return {{reinterpret_cast<const char*>(rest.data()), key_bytes},
            low | std::uint64_t{high} << 16 | std::uint64_t{flags} << 32,
            low | std::size_t{high} << 16,
            flags,
            rest.subspan(key_bytes)};
  }

  /// What a leaf holds for a key: in the page, or on pages of its own.
  LmdbRecord value(const Page& page, const Node& node) const {
    if (node.flags == own_pages && node.rest.size() >= sizeof(std::uint64_t)) {
      const auto first = read<std::uint64_t>(node.rest, 0);
      if (first >= pages_ || node.size > (pages_ - first) * page_bytes_ - header_bytes)
        fail_page(page.number, "has a value that ends behind the file");
      return {mapped.bytes().data() + first * page_bytes_ + header_bytes, node.size};
    }
    if ((node.flags & own_pages) != 0 || node.size > node.rest.size())
      fail_page(page.number, "has a value that ends behind it");
    return {node.rest.data(), node.size};
  }

  /// `left`: a page that leads to one above it would be walked for ever.
  void list_tree(const LmdbTree& tree, std::optional<std::string_view> key, std::size_t& left,
                 Visit visit, std::size_t depth = 0) const {
    if (depth == most_levels || left-- == 0)
      fail_page(tree.root, "is part of no tree: it leads to itself");
    const Page here = page(tree.root);
    if ((here.flags() & branch) == 0) return list_leaf(here, tree.pad, key, left, visit);
    for (std::size_t i = 0; i != here.count(); ++i) {
      LmdbTree below = tree;
      below.root = node(here, i).child;
      list_tree(below, key, left, visit, depth + 1);
    }
  }

  /// A tree of the values of one `key` has them where others have keys; of one size, without nodes.
  void list_leaf(const Page& here, std::size_t fixed, std::optional<std::string_view> key,
                 std::size_t& left, Visit visit) const {
    if ((here.flags() & fixed_values) != 0) {
      if (!key || header_bytes + here.count() * fixed > here.bytes.size())
        fail_page(here.number, "holds more than fits into it");
      for (std::size_t i = 0; i != here.count(); ++i)
        visit(*key, {here.bytes.data() + header_bytes + i * fixed, fixed});
      return;
    }
    for (std::size_t i = 0; i != here.count(); ++i) {
      const Node each = node(here, i);
      if (key) {
        visit(*key, {reinterpret_cast<const std::byte*>(each.key.data()), each.key.size()});
        continue;
      }
      const LmdbRecord found = value(here, each);
      const std::span<const std::byte> bytes(found.data, found.size);
      if ((each.flags & duplicates) == 0) {
        visit(each.key, found);
      } else if ((each.flags & subtree) == 0) {
        const Page inner = checked({bytes, here.number});
        if ((inner.flags() & branch) != 0) fail_page(here.number, "has values of an unknown kind");
        list_leaf(inner, inner.word(8), each.key, left, visit);
      } else if (bytes.size() == sizeof(LmdbTree)) {
        list_tree(read<LmdbTree>(bytes, 0), each.key, left, visit);
      } else {
        fail_page(here.number, "has values of an unknown kind");
      }
    }
  }

  std::size_t page_bytes_;
  std::uint64_t pages_ = 0;
};

/// Memory for so many places, all unknown: the system gives pages of it when they are written. None
/// where there is not so much.
LOCKSTEP_INLINE std::shared_ptr<LmdbRecord[]> lmdb_places(std::size_t count) {
  auto* const places = static_cast<LmdbRecord*>(std::calloc(count, sizeof(LmdbRecord)));
  if (places == nullptr) return nullptr;
  return {places, [](LmdbRecord* memory) { std::free(memory); }};
}

LOCKSTEP_INLINE LmdbRecords::LmdbRecords(const std::string& path, const LmdbOptions& options) {
  struct stat status{};
  const bool is_folder = ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
  file_ = std::make_shared<const LmdbFile>(is_folder ? text({path, "/data.mdb"}) : path, options);
  size_ = file_->tree.is_empty() ? 0 : file_->tree.entries;
  if (size_ == 0) return;
  const std::size_t bytes = file_->mapped.size();
  const auto fail_count = [&] {
    fail("lmdb_dataset",
         {"'", file_->mapped.path(), "' is damaged: it has not the ", size_,
          " records that it names"},
         "copy or download the file again, or write the set again");
  };
  if (size_ > bytes) fail_count();
  const auto has = [&](std::size_t number) {
    const auto key = lmdb_key(number);
    return file_->get({key.data(), key.size()}).data != nullptr;
  };
  if (file_->tree.flags == 0 && !options.is_sample && has(0) && has(size_ - 1)) {
    if (size_ <= bytes / (8 * sizeof(LmdbRecord))) places_ = lmdb_places(size_);
    return;
  }
  places_ = lmdb_places(size_);
  if (places_ == nullptr) throw std::bad_alloc();
  std::size_t samples = 0;
  std::size_t seen = 0;
  file_->for_each([&](std::string_view key, LmdbRecord record) {
    if (seen++ == size_) fail_count();
    if (!options.is_sample || options.is_sample(key)) places_.get()[samples++] = record;
  });
  if (seen != size_) fail_count();
  size_ = samples;
}

LOCKSTEP_INLINE std::span<const std::byte> LmdbRecords::operator[](std::size_t index) const {
  if (index >= size_) {
    fail("lmdb_dataset", {"record ", index, " of '", file_->mapped.path(), "', which has ", size_},
         "draw numbers below size()");
  }
  if (places_ == nullptr) {
    const LmdbRecord record = look_up(index);
    return {record.data, record.size};
  }
  // Several threads may look up the same record. The address comes last, and all find the same.
  LmdbRecord& place = places_.get()[index];
  const std::atomic_ref data(place.data);
  const std::atomic_ref size(place.size);
  if (const std::byte* const known = data.load(std::memory_order_acquire))
    return {known, size.load(std::memory_order_relaxed)};
  const LmdbRecord record = look_up(index);
  size.store(record.size, std::memory_order_relaxed);
  data.store(record.data, std::memory_order_release);
  return {record.data, record.size};
}

LOCKSTEP_INLINE LmdbRecord LmdbRecords::look_up(std::size_t index) const {
  const auto key = lmdb_key(index);
  const LmdbRecord record = file_->get({key.data(), key.size()});
  if (record.data == nullptr) {
    fail("lmdb_dataset",
         {"'", file_->mapped.path(), "' has no key ", index, ", though it has 0 and ", size_ - 1},
         "give LmdbOptions::is_sample, which says by key what is a sample, or write the set again");
  }
  return record;
}

LOCKSTEP_INLINE void LmdbRecords::require_intact() const {
  file_->mapped.require_intact();
  require_same_transaction();
}

LOCKSTEP_INLINE void LmdbRecords::require_same_transaction() const {
  if (file_->transaction() == file_->newest.transaction) [[likely]]
    return;
  file_->mapped.fail_written();
}

LOCKSTEP_INLINE void LmdbRecords::fetch(std::span<const std::size_t> indices) const {
  const LmdbRecord* const places = places_.get();
  if (places == nullptr) return;
  for (const std::size_t index : indices) {
    if (index < size_) __builtin_prefetch(&places[index]);
  }
  for (const std::size_t index : indices) {
    if (index >= size_) continue;
    const std::atomic_ref data(places_.get()[index].data);
    __builtin_prefetch(data.load(std::memory_order_relaxed));
  }
}

LOCKSTEP_INLINE void LmdbRecords::rethrow_decoding(std::size_t index, std::size_t bytes) const {
  constexpr const char* advice = "look at this record, and at the function that decodes it";
  const auto error = [&](std::string_view words, std::string_view cure) {
    return Error(
        "lmdb_dataset",
        text({"record ", index, " of '", file_->mapped.path(), "', ", bytes, " bytes: ", words}),
        cure);
  };
  try {
    throw;
  } catch (const Stopped&) {
    throw;
  } catch (const Error& thrown) {
    std::throw_with_nested(error(thrown.problem(), thrown.advice()));
  } catch (const std::exception& thrown) {
    std::throw_with_nested(error(thrown.what(), advice));
  } catch (...) {
    std::throw_with_nested(error("an exception that is no std::exception", advice));
  }
}

LOCKSTEP_INLINE LabelledRecord labelled_record(std::span<const std::byte> record, ElementKind input,
                                               ElementKind label) {
  constexpr const char* operation = "lmdb_dataset";
  LabelledRecord front;
  if (record.size() >= sizeof front) std::memcpy(&front, record.data(), sizeof front);
  if (record.size() < sizeof front || front.mark != LabelledRecord::own_mark) {
    fail(operation, {"it does not begin as the records of write_lmdb do, with 'LSR1'"},
         "give the function that decodes these records: lmdb_dataset<Sample>(path, decode)");
  }
  const auto is_known = [](ElementKind kind) {
    return kind != ElementKind::unsupported && static_cast<std::size_t>(kind) < element_kinds;
  };
  if (!is_known(front.input) || !is_known(front.label)) {
    fail(operation, {"its element types, at its bytes 4 and 5, are none that the library knows"},
         "write the set again, or read it with the version of lockstep that wrote it");
  }
  if (front.input != input || front.label != label) {
    fail(operation,
         {"it holds ", element_name(front.input), " inputs and ", element_name(front.label),
          " labels, and ", element_name(input), " and ", element_name(label), " are asked for"},
         "name the types that it holds: lmdb_dataset<X, Y>; `| map(f)` makes others of them");
  }
  const std::size_t inputs = saturating_product(front.width, element_size(input));
  const std::size_t room = record.size() - sizeof front;
  if (inputs != room) {
    fail(operation,
         {"it promises ", front.width, " inputs of ", element_size(input), " bytes, and has ", room,
          " bytes for them"},
         "write the set again");
  }
  if (std::bit_cast<std::uintptr_t>(record.data()) % element_size(input) != 0) {
    fail(operation, {"its inputs do not lie at a multiple of ", element_size(input), " bytes"},
         "write the set with write_lmdb, which sees to that");
  }
  return front;
}

// --- Staging ---

inline constexpr std::string_view staging = "stage_locally";

/// Who has the lock and how far it is, in one line.
LOCKSTEP_INLINE std::string stage_owner(const std::string& path) {
  std::string owner = read_file(path.c_str());
  owner.resize(std::min({owner.find('\n'), owner.size(), std::size_t{1000}}));
  while (owner.ends_with(' ')) owner.pop_back();
  return owner.empty() ? "another process" : owner;
}

LOCKSTEP_INLINE StageLock::StageLock(const std::string& path, std::string_view what,
                                     const Waiting& waiting)
    : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666)) {
  if (!file_) fail_writing(staging, path, errno);
  Deadline end = Deadline::after(waiting.patience);
  Deadline line = Deadline::after(waiting.first_line);
  std::string seen;
  while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    if (error != EWOULDBLOCK) {
      fail(staging, {"'", path, "' cannot be locked: ", error_text(error)},
           "name a folder on a disk of this host");
    }
    if (std::string owner = stage_owner(path); owner != seen) {
      seen = owner;
      end = Deadline::after(waiting.patience);
    }
    if (end.passed()) {
      fail(staging,
           {"'", what, "' is being staged by ", seen, ", which has made no progress for ",
            seconds_text(waiting.patience)},
           "end that process, or give StageOptions a longer patience");
    }
    if (line.passed()) {
      const std::string words = text({"lockstep: ", staging, ": '", what, "' is being staged by ",
                                      seen, "; waiting for it\n"});
      std::fputs(words.c_str(), stderr);
      line = Deadline::after(waiting.next_lines);
    }
    sleep_for(std::chrono::milliseconds(20));
  }
  owner_ = owner_text();
  say("");
}

LOCKSTEP_INLINE StageLock::~StageLock() {
  [[maybe_unused]] const bool is_empty = ::ftruncate(file_.get(), 0) == 0;
  // Closing is not enough: a process that was forked meanwhile has the file open, too.
  ::flock(file_.get(), LOCK_UN);
}

LOCKSTEP_INLINE void StageLock::progress(std::uint64_t bytes, std::uint64_t all) {
  const auto now = std::chrono::steady_clock::now();
  if (now - said_ < std::chrono::milliseconds(250)) return;
  said_ = now;
  say(text({", ", bytes, " of ", all, " bytes so far"}));
}

LOCKSTEP_INLINE void StageLock::say(std::string_view done) {
  // One call, and never shorter than before, so that nobody reads two texts in one. A full disk has
  // no room for it; the lock holds all the same.
  std::string line = text({owner_, done});
  line.resize(owner_.size() + 80, ' ');
  line += '\n';
  [[maybe_unused]] const ssize_t n = ::pwrite(file_.get(), line.data(), line.size(), 0);
}

/// When a file was last written, in nanoseconds.
LOCKSTEP_INLINE std::int64_t time_of(const struct stat& status) {
  return std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

/// The names in a folder, in the order of the alphabet.
LOCKSTEP_INLINE std::vector<std::string> names_in(const std::string& folder) {
  struct Close {
    void operator()(DIR* entries) const { ::closedir(entries); }
  };
  const std::unique_ptr<DIR, Close> entries(::opendir(folder.c_str()));
  if (!entries) fail_reading(staging, folder, errno);
  std::vector<std::string> names;
  while (const dirent* const entry = ::readdir(entries.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Calls `sink(bytes)` with all of a file, some at a time.
template <class Sink>
void read_plainly(int file, const std::string& path, const Sink& sink) {
  std::vector<std::byte> buffer(write_chunk_bytes);
  for (;;) {
    const ssize_t n = ::read(file, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_reading(staging, path, errno);
    if (n == 0) return;
    sink(std::span<const std::byte>(buffer).first(static_cast<std::size_t>(n)));
  }
}

/// Removes a file or a folder with all that is in it, if it is there.
LOCKSTEP_INLINE void remove_tree(const std::string& path) {
  constexpr auto remove = [](const char* each, const struct stat*, int, FTW*) {
    std::remove(each);
    return 0;
  };
  constexpr int open_folders = 16;
  ::nftw(path.c_str(), remove, open_folders, FTW_DEPTH | FTW_PHYS);
}

/// Makes the names in a folder last; 0, or why that failed.
LOCKSTEP_INLINE int sync_folder(const std::string& folder) {
  const Descriptor opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A file system that has nothing to sync for a folder says EINVAL.
  return opened && (::fsync(opened.get()) == 0 || errno == EINVAL) ? 0 : errno;
}

LOCKSTEP_INLINE std::uint64_t free_bytes(const std::string& folder) {
  struct statvfs room{};
  return ::statvfs(folder.c_str(), &room) == 0 ? std::uint64_t{room.f_bavail} * room.f_frsize : 0;
}

/// A path that is the same from everywhere; links on its way are followed.
LOCKSTEP_INLINE std::string real_path(const std::string& path) {
  char* const found = ::realpath(path.c_str(), nullptr);
  if (found == nullptr) fail_reading(staging, path, errno);
  std::string real = found;
  ::free(found);
  return real;
}

/// A source as it is at one moment.
struct StageSource {
  /// By its path inside; the name of a source that is a file itself is empty.
  struct File {
    std::string name;
    std::uint64_t bytes;
    std::int64_t time;
  };

  explicit StageSource(const std::string& from) : path(from) {
    struct stat status{};
    if (::stat(path.c_str(), &status) != 0) fail_reading(staging, path, errno);
    is_folder = S_ISDIR(status.st_mode);
    if (is_folder) {
      add_folder("");
    } else if (S_ISREG(status.st_mode)) {
      files.push_back({"", static_cast<std::uint64_t>(status.st_size), time_of(status)});
    } else {
      fail(staging, {"'", path, "' is neither a file nor a folder"}, "name one of the two");
    }
  }

  void add_folder(const std::string& name) {
    const std::vector<std::string> names = names_in(in(path, name));
    for (const std::string& each : names) {
      // Says who reads an LMDB on the source's host. It is no data, and may change at any time.
      if (each == "lock.mdb" && std::binary_search(names.begin(), names.end(), "data.mdb"))
        continue;
      const std::string inner = name.empty() ? each : text({name, "/", each});
      const std::string whole = in(path, inner);
      struct stat status{};
      struct stat link{};
      if (::stat(whole.c_str(), &status) != 0 || ::lstat(whole.c_str(), &link) != 0)
        fail_reading(staging, whole, errno);
      if (S_ISDIR(status.st_mode) && !S_ISLNK(link.st_mode)) {
        folders.push_back(inner);
        add_folder(inner);
      } else if (S_ISREG(status.st_mode)) {
        files.push_back({inner, static_cast<std::uint64_t>(status.st_size), time_of(status)});
      } else if (S_ISDIR(status.st_mode)) {  // it may lead to a folder that it is in
        fail(staging, {"'", whole, "' is a link to a folder"},
             "put the folder itself there, or stage what it leads to by itself");
      } else {
        fail(staging, {"'", whole, "' is neither a file nor a folder"}, "remove it");
      }
    }
  }

  /// The path of what has this name inside of `root`, the source or its copy.
  static std::string in(const std::string& root, const std::string& name) {
    return name.empty() ? root : text({root, "/", name});
  }

  std::uint64_t bytes() const {
    std::uint64_t bytes = 0;
    for (const File& file : files) bytes += file.bytes;
    return bytes;
  }

  /// Sizes, times and names as a text: two sources are alike if these are.
  std::string facts() const {
    std::string facts = is_folder ? "folder\n" : "file\n";
    for (const std::string& folder : folders)
      facts += text({"folder ", folder.size(), " ", folder, "\n"});
    for (const File& file : files)
      facts += text({file.bytes, " ", file.time, " ", file.name.size(), " ", file.name, "\n"});
    return facts;
  }

  std::string path;
  bool is_folder = false;
  std::vector<std::string> folders{};  ///< inside of it; outer ones first
  std::vector<File> files{};
};

/// Sizes and times of a copy's files at `root`, as a text. That a file has the time of its source
/// tells it from the file of an older copy, and from one that was written to.
LOCKSTEP_INLINE std::string copy_facts(const StageSource& source, const std::string& root) {
  std::string facts;
  for (const StageSource::File& file : source.files) {
    struct stat status{};
    const bool is_there = ::stat(source.in(root, file.name).c_str(), &status) == 0;
    facts += is_there ? text({status.st_size, " ", time_of(status), "\n"}) : "missing\n";
  }
  return facts;
}

/// The checksum of all bytes of a copy.
LOCKSTEP_INLINE std::uint64_t copy_checksum(const StageSource& source, const std::string& root) {
  Checksum checksum;
  for (const StageSource::File& file : source.files) {
    const std::string path = source.in(root, file.name);
    const Descriptor opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!opened) fail_reading(staging, path, errno);
    read_plainly(opened.get(), path,
                 [&](std::span<const std::byte> piece) { checksum.add(piece); });
  }
  return checksum.value();
}

/// The file beside a copy that says what it is a copy of, and what it was like when it was made:
/// a title with a token, so that no two are alike, a line of `identity`, what the source and the
/// copy were like, the checksum of the copy, and that of the record.
inline constexpr std::string_view stage_record_title = "lockstep staged 2 ";
inline constexpr std::size_t stage_digits = 17;  // of the token and of a checksum, with line's end

LOCKSTEP_INLINE std::string stage_record(std::string_view body) {
  std::string record = text({stage_record_title, random_token(), "\n", body});
  return record += text({checksum_text(checksum_of(std::as_bytes(std::span(record)))), "\n"});
}

/// What is between the first line of a record and its checksum; empty where it is damaged.
LOCKSTEP_INLINE std::string_view record_body(std::string_view record) {
  const std::size_t front = stage_record_title.size() + stage_digits;
  if (!record.starts_with(stage_record_title) || record.size() < front + stage_digits) return {};
  const std::string_view checked = record.substr(0, record.size() - stage_digits);
  const auto sum = checksum_from(record.substr(checked.size(), stage_digits - 1));
  return sum == Checksum().add(checked).value() ? checked.substr(front) : std::string_view();
}

/// Where a copy is, and what lies beside it.
struct StagePlace {
  StagePlace(const std::string& in, std::string_view name)
      : folder(in),
        local(text({folder, "/", name})),
        record(text({folder, "/.", name, ".staged"})),
        lock(text({folder, "/.", name, ".lock"})),
        temporary(text({folder, "/.", name, temporary_infix})) {}

  std::string folder;
  std::string local;   ///< the copy
  std::string record;  ///< what it is a copy of
  std::string lock;
  std::string temporary;  ///< the names of temporaries begin so

  /// Removes what a process that was killed has left.
  void remove_leftovers() const {
    const std::string beside_record = text({record, temporary_infix});
    for (const std::string& name : names_in(folder)) {
      const std::string path = text({folder, "/", name});
      for (const std::string& front : {temporary, beside_record}) {
        // Another source may be called like a temporary; what is kept for it has longer names.
        if (path.starts_with(front) && checksum_from(path.substr(front.size()))) remove_tree(path);
      }
    }
  }
};

/// A copy while it is being made: beside its place, and removed unless it is brought there.
class StageCopy {
 public:
  using Copied = FunctionRef<void(const std::string& path)>;

  StageCopy(const StageSource& source, const StagePlace& place, StageLock& lock)
      : source_(source),
        place_(place),
        lock_(lock),
        root_(text({place.temporary, random_token()})),
        all_(source.bytes()) {}
  ~StageCopy() { remove_tree(root_); }
  StageCopy(const StageCopy&) = delete;
  StageCopy& operator=(const StageCopy&) = delete;

  /// Brings the copy into its place, behind a record of this identity.
  void make(const std::string& identity, Copied copied) {
    // Files are as large as they will be before any is written: a disk that is too small is known.
    if (source_.is_folder) require(::mkdir(root_.c_str(), 0777));
    for (const std::string& folder : source_.folders)
      require(::mkdir(source_.in(root_, folder).c_str(), 0777));
    for (const StageSource::File& file : source_.files) reserve(file);
    Checksum checksum;
    for (const StageSource::File& file : source_.files) {
      write(file, checksum);
      copied(source_.in(source_.path, file.name));
    }
    if (source_.is_folder) sync(root_);
    for (const std::string& folder : source_.folders) sync(source_.in(root_, folder));
    // Files may have been written to or replaced, or have come and gone.
    const std::string facts = source_.facts();
    if (StageSource(source_.path).facts() != facts) fail_changed(source_.path);

    const std::string record = stage_record(text({identity, "\n", facts, copy_facts(source_, root_),
                                                  checksum_text(checksum.value()), "\n"}));
    TemporaryFile beside(staging, place_.record, record.size());
    beside.append(std::as_bytes(std::span(record)));
    // The record comes before the copy. In between it fits nothing that is there: an older file has
    // another time.
    beside.commit();
    bring_into_place();
    sync(place_.folder);
  }

 private:
  void reserve(const StageSource::File& file) {
    const std::string path = source_.in(root_, file.name);
    const Descriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!out) fail_writing(errno);
    while (file.bytes != 0 && ::fallocate(out.get(), 0, 0, static_cast<off_t>(file.bytes)) != 0) {
      if (errno == EINTR) continue;
      if (errno != EOPNOTSUPP && errno != ENOSYS) fail_writing(errno);
      // This file system cannot reserve. What it says of itself is better than nothing.
      if (free_bytes(place_.folder) < all_) fail_writing(ENOSPC);
      return;
    }
  }

  void write(const StageSource::File& file, Checksum& checksum) {
    const std::string path = source_.in(source_.path, file.name);
    const Descriptor in(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status{};
    if (!in || ::fstat(in.get(), &status) != 0) fail_reading(staging, path, errno);
    if (static_cast<std::uint64_t>(status.st_size) != file.bytes || time_of(status) != file.time)
      fail_changed(path);
    ::posix_fadvise(in.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
    const Descriptor out(::open(source_.in(root_, file.name).c_str(), O_WRONLY | O_CLOEXEC));
    if (!out) fail_writing(errno);
    std::uint64_t bytes = 0;
    std::uint64_t started = 0;
    read_plainly(in.get(), path, [&](std::span<const std::byte> piece) {
      if (bytes + piece.size() > file.bytes) fail_changed(path);
      checksum.add(piece);
      put(out.get(), piece, bytes);
      bytes += piece.size();
      if (bytes >= started + 64 * write_chunk_bytes) {
        // The disk begins while the rest is still being read. An error would be seen by fsync.
        ::sync_file_range(out.get(), static_cast<off_t>(started),
                          static_cast<off_t>(bytes - started), SYNC_FILE_RANGE_WRITE);
        started = bytes;
      }
      lock_.progress(copied_ + bytes, all_);
    });
    if (bytes != file.bytes) fail_changed(path);
    copied_ += bytes;
    constexpr std::int64_t second = 1'000'000'000;
    const std::int64_t seconds = file.time / second - (file.time % second < 0 ? 1 : 0);
    const timespec times[2] = {{0, UTIME_OMIT}, {seconds, file.time - seconds * second}};
    require(::futimens(out.get(), times));
    require(::fsync(out.get()));
  }

  /// A rename puts a file in the place of a file. A folder changes places with the old copy, which
  /// is then removed as this one would have been.
  void bring_into_place() {
    struct stat old{};
    const bool is_there = ::lstat(place_.local.c_str(), &old) == 0;
    if (is_there && (source_.is_folder || S_ISDIR(old.st_mode))) {
      if (::renameat2(AT_FDCWD, root_.c_str(), AT_FDCWD, place_.local.c_str(), RENAME_EXCHANGE) ==
          0)
        return;
      if (errno != EINVAL && errno != ENOSYS) fail_writing(errno);
      remove_tree(place_.local);  // this file system cannot exchange
    }
    require(::rename(root_.c_str(), place_.local.c_str()));
  }

  void put(int file, std::span<const std::byte> bytes, std::uint64_t at) {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail_writing(n < 0 ? errno : ENOSPC);
      at += static_cast<std::uint64_t>(n);
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
  }

  void sync(const std::string& folder) {
    if (const int error = sync_folder(folder)) fail_writing(error);
  }
  void require(int result) {
    if (result != 0) fail_writing(errno);
  }
  [[noreturn]] void fail_writing(int error) {
    remove_tree(root_);  // what it has taken is free again
    if (error != ENOSPC && error != EDQUOT) detail::fail_writing(staging, place_.local, error);
    fail(staging,
         {"'", place_.folder, "' has no room for '", source_.path, "' (", error_text(error),
          "): ", all_, " bytes are needed and ", free_bytes(place_.folder), " are free"},
         "make room there, or name a folder on another disk");
  }
  [[noreturn]] void fail_changed(const std::string& path) const {
    fail(staging, {"'", path, "' changed while it was copied"},
         "stage it when nothing writes to it any more");
  }

  const StageSource& source_;
  const StagePlace& place_;
  StageLock& lock_;
  std::string root_;
  std::uint64_t all_;         // bytes of the source
  std::uint64_t copied_ = 0;  // of them, from files that are through
};

/// What is at a copy's place.
struct FoundCopy {
  std::string record;
  bool is_valid = false;
  std::string damage{};  ///< how it differs from what was staged, although the source is the same
};

LOCKSTEP_INLINE FoundCopy find_copy(const StageSource& source, const StagePlace& place,
                                    const std::string& identity, bool verify) {
  // In this order: a copy's record is there before the copy is.
  struct stat status{};
  const bool is_there = ::lstat(place.local.c_str(), &status) == 0;
  FoundCopy found{read_file(place.record.c_str())};
  const std::string_view body = record_body(found.record);
  const std::string_view other = body.substr(0, body.find('\n'));
  if (is_there && (found.record.empty() || (!body.empty() && other != identity))) {
    const std::string what = found.record.empty() ? std::string("there, and was not staged")
                                                  : text({other, ", and not ", identity});
    fail(staging, {"'", place.local, "' is ", what},
         "remove it if it is not needed, or name another folder");
  }
  const std::string front = text({identity, "\n", source.facts()});
  if (!is_there || !body.starts_with(front)) return found;
  const std::string_view then = body.substr(front.size());
  const std::string now = copy_facts(source, place.local);
  if (then.substr(0, then.size() - std::min(then.size(), stage_digits)) != now) {
    found.damage = text({"'", place.local, "' is not as it was staged"});
  } else if (verify && checksum_from(then.substr(now.size(), stage_digits - 1)) !=
                           copy_checksum(source, place.local)) {
    found.damage = text({"the checksum of '", place.local, "' is not that of what was staged"});
  }
  found.is_valid = found.damage.empty();
  return found;
}

LOCKSTEP_INLINE std::string stage_locally(const std::string& path, std::string folder,
                                          const StageOptions& options, StageCopy::Copied copied) {
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  if (folder.empty()) folder = ".";
  std::string from = path;
  while (from.size() > 1 && from.ends_with('/')) from.pop_back();
  std::string name(name_in_folder(from));
  if (name.empty() || name == "." || name == "..") {
    from = real_path(from);
    name = name_in_folder(from);
  }
  if (name.empty()) fail(staging, {"'", path, "' has no name"}, "name a file or a folder");

  std::optional<StageSource> source(std::in_place, from);
  make_folder(staging, folder);
  const StagePlace place(folder, name);
  struct stat first{};
  struct stat second{};
  if (::stat(from.c_str(), &first) == 0 && ::stat(place.local.c_str(), &second) == 0 &&
      first.st_dev == second.st_dev && first.st_ino == second.st_ino)
    return place.local;  // what is in its place needs no copy
  if (source->is_folder &&
      text({real_path(folder), "/"}).starts_with(text({real_path(from), "/"}))) {
    fail(staging, {"'", folder, "' is inside of '", path, "'"}, "name a folder outside of it");
  }
  std::string identity = text({"a copy of '", real_path(folder_of(from)), "/", name, "'"});
  std::replace(identity.begin(), identity.end(), '\n', ' ');  // it is a line of the record

  for (;;) {
    // Most often the copy is there, and nobody waits for anybody.
    const FoundCopy found = find_copy(*source, place, identity, options.verify);
    if (found.is_valid) return place.local;
    StageLock lock(place.lock, place.local, {.patience = options.patience});
    source.emplace(from);
    // No two records are alike: if this one is new, another process has made a copy meanwhile.
    if (read_file(place.record.c_str()) != found.record) continue;
    place.remove_leftovers();
    if (!found.damage.empty()) {
      const std::string words =
          text({"lockstep: ", staging, ": ", found.damage, "; it is staged again\n"});
      std::fputs(words.c_str(), stderr);
    }
    StageCopy(*source, place, lock).make(identity, copied);
    return place.local;
  }
}

}  // namespace lockstep::detail

namespace lockstep {

LOCKSTEP_INLINE std::string stage_locally(const std::string& path, const std::string& folder,
                                          const StageOptions& options) {
  return detail::stage_locally(path, folder, options, [](const std::string&) {});
}

}  // namespace lockstep
