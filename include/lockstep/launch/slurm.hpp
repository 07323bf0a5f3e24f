// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Slurm's ways of writing lists of hosts and of task counts.

#include <cstddef>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// The first host of a list: `node[07-09,12],login` is node07, `rack[1-2]n[3-4]` is rack1n3.
inline std::string first_slurm_host(std::string_view list) {
  std::string host;
  bool inside = false;  // brackets
  bool chosen = false;  // the first alternative of these brackets has been taken
  for (char c : list) {
    if (c == '[') {
      inside = true;
      chosen = false;
    } else if (c == ']') {
      inside = false;
    } else if (inside) {
      if (c == ',' || c == '-') chosen = true;
      if (!chosen) host += c;
    } else if (c == ',') {
      break;
    } else {
      host += c;
    }
  }
  return host;
}

/// How many tasks a node has: `2(x3),1` is 2, 2, 2, 1.
inline std::size_t slurm_tasks_on(std::string_view name, std::string_view counts,
                                  std::size_t node) {
  const std::string_view whole = counts;
  std::size_t first = 0;
  while (!counts.empty()) {
    std::string_view item = counts.substr(0, counts.find(','));
    counts.remove_prefix(item.size() == counts.size() ? item.size() : item.size() + 1);
    std::size_t nodes = 1;
    if (const std::size_t times = item.find("(x"); times != std::string_view::npos) {
      std::string_view repeat = item.substr(times + 2);
      if (repeat.ends_with(')')) repeat.remove_suffix(1);
      nodes = parse_number(name, repeat);
      item = item.substr(0, times);
    }
    if (node < first + nodes) return parse_number(name, item);
    first += nodes;
  }
  fail("launch", {name, " is '", whole, "' and has no node ", node},
       "run the program with srun, which sets it");
}

}  // namespace lockstep::detail
