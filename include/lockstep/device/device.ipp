// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Definitions of this folder.

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

#include "lockstep/core/text.hpp"
#include "lockstep/device/numa.hpp"

namespace lockstep::detail {

/// Room for 8192 cores.
using CoreSets = std::array<cpu_set_t, 8>;

LOCKSTEP_INLINE Cores parse_cores(std::string_view list) {
  Cores cores;
  const auto number = [&](std::size_t& value) {
    const auto [end, error] = std::from_chars(list.data(), list.data() + list.size(), value);
    if (error != std::errc{}) return false;
    list.remove_prefix(static_cast<std::size_t>(end - list.data()));
    return true;
  };
  std::size_t first = 0;
  while (number(first)) {
    std::size_t last = first;
    if (list.starts_with('-')) {
      list.remove_prefix(1);
      if (!number(last)) return {};
    }
    for (; first <= last; ++first) cores.push_back(first);
    if (!list.starts_with(',')) break;
    list.remove_prefix(1);
  }
  return cores;
}

LOCKSTEP_INLINE std::string cores_text(const Cores& cores) {
  std::string list;
  for (std::size_t i = 0; i < cores.size();) {
    std::size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!list.empty()) list += ",";
    list += std::to_string(cores[i]);
    if (last != i) list.append("-").append(std::to_string(cores[last]));
    i = last + 1;
  }
  return list;
}

LOCKSTEP_INLINE Cores allowed_cores() {
  CoreSets sets{};
  Cores cores;
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return cores;
  for (std::size_t core = 0; core < sizeof sets * 8; ++core)
    if (CPU_ISSET_S(core, sizeof sets, sets.data())) cores.push_back(core);
  return cores;
}

LOCKSTEP_INLINE std::optional<NumaPlace> numa_place(const std::string& sysfs,
                                                    std::string_view bus_id, const Cores& allowed) {
  const auto first_line = [&](const std::string& path) {
    std::ifstream file(sysfs + path);
    std::string line;
    std::getline(file, line);
    return line;
  };
  const std::string nodes = "/devices/system/node/";
  if (parse_cores(first_line(nodes + "online")).size() < 2) return std::nullopt;
  // A node that is not known is -1, or is not there at all in a virtual machine.
  const Cores node = parse_cores(first_line(text({"/bus/pci/devices/", bus_id, "/numa_node"})));
  if (node.empty()) return std::nullopt;
  const Cores near = parse_cores(first_line(text({nodes, "node", node.front(), "/cpulist"})));
  NumaPlace place{node.front(), {}};
  std::ranges::set_intersection(near, allowed, std::back_inserter(place.cores));
  if (place.cores.empty() || place.cores == allowed) return std::nullopt;
  return place;
}

LOCKSTEP_INLINE bool stay_at(const NumaPlace& place) {
  CoreSets sets{};
  for (const std::size_t core : place.cores) CPU_SET_S(core, sizeof sets, sets.data());
  if (::sched_setaffinity(0, sizeof sets, sets.data()) != 0) return false;
  // A thread's memory comes from the node on which it runs, unless the program was started with
  // another policy. Where a container forbids to change that, the cores are enough.
  constexpr std::size_t word = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> mask{};
  if (place.node < mask.size() * word) {
    mask[place.node / word] = 1UL << (place.node % word);
    static_cast<void>(
        ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), mask.size() * word + 1));
  }
  return true;
}

}  // namespace lockstep::detail
