// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Bytes that never change, in memory or in a mapped file.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/data/mapped_file.hpp"

namespace lockstep {

/// Bytes of a vector, or of a mapped file from a place to its end. Copies share them.
class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(std::vector<std::uint8_t> bytes)
      : memory_(std::make_shared<const std::vector<std::uint8_t>>(std::move(bytes))),
        bytes_(*memory_) {}
  SharedBytes(std::shared_ptr<const MappedFile> file, std::size_t first) : file_(std::move(file)) {
    const std::span<const std::byte> all = file_->bytes().subspan(first);
    bytes_ = {reinterpret_cast<const std::uint8_t*>(all.data()), all.size()};
  }

  const std::uint8_t* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  std::uint8_t operator[](std::size_t i) const { return bytes_[i]; }
  auto begin() const { return bytes_.begin(); }
  auto end() const { return bytes_.end(); }

  bool is_mapped() const { return file_ != nullptr; }

  /// Throws where a mapped file has changed since.
  void require_intact() const {
    if (file_) file_->require_intact();
  }

  /// Where the file is read at random, lets the kernel begin to read these bytes.
  void will_read(std::size_t first, std::size_t count) const {
    if (file_ && file_->reads_at_random())
      file_->will_read(file_->size() - bytes_.size() + first, count);
  }

 private:
  std::shared_ptr<const std::vector<std::uint8_t>> memory_;
  std::shared_ptr<const MappedFile> file_;
  std::span<const std::uint8_t> bytes_;
};

}  // namespace lockstep
