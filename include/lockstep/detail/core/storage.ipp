// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder that only programs with checkpoints or data files need.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cerrno>
#include <charconv>

#include "lockstep/detail/core/dynamic.hpp"
#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/core/thread.hpp"

namespace lockstep::detail {

/// Calls `f` with the index of a floating kind as a constant.
template <class F>
void with_floating(ElementKind kind, const F& f) {
  if (!is_floating(kind))
    fail("convert", {"elements of ", element_name(kind), " are not floating"}, "keep their type");
  with_index<4, static_cast<std::size_t>(ElementKind::f64)>(static_cast<std::size_t>(kind), f);
}

LOCKSTEP_INLINE void convert_elements(std::byte* to, ElementKind to_kind, const std::byte* from,
                                      ElementKind from_kind, std::size_t count) {
  if (to_kind == from_kind) {
    if (count != 0) std::memmove(to, from, count * element_size(to_kind));
    return;
  }
  with_floating(to_kind, [&](auto to_index) {
    with_floating(from_kind, [&](auto from_index) {
      using To = std::tuple_element_t<to_index, ElementTypes>;
      using From = std::tuple_element_t<from_index, ElementTypes>;
      if constexpr (!std::is_same_v<To, From>) {
        // Through local arrays: compilers assume that pointers to two types never overlap.
        constexpr std::size_t most = 512;
        From some[most];
        for (std::size_t at = 0; at < count; at += most) {
          const std::size_t n = std::min(most, count - at);
          std::memcpy(some, from + at * sizeof(From), n * sizeof(From));
          To converted[most];
          convert(converted, some, n);
          std::memcpy(to + at * sizeof(To), converted, n * sizeof(To));
        }
      }
    });
  });
}

LOCKSTEP_INLINE void share_work(std::size_t tasks, FunctionRef<void(std::size_t)> f) {
  std::atomic<std::size_t> next = 0;
  std::atomic<bool> has_failed = false;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks && !has_failed; i = next++) f(i);
  };
  const auto report = [&](std::exception_ptr error) {
    if (!has_failed.exchange(true)) failure = std::move(error);
  };
  {
    constexpr std::size_t most_threads = 4;
    std::vector<Thread> threads;
    try {
      while (threads.size() + 1 < std::min({most_threads, core_count(), tasks}))
        threads.emplace_back(ThreadName{"lockstep shares", "a helper"}, work, report);
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): fewer threads do the same work
    }
    try {
      work();
    } catch (...) {
      report(std::current_exception());
    }
  }
  if (failure) std::rethrow_exception(failure);
}

/// Calls `f` with the names of the temporary files that are being written, one thread at a time.
LOCKSTEP_INLINE void with_temporary_names(FunctionRef<void(std::vector<std::string>&)> f) {
  static std::mutex mutex;
  static std::vector<std::string> names;
  const std::lock_guard lock(mutex);
  f(names);
}

LOCKSTEP_INLINE void remove_temporary_files() {
  with_temporary_names([](const std::vector<std::string>& names) {
    for (const std::string& name : names) ::unlink(name.c_str());
  });
}

LOCKSTEP_INLINE TemporaryFile::TemporaryFile(std::string_view operation, const std::string& path,
                                             std::uint64_t bytes)
    : operation_(operation),
      path_(path),
      temporary_(text({path, temporary_infix, random_token()})) {
  constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  file_ = Descriptor(::open(temporary_.c_str(), flags, 0666));
  if (!file_) fail_writing(operation_, path_, errno);
  with_temporary_names([&](std::vector<std::string>& names) { names.push_back(temporary_); });
  // Detects a full disk at once, on file systems that support fallocate.
  while (bytes != 0 && ::fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes)) != 0 &&
         errno != EOPNOTSUPP && errno != ENOSYS) {
    if (errno != EINTR) fail_now(errno);
  }
}

LOCKSTEP_INLINE void TemporaryFile::append(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() > write_chunk_bytes) flush();
  if (bytes.size() >= write_chunk_bytes) return write(bytes);
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

LOCKSTEP_INLINE void TemporaryFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_now(n < 0 ? errno : ENOSPC);
    note_storage_progress();
    offset_ += static_cast<std::uint64_t>(n);
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  // Starts writeback while the rest is still being copied; fsync reports its errors.
  if (offset_ < started_ + 64 * write_chunk_bytes) return;
  ::sync_file_range(file_.get(), static_cast<off_t>(started_),
                    static_cast<off_t>(offset_ - started_), SYNC_FILE_RANGE_WRITE);
  started_ = offset_;
}

