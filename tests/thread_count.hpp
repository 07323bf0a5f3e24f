// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The number of threads of this process.

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

/// Without those that are ending: a thread that was joined is listed for another moment, in which
/// the kernel's flag PF_EXITING is set.
inline std::size_t thread_count() {
  constexpr unsigned long exiting = 0x4;
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    std::string stat;
    std::getline(file, stat, '\0');  // where the thread ends meanwhile, reading fails, too
    const std::size_t name = stat.rfind(')');
    if (name == std::string::npos) continue;
    // State, parent, group, session, terminal, the terminal's group, flags: proc(5).
    std::istringstream fields(stat.substr(name + 1));
    std::string before;
    unsigned long flags = 0;
    for (int i = 0; i != 6; ++i) fields >> before;
    fields >> flags;
    count += (flags & exiting) == 0 ? 1 : 0;
  }
  return count;
}
