// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of `best_copy.hpp`.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <vector>

#include "lockstep/checkpoint/best_copy.hpp"
#include "lockstep/checkpoint/folder_names.hpp"
#include "lockstep/checkpoint/safetensors_file.hpp"
#include "lockstep/checkpoint/write_file.hpp"
#include "lockstep/core/checksum.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/file.hpp"

namespace lockstep::detail {

/// A number that tells checkpoints apart: the checksum of the header, which holds those of all
/// tensors. Nothing where there is no such file, or lockstep did not write it.
LOCKSTEP_INLINE std::optional<std::uint64_t> header_digest(const std::string& path) {
  try {
    return SafetensorsFile(path).digest();
  } catch (const Error&) {
    return std::nullopt;
  }
}

/// A line of `best.score`: which checkpoint, its score, and the score's name.
LOCKSTEP_INLINE std::string best_score_line(std::uint64_t digest, double score,
                                            std::string_view name) {
  char number[32];
  const auto end = std::to_chars(number, number + sizeof number, score).ptr;
  return text({checksum_text(digest), " ",
               std::string_view(number, static_cast<std::size_t>(end - number)), " ", name, "\n"});
}

LOCKSTEP_INLINE std::string best_score_path(const std::string& folder) {
  return text({folder, "/best.score"});
}

LOCKSTEP_INLINE std::optional<double> read_best_score(const std::string& folder,
                                                      std::string_view name) {
  const auto digest = header_digest(text({folder, "/", best_checkpoint_name}));
  if (!digest) return std::nullopt;
  const std::string lines = read_file(best_score_path(folder).c_str());
  for (std::string_view rest = lines; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (line.size() < 18) continue;
    const std::string_view after = line.substr(17);
    double score = 0;
    const auto [end, error] = std::from_chars(after.data(), after.data() + after.size(), score);
    // The line that this score would have been written as, so nothing else is taken for it.
    if (error != std::errc{} || text({line, "\n"}) != best_score_line(*digest, score, name)) {
      continue;
    }
    return score;
  }
  return std::nullopt;
}

[[noreturn]] LOCKSTEP_INLINE void fail_best_copy(const std::string& path, int error) {
  fail("checkpoints", {"'", path, "' cannot be written: ", error_text(error)},
       "make room there, or see whether the folder may still be written");
}

/// A file that is removed unless it has been renamed.
class ReplacementFile {
 public:
  explicit ReplacementFile(const std::string& target)
      : target_(target), path_(text({target, temporary_infix, random_token()})) {}
  ~ReplacementFile() { ::unlink(path_.c_str()); }  // where rename found one file twice, it stays
  ReplacementFile(const ReplacementFile&) = delete;
  ReplacementFile& operator=(const ReplacementFile&) = delete;

  const std::string& path() const { return path_; }

  Descriptor create() const {
    Descriptor file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!file) fail_best_copy(path_, errno);
    return file;
  }

  /// Puts the file in its place, and sees to it that both outlast a loss of power.
  void commit(const std::string& folder) const {
    if (::rename(path_.c_str(), target_.c_str()) != 0) fail_best_copy(target_, errno);
    const Descriptor entries(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Some file systems cannot sync a folder; those keep names without being asked.
    if (entries && ::fsync(entries.get()) != 0 && errno != EINVAL) fail_best_copy(target_, errno);
  }

 private:
  std::string target_;
  std::string path_;
};

/// Copies a file, for file systems without hard links.
LOCKSTEP_INLINE void copy_file(const std::string& from, const ReplacementFile& to) {
  const Descriptor source(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  if (!source) fail_best_copy(from, errno);
  const Descriptor target = to.create();
  std::vector<char> buffer(std::size_t{1} << 20);
  for (;;) {
    const ssize_t n = ::read(source.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_best_copy(from, errno);
    if (n == 0) break;
    const std::string_view piece(buffer.data(), static_cast<std::size_t>(n));
    if (!write_all(target.get(), piece)) fail_best_copy(to.path(), errno);
  }
  if (::fsync(target.get()) != 0) fail_best_copy(to.path(), errno);
}

LOCKSTEP_INLINE void replace_best_copy(const std::string& folder, const std::string& checkpoint,
                                       std::string_view name, double score) {
  const auto digest = header_digest(checkpoint);
  if (!digest) {
    fail("checkpoints", {"'", checkpoint, "' cannot be made the best copy: it is no checkpoint"},
         "see whether another program has changed the folder");
  }
  const std::string best = text({folder, "/", best_checkpoint_name});
  std::string lines = best_score_line(*digest, score, name);
  const auto digest_before = header_digest(best);
  const auto score_before = read_best_score(folder, name);
  if (score_before && digest_before) lines += best_score_line(*digest_before, *score_before, name);
  {
    const ReplacementFile scores(best_score_path(folder));
    const Descriptor file = scores.create();
    if (!write_all(file.get(), lines)) fail_best_copy(scores.path(), errno);
    if (::fsync(file.get()) != 0) fail_best_copy(scores.path(), errno);
    scores.commit(folder);
  }
  const ReplacementFile copy(best);
  if (::link(checkpoint.c_str(), copy.path().c_str()) != 0) {
    if (errno == ENOENT) fail_best_copy(checkpoint, errno);
    copy_file(checkpoint, copy);
  }
  copy.commit(folder);
}

}  // namespace lockstep::detail
