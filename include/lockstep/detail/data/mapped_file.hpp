// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A memory-mapped file for reading.

#include <ctime>

#include "lockstep/detail/core/file.hpp"

namespace lockstep {

/// A whole file, mapped for threads and forked ranks, which share its pages. If a rename replaces
/// it, the mapping keeps the old file; a change is an error at the next `require_intact`.
class MappedFile {
 public:
  /// The kernel reads ahead by default unless the file is larger than half of the memory.
  explicit MappedFile(const std::string& path, std::string_view operation = "MappedFile",
                      std::optional<bool> reads_ahead = {});

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {mapping_.get(), size()}; }
  std::size_t size() const { return size_; }

  /// Throws if the file has another size or was written to since it was mapped. Readers call it
  /// before every batch: access behind the end of a truncated file raises SIGBUS, as a truncation
  /// between this call and the access still does. A change within the opening's tick is missed.
  void require_intact() const;

  /// Throws the error of `require_intact` for a file that now has so many bytes.
  [[noreturn, gnu::cold]] void fail_changed(std::size_t bytes) const;

  /// Should `will_read` be called before parts are read?
  bool reads_at_random() const { return reads_at_random_; }

  /// Asks the kernel to read these bytes ahead, so that the parts of a batch are read concurrently.
  void will_read(std::size_t first, std::size_t count) const;

 private:
  std::string path_;
  std::string operation_;
  detail::Descriptor file_;
  std::shared_ptr<const std::byte> mapping_;
  std::size_t size_ = 0;
  std::timespec written_{};  ///< modification time when the file was mapped
  bool reads_at_random_ = false;
};

}  // namespace lockstep
