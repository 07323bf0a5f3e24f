// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Files: an open one, socket or pipe, which closes itself; one that is written so that,
/// whatever happens, there is the old file or the new one; folders that several processes write
/// into; what is said where a file cannot be read or written; and how many may be open.

#include <atomic>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/deadline.hpp"

namespace lockstep::detail {

/// A count that every read, write and sync of a large file raises. A process whose count stands
/// still for long is stuck in its storage. Any thread may raise it.
inline std::atomic<std::uint64_t>& storage_progress() {
  static std::atomic<std::uint64_t> count{0};
  return count;
}

inline void note_storage_progress() { storage_progress().fetch_add(1, std::memory_order_relaxed); }

/// Owns a file descriptor. Everything this library opens is close-on-exec: a rank that starts
/// another program must not hand it the job's sockets.
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

/// The meaning of an errno value. Unlike strerror, it is safe with threads.
std::string error_text(int error);

struct Pipe {
  Descriptor read;
  Descriptor write;
};

Pipe make_pipe();

/// A pipe that this process has inherited, by its number; empty where there is none. Programs that
/// this process starts do not inherit it.
Descriptor inherited_pipe(int fd);

void make_nonblocking(int fd);

/// Waits until `fd` is ready for `events` or has failed. False when the time is over.
bool wait_ready(int fd, short events, Deadline deadline);

/// Writes everything to a blocking descriptor; false when its reader has gone.
bool write_all(int fd, std::string_view bytes);

/// Reads a blocking descriptor to its end.
std::string read_all(int fd);

/// The contents of a file; empty where it cannot be read.
std::string read_file(const char* path);

/// What the names of temporaries have behind the name of the file: `.tmp-` and random digits.
inline constexpr std::string_view temporary_infix = ".tmp-";

/// 16 random hexadecimal digits: names that no file has yet.
std::string random_token();

/// Removes the temporaries that this process is writing, because it gives up on its storage: a
/// `TemporaryFile` whose file is gone fails to commit. Any thread may call it.
void remove_temporary_files();

/// What is collected before it is written. It is a multiple of every element's size.
inline constexpr std::size_t write_chunk_bytes = 1_MiB;

/// A file beside `path` that `commit` brings into its place, and that is removed again otherwise.
/// Errors are in words, and name the operation.
class TemporaryFile {
 public:
  /// Room for `bytes` is reserved at once, where the file system can.
  TemporaryFile(std::string_view operation, const std::string& path, std::uint64_t bytes);
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { remove(); }

  /// Writes behind what was appended before, or at the place of the last `seek`.
  void append(std::span<const std::byte> bytes);
  void seek(std::uint64_t place);

  /// Syncs the file, renames it to `path` and syncs the folder.
  void commit();

 private:
  void write(std::span<const std::byte> bytes);
  void flush();
  void forget();
  void remove();
  [[noreturn]] void fail_now(int error);

  std::string operation_;
  std::string path_;
  std::string temporary_;
  Descriptor file_;
  std::uint64_t place_ = 0;
  std::uint64_t started_ = 0;
  std::vector<std::byte> buffer_;  // less than a chunk
};

/// Syncs the folder that a path is in, so that a new name stays.
void sync_folder_of(std::string_view operation, const std::string& path);

/// Makes a folder, and those that it is in, unless it exists. Returns whether it was made.
bool make_folder(std::string_view operation, const std::string& folder);

/// The time now, as strftime writes it.
std::string utc_text(const char* format);

/// Who this process is, for whoever waits for what it has locked: "process 12 on host, /program,
/// since 2026-01-31 12:00:00 UTC".
std::string owner_text();

/// The folder a path is in, "." where it names none; and the name within it.
std::string folder_of(std::string_view path);
std::string_view name_in_folder(std::string_view path);

/// Throws: which file, which system call's work, why, and what to do about it.
[[noreturn, gnu::cold]] void fail_writing(std::string_view operation, std::string_view path,
                                          int error);
[[noreturn, gnu::cold]] void fail_reading(std::string_view operation, std::string_view path,
                                          int error);

/// How many descriptors this process has open.
std::size_t open_files();

/// Lets this process open `more` files beside those that it has: raises the soft limit
/// (RLIMIT_NOFILE) if that is lower, no further than needed. Throws if the hard limit is too low;
/// `whose` says what needs them: "the store of a job of 2000 ranks". Programs that this process
/// starts inherit the limit. Returns how many it may open now.
std::size_t allow_open_files(std::size_t more, const char* whose, std::size_t ranks);

/// The same for files that are welcome but not needed: never throws.
std::size_t prefer_open_files(std::size_t more);

/// Random bytes from the system: job ids, secrets, nonces.
std::string random_bytes(std::size_t count);

/// 128 random bits as 32 hexadecimal digits.
std::string random_id();

}  // namespace lockstep::detail
