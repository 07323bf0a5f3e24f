// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A file that is read where the kernel keeps it: mapped, never copied as a whole.

#include <ctime>

#include "lockstep/core/file.hpp"

namespace lockstep {

/// In which order a file will be read, which decides what the kernel reads ahead.
enum class Access : std::uint8_t {
  automatic,   ///< `random` where the file is larger than half of the memory, else `usual`
  usual,       ///< the kernel decides: right for files that fit into memory
  random,      ///< no more is read than what was asked for, and a batch's parts all at once
  sequential,  ///< from front to back: much is read ahead
};

/// A whole file, mapped for reading. Any number of threads read it, and ranks that are forked from
/// this process go on reading it; the ranks of a host share its pages.
///
/// Another file that takes its place by a rename changes nothing here: the old one stays until it
/// is unmapped. A file that is cut short or written to in its place is an error at the next
/// `require_intact`.
class MappedFile {
 public:
  /// `operation` is what errors say that they happened in.
  explicit MappedFile(const std::string& path, Access access = Access::automatic,
                      std::string_view operation = "MappedFile");

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {mapping_.get(), size()}; }
  std::size_t size() const { return mapping_.get_deleter().size; }

  /// Throws where the file has another size or was written to since it was mapped. Readers call it
  /// before every batch: what lies behind a file's end can be asked for, but the answer is SIGBUS,
  /// which ends the process without a word. (A file that is cut short between this call and the
  /// reading still does that, and a change within the clock tick of the opening may go unseen: the
  /// window is microseconds instead of the whole job.)
  void require_intact() const;

  /// Throws what `require_intact` throws for a file that has so many bytes now: as many as before
  /// were written to.
  [[noreturn, gnu::cold]] void fail_changed(std::size_t bytes) const;

  /// Whether the parts that will be read should be announced.
  bool reads_at_random() const { return access_ == Access::random; }

  /// Lets the kernel begin to read these bytes, so that the parts of a batch come at once and not
  /// one after the other.
  void will_read(std::size_t first, std::size_t count) const;

 private:
  struct Unmap {
    std::size_t size;
    void operator()(const std::byte* bytes) const;
  };

  std::string path_;
  std::string operation_;
  detail::Descriptor file_;
  std::unique_ptr<const std::byte, Unmap> mapping_;
  std::timespec written_{};  ///< when it was last written to, as far as the file system says
  Access access_;
};

}  // namespace lockstep
