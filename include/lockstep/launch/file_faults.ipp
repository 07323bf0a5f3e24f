// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `file_faults.hpp`.

#include <cerrno>

#include "lockstep/core/error.hpp"
#include "lockstep/launch/descriptor.hpp"
#include "lockstep/launch/file_faults.hpp"

namespace lockstep::detail {

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
  std::string_view operation;
  std::string_view path;
  int error;

  [[noreturn]] void refuse(std::string_view problem, std::string_view advice) const {
    fail(operation, {"'", path, "' ", problem, error_text(error)}, advice);
  }
};

LOCKSTEP_INLINE void fail_writing(std::string_view operation, std::string_view path, int error) {
  const std::string folder = folder_of(path);
  const FileFault file{operation, path, error};
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

LOCKSTEP_INLINE void fail_reading(std::string_view operation, std::string_view path, int error) {
  const FileFault file{operation, path, error};
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

}  // namespace lockstep::detail
