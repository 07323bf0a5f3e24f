// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The file of `file:///path`: where rank 0 says at which address, and with which secret, the
/// job's store is to be found.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"
#include "lockstep/core/thread.hpp"
#include "lockstep/launch/store_connection.hpp"

namespace lockstep::detail {

/// Written whole under another name and then renamed, readable by its owner only, removed when the
/// job ends. A file that an earlier job has left behind does no harm: the secret in it is random,
/// so no store answers to it, and a rank that has read it reads again until rank 0 has replaced it.
/// The file of a job that still runs is an error on rank 0.
class RendezvousFile {
 public:
  struct Contents {
    std::string host;
    std::uint16_t port = 0;
    std::string secret;
  };

  RendezvousFile(std::string path, const Contents& contents) : path_(std::move(path)) {
    const std::string temporary = text({path_, ".", random_id()});
    const Descriptor file(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    text_ = text({title, "\n", contents.host, "\n", contents.port, "\n", contents.secret, "\n"});
    if (!file || !write_all(file.get(), text_) ||
        std::rename(temporary.c_str(), path_.c_str()) != 0) {
      const std::string why = error_text(errno);
      ::unlink(temporary.c_str());
      fail("join", {"rank 0 cannot write ", path_, ": ", why},
           "give file:// a path in a folder that rank 0 may write to", Rank{0});
    }
  }

  RendezvousFile(RendezvousFile&& other) noexcept
      : path_(std::exchange(other.path_, {})), text_(std::move(other.text_)) {}
  RendezvousFile& operator=(RendezvousFile&&) = delete;

  ~RendezvousFile() {
    // Another job may have replaced the file by its own.
    if (!path_.empty() && read_file(path_.c_str()) == text_) ::unlink(path_.c_str());
  }

  /// The path, and the host by which rank 0 is known, out of `/path` or `/path?host=name`. Without
  /// a name all ranks are on one host.
  static std::pair<std::string, std::string> parse(std::string_view text) {
    const std::size_t query = text.find("?host=");
    std::string host = "127.0.0.1";
    if (query != std::string_view::npos) {
      host = text.substr(query + 6);
      text = text.substr(0, query);
    }
    if (text.size() < 2 || text.front() != '/' || host.empty()) {
      fail("join", {"'file://", text, "' names no file"},
           "write file:///absolute/path, or file:///absolute/path?host=name-of-rank-0's-host");
    }
    return {std::string(text), host};
  }

  /// Waits for a file whose store answers, and returns its contents.
  static Contents wait(const std::string& path, Rank rank, std::chrono::milliseconds timeout) {
    const Deadline deadline = Deadline::after(timeout);
    std::string why;
    do {
      if (auto contents = read(path, why)) {
        const SipKey key = derive_key(contents->secret);
        if (connect_to_store(contents->host, contents->port, key, deadline, why)) {
          return *std::move(contents);
        }
      }
      sleep_for(std::chrono::milliseconds(10));
    } while (!deadline.passed());
    fail("join",
         {"rank 0 did not open a store through ", path, " within ", seconds_text(timeout), " (",
          why, ")"},
         "check that rank 0 runs, as the same user, and was given the same file", rank);
  }

  /// Throws if the file is that of a running job, or no rendezvous file at all.
  static void check_unused(const std::string& path) {
    std::string why;
    const std::string found = read_file(path.c_str());
    if (!found.empty() && !found.starts_with(title)) {
      fail("join", {path, " exists and is not a file of lockstep's"},
           "give file:// the path of a file that does not exist yet", Rank{0});
    }
    const auto contents = read(path, why);
    if (!contents) return;
    const Deadline deadline = Deadline::after(std::chrono::seconds(1));
    if (connect_to_store(contents->host, contents->port, derive_key(contents->secret), deadline,
                         why)) {
      fail("join", {path, " is in use by another job"},
           "give every job a file of its own, or wait until that job has ended", Rank{0});
    }
  }

 private:
  static constexpr std::string_view title = "lockstep rendezvous 1";

  /// Only a file of this user is accepted, because the folder may be /tmp.
  static std::optional<Contents> read(const std::string& path, std::string& why) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat status{};
    if (!file || ::fstat(file.get(), &status) != 0) {
      why = error_text(errno);
      return std::nullopt;
    }
    if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) {
      why = "it belongs to another user";
      return std::nullopt;
    }
    const std::string bytes = read_all(file.get());
    std::string_view lines[4];  // the title, the host, the port, the secret
    std::size_t begin = 0;
    for (std::string_view& line : lines) {
      const std::size_t end = bytes.find('\n', begin);
      if (end == std::string::npos) break;
      line = std::string_view(bytes).substr(begin, end - begin);
      begin = end + 1;
    }
    if (lines[0] != title || lines[3].empty()) {
      why = "it is not a file of lockstep's";
      return std::nullopt;
    }
    return Contents{std::string(lines[1]), parse_port(path, lines[2]), std::string(lines[3])};
  }

  std::string path_;
  std::string text_;
};

}  // namespace lockstep::detail
