// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Descriptors, atomic writes of files, folders, errors of file access, limits on open files.

#include <atomic>

#include "lockstep/detail/core/bytes.hpp"
#include "lockstep/detail/core/deadline.hpp"

namespace lockstep::detail {

/// Counts reads, writes and syncs of large files. If it stands still, the process hangs in storage.
inline std::atomic<std::uint64_t>& storage_progress() {
  static std::atomic<std::uint64_t> count{0};
  return count;
}

inline void note_storage_progress() { storage_progress().fetch_add(1, std::memory_order_relaxed); }

/// Owns a file descriptor, which is close-on-exec: programs that a rank starts do not inherit it.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }

  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }

  void close();

 private:
  int fd_ = -1;
};

std::string host_name();
/// The path of this program's file; empty where the system does not say it.
std::string own_program();

/// The message for an errno value; thread-safe, unlike strerror.
std::string error_text(int error);

struct Pipe {
  Descriptor read;
  Descriptor write;
};

Pipe make_pipe();

/// Takes over the pipe inherited as `fd`, and makes it close-on-exec; empty where `fd` is no pipe.
Descriptor inherited_pipe(int fd);

void make_nonblocking(int fd);

/// Waits until `fd` is ready for `events` or has failed; false after the deadline.
bool wait_ready(int fd, short events, Deadline deadline);

/// Writes everything to a blocking descriptor; false on failure, such as a closed pipe.
bool write_all(int fd, std::string_view bytes);

/// Reads a blocking descriptor to its end.
std::string read_all(int fd);

/// The contents of a file; empty where it cannot be read.
std::string read_file(const char* path);

/// A temporary file is named after its file, with `.tmp-` and a random token appended.
inline constexpr std::string_view temporary_infix = ".tmp-";

/// Removes the temporary files being written, so that their `commit` fails. Thread-safe.
void remove_temporary_files();

/// The size of the write buffer, a multiple of every element's size.
inline constexpr std::size_t write_chunk_bytes = 1_MiB;

/// Writes a temporary file, which `commit` renames or the destructor removes: `path` stays whole.
class TemporaryFile {
 public:
  /// Reserves `bytes` at once, where the file system supports that.
  TemporaryFile(std::string_view operation, const std::string& path, std::uint64_t bytes);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { remove(); }

  /// Writes at the end of the last `append`, or at the offset of the last `seek`.
  void append(std::span<const std::byte> bytes);
  void seek(std::uint64_t offset) {
    flush();
    offset_ = offset;
  }

  /// Syncs the file, renames it to `path` and syncs the folder.
  void commit();

 private:
  void write(std::span<const std::byte> bytes);
  void flush() {
    write(buffer_);
    buffer_.clear();
  }
  void forget();
  void remove();
  [[noreturn]] void fail_now(int error);

  std::string operation_;
  std::string path_;
  std::string temporary_;
  Descriptor file_;
  std::uint64_t offset_ = 0;
  std::uint64_t started_ = 0;
  std::vector<std::byte> buffer_;  // less than a chunk
};

/// Syncs the folder of a path, so that a new name is durable.
void sync_folder_of(std::string_view operation, const std::string& path);

/// Creates a folder and its parents unless it exists. Returns whether it was created.
bool make_folder(std::string_view operation, const std::string& folder);

/// The time in UTC, in a format of strftime.
std::string utc_text(const char* format);

/// The owner of a lock: "process 12 on host, /program, since 2026-01-31 12:00:00 UTC".
std::string owner_text();

/// The folder of a path, "." where it has none, and the name within that folder.
std::string folder_of(std::string_view path);
inline std::string_view name_in_folder(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

/// Throws an `Error` with the file, the reason, and advice for this errno value.
[[noreturn, gnu::cold]] void fail_writing(std::string_view operation, std::string_view path,
                                          int error);
[[noreturn, gnu::cold]] void fail_reading(std::string_view operation, std::string_view path,
                                          int error);

/// How many paths match a pattern of the shell.
std::size_t count_paths(const char* pattern);

std::size_t open_files();

/// Raises the soft limit on open files for `more` of them, also for child processes. Throws if the
/// hard limit is too low, and names `whose` and `ranks`. Returns how many more can be opened.
std::size_t allow_open_files(std::size_t more, const char* whose, std::size_t ranks);

/// The same for files that are optional: never throws.
std::size_t prefer_open_files(std::size_t more);

/// Random bytes from the operating system, for ids and secrets.
std::string random_bytes(std::size_t count);

/// 32 random hexadecimal digits.
std::string random_id();
/// 16 of them, for unique names.
inline std::string random_token() { return random_id().substr(16); }

}  // namespace lockstep::detail