LOCKSTEP_INLINE void TemporaryFile::commit() {
  flush();
  if (::fsync(file_.get()) != 0) fail_now(errno);
  note_storage_progress();
  // An open old file keeps its blocks, whose release can be slow (ext4), until after the sync.
  const Descriptor replaced(::open(path_.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_now(errno);
  forget();
  sync_folder_of(operation_, path_);
}

LOCKSTEP_INLINE void sync_folder_of(std::string_view operation, const std::string& path) {
  const Descriptor folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: this file system does not sync folders.
  if (!folder || (::fsync(folder.get()) != 0 && errno != EINVAL))
    fail_writing(operation, path, errno);
}

LOCKSTEP_INLINE void TemporaryFile::forget() {
  with_temporary_names(
      [&](std::vector<std::string>& names) { std::erase(names, std::exchange(temporary_, {})); });
}

LOCKSTEP_INLINE void TemporaryFile::remove() {
  if (temporary_.empty()) return;
  ::unlink(temporary_.c_str());
  forget();
}

/// Removes the file, because a constructor that throws runs no destructor.
LOCKSTEP_INLINE void TemporaryFile::fail_now(int error) {
  remove();
  fail_writing(operation_, path_, error);
}

LOCKSTEP_INLINE bool make_folder(std::string_view operation, const std::string& folder) {
  bool is_made = false;
  for (std::size_t end = 0; end != folder.size();) {
    end = std::min(folder.find('/', end + 1), folder.size());
    const std::string part = folder.substr(0, end);
    is_made = ::mkdir(part.c_str(), 0777) == 0;
    const int error = errno;
    struct stat status{};
    if (is_made || error == EEXIST || error == EROFS || error == EACCES || error == EPERM) {
      // A parent that cannot be written to is fine if it exists.
      if (is_made || (::stat(part.c_str(), &status) == 0 && S_ISDIR(status.st_mode))) continue;
    }
    fail(operation,
         {"the folder '", folder, "' cannot be made: ",
          error == EEXIST ? text({"'", part, "' is no folder"}) : error_text(error)},
         "name a folder that exists or may be made");
  }
  return is_made;
}

LOCKSTEP_INLINE std::string owner_text() {
  return text({"process ", ::getpid(), " on ", host_name(), ", ", own_program(), ", since ",
               utc_text("%Y-%m-%d %H:%M:%S UTC")});
}

LOCKSTEP_INLINE std::uint64_t little_endian_word(const std::byte* bytes) {
  static_assert(std::endian::native == std::endian::little,
                "lockstep: files are little-endian, and this machine is not");
  std::uint64_t word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

LOCKSTEP_INLINE void Checksum::add_block(Lanes& lanes, const std::byte* block) {
  // Each line is a bijection. The first two make every bit affect at least one other; the
  // multiplication spreads the changes, and one per two words is what the speed allows.
  const auto step = [](std::uint64_t lane, std::uint64_t first, std::uint64_t second) {
    lane ^= first;
    lane ^= lane >> 29;
    lane += lane << 21;
    lane ^= second;
    return (lane ^ (lane >> 32)) * golden_step;
  };
  [&]<std::size_t... Lane>(std::index_sequence<Lane...>) {
    ((lanes[Lane] = step(lanes[Lane], little_endian_word(block + 8 * Lane),
                         little_endian_word(block + block_bytes / 2 + 8 * Lane))),
     ...);
  }(std::make_index_sequence<lane_count>());
}

LOCKSTEP_INLINE Checksum& Checksum::add(std::span<const std::byte> bytes) {
  if (bytes.empty()) return *this;
  const std::size_t held = length_ % block_bytes;
  length_ += bytes.size();
  if (held != 0) {
    const std::size_t more = std::min(block_bytes - held, bytes.size());
    std::memcpy(rest_.data() + held, bytes.data(), more);
    bytes = bytes.subspan(more);
    if (held + more != block_bytes) return *this;
    add_block(lanes_, rest_.data());
  }
  Lanes lanes = lanes_;  // a copy, which the compiler keeps in registers
  const std::byte* block = bytes.data();
  const std::byte* const end = block + bytes.size() / block_bytes * block_bytes;
  for (; block != end; block += block_bytes) add_block(lanes, block);
  lanes_ = lanes;
  if (bytes.size() % block_bytes != 0) std::memcpy(rest_.data(), end, bytes.size() % block_bytes);
  return *this;
}

LOCKSTEP_INLINE std::uint64_t Checksum::value() const {
  Lanes lanes = lanes_;
  if (const std::size_t held = length_ % block_bytes; held != 0) {
    std::array<std::byte, block_bytes> last{};  // padded with zeros; `length_` distinguishes them
    std::memcpy(last.data(), rest_.data(), held);
    add_block(lanes, last.data());
  }
  std::uint64_t value = mix_bits(length_);
  for (const std::uint64_t lane : lanes) value = mix_bits((value ^ lane) + golden_step);
  return value;
}

LOCKSTEP_INLINE std::optional<std::uint64_t> checksum_from(std::string_view text) {
  std::uint64_t checksum = 0;
  std::from_chars(text.data(), text.data() + text.size(), checksum, 16);
  return checksum_text(checksum) == text ? std::optional(checksum) : std::nullopt;
}

LOCKSTEP_INLINE bool is_utf8(std::string_view text) {
  std::size_t size = 1;
  for (; !text.empty() && size != 0; text.remove_prefix(size)) size = utf8_size(text);
  return size != 0;
}

/// A recursive-descent parser. Errors name the text and the byte.
class JsonParser {
 public:
  JsonParser(std::string_view text, std::string_view whose, std::size_t most)
      : text_(text), whose_(whose), left_(most) {}

  Json all() {
    Json json = value(1);
    peek();
    if (offset_ != text_.size()) fail("something follows the end");
    return json;
  }

 private:
  [[noreturn, gnu::cold]] void fail(std::string_view problem) const {
    detail::fail("checkpoint", {whose_, ": ", problem, " at byte ", offset_},
                 "the file is damaged or no such file: copy it again, or take another");
  }

  /// The next character after whitespace; 0 at the end.
  char peek() {
    offset_ = std::min(text_.find_first_not_of(" \n\r\t", offset_), text_.size());
    return offset_ < text_.size() ? text_[offset_] : '\0';
  }
  void expect(char c, std::string_view problem) {
    if (peek() != c) fail(problem);
    ++offset_;
  }
  Json literal(std::string_view name, Json json) {
    if (!text_.substr(offset_).starts_with(name)) fail("a value should be here");
    offset_ += name.size();
    return json;
  }

  Json value(int depth) {
    if (depth > Json::most_depth) fail("brackets are too deep");
    if (left_-- == 0) fail("there are too many values");
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return {string()};
      case 't':
        return literal("true", {true});
      case 'f':
        return literal("false", {false});
      case 'n':
        return literal("null", {});
      default:
        return number();
    }
  }

  /// Consumes the closing bracket, or the comma before another item.
  bool has_next(char close, bool is_first) {
    if (peek() == close) {
      ++offset_;
      return false;
    }
    if (!is_first) expect(',', "a comma or a closing bracket is missing");
    return true;
  }
  Json array(int depth) {
    Json::Array items;
    ++offset_;
    while (has_next(']', items.empty())) items.push_back(value(depth + 1));
    return {std::move(items)};
  }
  Json object(int depth) {
    Json::Object members;
    ++offset_;
    while (has_next('}', members.empty())) {
      if (peek() != '"') fail("a member's name is missing");
      std::string name = string();
      expect(':', "a colon is missing");
      members.emplace_back(std::move(name), value(depth + 1));
    }
    std::vector<std::string_view> names;
    for (const Json::Member& member : members) names.push_back(member.first);
    std::ranges::sort(names);
    if (const auto twice = std::ranges::adjacent_find(names); twice != names.end())
      fail(detail::text({"an object has the name '", *twice, "' twice and ends"}));
    return {std::move(members)};
  }

  /// The four hexadecimal digits of `\u`.
  unsigned escaped_unit() {
    unsigned unit = 0;
    if (text_.size() - offset_ < 4) fail("the text ends within an escape");
    const char* const end = text_.data() + offset_ + 4;
    const auto [stop, error] = std::from_chars(text_.data() + offset_, end, unit, 16);
    if (error != std::errc() || stop != end) fail("an escape is no four digits");
    offset_ += 4;
    return unit;
  }
  void append_escaped(std::string& out) {
    constexpr std::string_view escapes = "\"\\/bfnrt";
    constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
    const char c = offset_ < text_.size() ? text_[offset_++] : '\0';
    if (const std::size_t known = escapes.find(c); known != std::string_view::npos) {
      out += meanings[known];
      return;
    }
    if (c != 'u') fail("an escape is unknown");
    unsigned code = escaped_unit();
    if (code >= 0xd800 && code < 0xe000) {  // a surrogate pair is one character
      const bool has_low = code < 0xdc00 && text_.substr(offset_).starts_with("\\u");
      offset_ += has_low ? 2 : 0;
      const unsigned low = has_low ? escaped_unit() : 0;
      if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair stands alone");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    // The lead byte encodes how many bytes follow, with six bits each.
    const int more = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    constexpr unsigned leads[] = {0, 0xc0, 0xe0, 0xf0};
    out += static_cast<char>(leads[more] | code >> (6 * more));
    for (int i = more; i-- > 0;) out += static_cast<char>(0x80 | (code >> (6 * i) & 0x3f));
  }
  std::string string() {
    std::string out;
    for (++offset_; offset_ < text_.size();) {
      const char c = text_[offset_];
      if (static_cast<unsigned char>(c) < 0x20) fail("a text holds a control character");
      if (c == '"' || c == '\\') {
        ++offset_;
        if (c == '"') return out;
        append_escaped(out);
        continue;
      }
      const std::size_t size = utf8_size(text_.substr(offset_));
      if (size == 0) fail("a text is not UTF-8");
      out.append(text_, offset_, size);
      offset_ += size;
    }
    fail("a text has no end");
  }

  /// Numbers without a point or an exponent are exact integers, except -0.
  Json number() {
    std::size_t end = offset_;
    const auto digits = [&] {
      const std::size_t begin = end;
      end = std::min(text_.find_first_not_of("0123456789", end), text_.size());
      return end - begin;
    };
    const auto skip = [&](std::string_view any) {
      const bool is_here = end < text_.size() && any.find(text_[end]) != std::string_view::npos;
      end += is_here ? 1 : 0;
      return is_here;
    };
    const bool is_negative = skip("-");
    const std::size_t first = end;
    const std::size_t whole = digits();
    if (whole == 0) fail("a number should be here");
    if (whole > 1 && text_[first] == '0') fail("a number begins with a zero");
    const bool has_point = skip(".");
    if (has_point && digits() == 0) fail("a number ends with its point");
    const bool has_exponent = skip("eE");
    if (has_exponent) skip("+-");
    if (has_exponent && digits() == 0) fail("a number has no exponent");
    const auto parse = [&](auto value) -> Json {
      if (std::from_chars(text_.data() + offset_, text_.data() + end, value).ec != std::errc())
        fail("a number is out of range");
      offset_ = end;
      return {value};
    };
    const bool is_minus_zero = is_negative && whole == 1 && text_[first] == '0';
    if (has_point || has_exponent || is_minus_zero) return parse(double{});
    return is_negative ? parse(std::int64_t{}) : parse(std::uint64_t{});
  }

  std::string_view text_;
  std::string_view whose_;
  std::size_t offset_ = 0;
  std::size_t left_;  // values
};

LOCKSTEP_INLINE Json Json::parse(std::string_view text, std::string_view whose, std::size_t most) {
  return JsonParser(text, whose, most).all();
}

LOCKSTEP_INLINE void JsonEntry::fail(std::string_view problem) const {
  detail::fail("checkpoint",
               {"'", file_, "': ", name_.empty() ? "its 'lockstep' entry" : name_, " ", problem},
               "the file is damaged, or another version has made it: take another checkpoint");
}

LOCKSTEP_INLINE void JsonEntry::fail_kind(std::string_view expected) const {
  constexpr std::string_view kinds[] = {"null",
                                        "true or false",
                                        "a whole number",
                                        "a negative number",
                                        "a number with a fraction or an exponent",
                                        "a text",
                                        "an array",
                                        "an object"};
  fail(detail::text({"is ", kinds[json_->value.index()], " instead of ", expected}));
}

LOCKSTEP_INLINE std::int64_t JsonEntry::integer() const {
  if (const auto* const negative = get_if<std::int64_t>()) return *negative;
  if (!std::in_range<std::int64_t>(natural())) fail("is too large a number");
  return static_cast<std::int64_t>(natural());
}

LOCKSTEP_INLINE double JsonEntry::real() const {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (const auto* const real = get_if<double>()) return *real;
  if (const auto* const whole = get_if<std::uint64_t>()) return static_cast<double>(*whole);
  if (const auto* const less = get_if<std::int64_t>()) return static_cast<double>(*less);
  if (const auto* const text = get_if<std::string>()) {
    if (*text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (*text == "inf") return infinity;
    if (*text == "-inf") return -infinity;
  }
  fail_kind("a number");
}

}  // namespace lockstep::detail
