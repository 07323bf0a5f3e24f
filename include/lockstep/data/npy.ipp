// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `npy.hpp`.

#include <algorithm>
#include <array>
#include <bit>
#include <initializer_list>
#include <utility>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/npy.hpp"

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
