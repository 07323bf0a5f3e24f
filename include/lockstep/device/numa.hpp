// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Threads and memory at the NUMA node of a rank's GPU, as the kernel describes nodes under
/// /sys.

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <charconv>
#include <cstdlib>
#include <iterator>

#include "lockstep/core/file.hpp"
#include "lockstep/core/text.hpp"

namespace lockstep::detail {

/// Numbers of cores, ascending.
using Cores = std::vector<std::size_t>;
/// Room for 8192 cores.
using CoreSets = std::array<cpu_set_t, 8>;

/// Reads a list of cores as the kernel writes it: `0-3,8`.
inline Cores parse_cores(std::string_view list) {
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

inline std::string cores_text(const Cores& cores) {
  std::string list;
  for (std::size_t i = 0; i < cores.size();) {
    std::size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    list += text({list.empty() ? "" : ",", cores[i]});
    if (last != i) list += text({"-", cores[last]});
    i = last + 1;
  }
  return list;
}

/// The cores on which the calling thread may run.
inline Cores allowed_cores() {
  CoreSets sets{};
  Cores cores;
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return cores;
  for (std::size_t core = 0; core < sizeof sets * 8; ++core)
    if (CPU_ISSET_S(core, sizeof sets, sets.data())) cores.push_back(core);
  return cores;
}

/// A NUMA node, and those of its cores that a thread may use.
struct NumaPlace {
  std::size_t node = 0;
  Cores cores;
};

/// Where a thread that may run on `allowed` is near the PCI device `bus_id` (`0000:1b:00.0`);
/// `sysfs` is where /sys is mounted. Nothing where there is nothing to do: the host has one node,
/// the device's node is not known, or the thread may use none of its cores, or no others.
inline std::optional<NumaPlace> numa_place(const std::string& sysfs, std::string_view bus_id,
                                           const Cores& allowed) {
  const auto numbers = [&](const std::string& path) {
    return parse_cores(read_file((sysfs + path).c_str()));
  };
  const std::string nodes = "/devices/system/node/";
  if (numbers(nodes + "online").size() < 2) return std::nullopt;
  // A node that is not known is -1, or is not there at all in a virtual machine.
  const Cores node = numbers(text({"/bus/pci/devices/", bus_id, "/numa_node"}));
  if (node.empty()) return std::nullopt;
  const Cores near = numbers(text({nodes, "node", node.front(), "/cpulist"}));
  NumaPlace place{node.front(), {}};
  std::ranges::set_intersection(near, allowed, std::back_inserter(place.cores));
  if (place.cores.empty() || place.cores == allowed) return std::nullopt;
  return place;
}

/// Binds the calling thread, and threads that it starts later, to the cores of a place. Memory that
/// they allocate, pinned memory too, is the node's as long as it has any. Returns whether it could.
inline bool stay_at(const NumaPlace& place) {
  CoreSets sets{};
  for (const std::size_t core : place.cores) CPU_SET_S(core, sizeof sets, sets.data());
  if (::sched_setaffinity(0, sizeof sets, sets.data()) != 0) return false;
  // A thread's memory comes from the node on which it runs, unless the program was started with
  // another policy. Where a container forbids to change that, the cores are enough.
  constexpr std::size_t word = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> mask{};
  if (place.node < mask.size() * word) {
    mask[place.node / word] = 1UL << (place.node % word);
    constexpr int preferred = 1;  // MPOL_PREFERRED, without the headers that define it differently
    static_cast<void>(::syscall(SYS_set_mempolicy, preferred, mask.data(), mask.size() * word + 1));
  }
  return true;
}

/// `LOCKSTEP_NUMA=0` leaves all threads where they are.
inline bool wants_numa() {
  const char* const wish = std::getenv("LOCKSTEP_NUMA");
  return wish == nullptr || std::string_view(wish) != "0";
}

}  // namespace lockstep::detail
