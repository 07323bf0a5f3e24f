// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which checks of a program are wanted, as its last argument says.

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gpu_test {

/// "all", or names with commas between them: a process and its communicator take longer to start
/// than most checks take. A name that the program does not have is an error, or a check that was
/// renamed would pass for ever.
class CheckNames {
 public:
  explicit CheckNames(std::string_view list) : all_(list == "all") {
    for (std::size_t at = 0; !all_ && at <= list.size();) {
      const std::size_t end = std::min(list.find(',', at), list.size());
      names_.push_back({std::string(list.substr(at, end - at)), false});
      at = end + 1;
    }
  }

  bool has_all() const { return all_; }

  /// Is this check named? One that ends the job is no part of all.
  bool names(std::string_view check) {
    bool found = false;
    for (Name& name : names_) {
      if (name.text != check) continue;
      found = true;
      name.known = true;
    }
    return found;
  }
  /// Is this check to be run?
  bool wants(std::string_view check) { return names(check) || all_; }

  /// After the last check.
  void require_known() const {
    for (const Name& name : names_)
      if (!name.known) throw std::runtime_error("there is no check '" + name.text + "'");
  }

 private:
  struct Name {
    std::string text;
    bool known;
  };
  bool all_;
  std::vector<Name> names_;
};

}  // namespace gpu_test
