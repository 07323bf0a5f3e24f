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
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "lockstep/launch/parse.hpp"
#include "lockstep/launch/store_connection.hpp"

namespace lockstep {

/// Written whole under another name and then renamed, readable by its owner only, removed when the
/// job ends. A file that an earlier job has left behind does no harm: the secret in it is random,
/// so no store answers to it, and who has read it reads again until rank 0 has replaced it. The
/// file of a job that still runs is an error on rank 0.
class RendezvousFile {
 public:
  struct Contents {
    std::string host;
    std::uint16_t port = 0;
    std::string secret;
  };

  RendezvousFile(std::string path, const Contents& contents) : path_(std::move(path)) {
    const std::string temporary = path_ + "." + random_id();
    const Descriptor file(
        ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
    text_ = std::string(title) + "\n" + contents.host + "\n" + std::to_string(contents.port) +
            "\n" + contents.secret + "\n";
    if (!file || !write_all(file.get(), text_) ||
        std::rename(temporary.c_str(), path_.c_str()) != 0) {
      const std::string why = error_text(errno);
      ::unlink(temporary.c_str());
      throw Error("join", "rank 0 cannot write " + path_ + ": " + why,
                  "give file:// a path in a folder that rank 0 may write to", Rank{0});
    }
  }

  RendezvousFile(RendezvousFile&& other) noexcept
      : path_(std::exchange(other.path_, {})), text_(std::move(other.text_)) {}
  RendezvousFile& operator=(RendezvousFile&&) = delete;

  ~RendezvousFile() {
    // Another job may have put its own in the place.
    if (!path_.empty() && read_text(path_) == text_) ::unlink(path_.c_str());
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
      throw Error(
          "join", "'file://" + std::string(text) + "' names no file",
          "write file:///absolute/path, or file:///absolute/path?host=name-of-rank-0's-host");
    }
    return {std::string(text), host};
  }

  /// The contents of a file behind which there is a store.
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
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    } while (!deadline.passed());
    throw Error("join",
                "rank 0 did not open a store through " + path + " within " + seconds_text(timeout) +
                    " (" + why + ")",
                "check that rank 0 runs, as the same user, and was given the same file", rank);
  }

  /// Refuses the file of a job that is running, and one that is something else altogether.
  static void check_unused(const std::string& path) {
    std::string why;
    const std::string text = read_text(path);
    if (!text.empty() && !text.starts_with(title)) {
      throw Error("join", path + " exists and is not a file of lockstep's",
                  "give file:// the path of a file that does not exist yet", Rank{0});
    }
    const auto contents = read(path, why);
    if (!contents) return;
    const Deadline deadline = Deadline::after(std::chrono::seconds(1));
    if (connect_to_store(contents->host, contents->port, derive_key(contents->secret), deadline,
                         why)) {
      throw Error("join", path + " is in use by another job",
                  "give every job a file of its own, or wait until that job has ended", Rank{0});
    }
  }

 private:
  static constexpr std::string_view title = "lockstep rendezvous 1";

  static std::string read_text(const std::string& path) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return file ? read_all(file.get()) : std::string();
  }

  /// Only what this user has written is believed: the folder may be /tmp.
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
    std::istringstream lines(read_all(file.get()));
    std::string first;
    std::string port;
    Contents contents;
    if (!std::getline(lines, first) || first != title || !std::getline(lines, contents.host) ||
        !std::getline(lines, port) || !std::getline(lines, contents.secret)) {
      why = "it is not a file of lockstep's";
      return std::nullopt;
    }
    contents.port = parse_port(path, port);
    return contents;
  }

  std::string path_;
  std::string text_;
};

}  // namespace lockstep
