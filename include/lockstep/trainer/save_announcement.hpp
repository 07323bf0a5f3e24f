// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What ranks tell each other before they save.

#include <string>
#include <string_view>

#include "lockstep/trainer/joint_work.hpp"

namespace lockstep::detail {

struct SaveAnnouncement {
  std::string_view path;
  std::string_view token;  // of the names of shards; rank 0's counts
  std::string_view values;
  bool is_busy = false;
  bool has_tensors = false;  // does this rank write a file?

  std::string packed() const {
    std::string text{is_busy ? '1' : '0', has_tensors ? '1' : '0'};
    for (const std::string_view piece : {path, token, values}) append_sized(text, piece);
    return text;
  }
  explicit SaveAnnouncement(std::string_view text)
      : is_busy(text[0] == '1'), has_tensors(text[1] == '1') {
    text.remove_prefix(2);
    path = take_sized(text);
    token = take_sized(text);
    values = take_sized(text);
  }
  SaveAnnouncement() = default;
};

}  // namespace lockstep::detail
