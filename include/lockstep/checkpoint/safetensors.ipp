// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `safetensors.hpp`.

#include <cerrno>

#include "lockstep/checkpoint/safetensors.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/launch/descriptor.hpp"

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

LOCKSTEP_INLINE std::string folder_of(std::string_view path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string_view::npos) return ".";
  return std::string(path.substr(0, slash == 0 ? 1 : slash));
}

LOCKSTEP_INLINE std::string_view name_in_folder(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

/// A system call that has failed on a file.
struct FileFault {
  std::string_view path;
  int error;

  [[noreturn]] void refuse(std::string_view problem, std::string_view advice) const {
    fail("checkpoint", {"'", path, "' ", problem, error_text(error)}, advice);
  }
};

LOCKSTEP_INLINE void fail_writing(std::string_view path, int error) {
  const std::string folder = folder_of(path);
  const FileFault file{path, error};
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      file.refuse("cannot be written: ",
                  "make room there, or save to another folder; what was saved before is untouched");
    case EROFS:
      file.refuse(
          "cannot be written: ",
          text({"mount '", folder, "' so that it may be written, or save to another folder"}));
    case ENOENT:
      file.refuse("cannot be written: ", text({"make the folder first: mkdir -p '", folder, "'"}));
    case ENOTDIR:
      file.refuse("cannot be written: ", text({"'", folder, "' is no folder: name one"}));
    case EISDIR:
      file.refuse("cannot be written: ", "name a file, not a folder");
    case EACCES:
    case EPERM:
      file.refuse("cannot be written: ",
                  text({"let this user write in '", folder, "', or save to another folder"}));
    case EIO:
    case ESTALE:
      file.refuse(
          "cannot be written: ",
          "the disk or the network behind it fails: see the kernel's log, and save elsewhere");
    case EFBIG:
      file.refuse("cannot be written: ",
                  "raise the limit on sizes of files (ulimit -f), or save to another file system");
    case EMFILE:
    case ENFILE:
      file.refuse("cannot be written: ", "raise the limit on open files (ulimit -n)");
    case ENAMETOOLONG:
      file.refuse("cannot be written: ", "give it a shorter name");
    default:
      file.refuse("cannot be written: ", "save to another folder");
  }
}

LOCKSTEP_INLINE void fail_reading(std::string_view path, int error) {
  const FileFault file{path, error};
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG:
      file.refuse("cannot be read: ", "check the path");
    case EISDIR:
      file.refuse("cannot be read: ", "name a file, not a folder");
    case EACCES:
    case EPERM:
      file.refuse("cannot be read: ", "let this user read it");
    case EMFILE:
    case ENFILE:
      file.refuse("cannot be read: ", "raise the limit on open files (ulimit -n)");
    default:
      file.refuse(
          "cannot be read: ",
          "the disk or the network behind it fails: see the kernel's log, take another file");
  }
}

LOCKSTEP_INLINE void fail_damaged(std::string_view path, std::string_view problem) {
  fail("checkpoint", {"'", path, "' is damaged or no safetensors file: ", problem},
       "copy it again, or take another");
}

}  // namespace lockstep::detail
