// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file CPU and memory affinity to the NUMA node of a rank's GPU, read from /sys.

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <charconv>
#include <cstdlib>
#include <iterator>

#include "lockstep/detail/core/file.hpp"
#include "lockstep/detail/core/text.hpp"

namespace lockstep::detail {

/// Core numbers, ascending.
using Cores = std::vector<std::size_t>;
/// Room for 8192 cores.
using CoreSets = std::array<cpu_set_t, 8>;

/// Parses a CPU list in the kernel's format: `0-3,8`.
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

inline Cores allowed_cores() {
  CoreSets sets{};
  Cores cores;
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) return cores;
  for (std::size_t core = 0; core < sizeof sets * 8; ++core)
    if (CPU_ISSET_S(core, sizeof sets, sets.data())) cores.push_back(core);
  return cores;
}

/// A NUMA node, and those of its cores that a thread may use.
struct NumaNode {
  std::size_t node = 0;
  Cores cores;
};

/// The NUMA node of the PCI device `bus_id` (`0000:1b:00.0`) for a thread that may run on
/// `allowed`; /sys is mounted at `sysfs`. Nothing if binding is pointless: the host has one node,
/// the device's node is unknown, or the thread may use none or only cores of that node.
inline std::optional<NumaNode> numa_node(const std::string& sysfs, std::string_view bus_id,
                                         const Cores& allowed) {
  const auto numbers = [&](const std::string& path) {
    return parse_cores(read_file((sysfs + path).c_str()));
  };
  const std::string nodes = "/devices/system/node/";
  if (numbers(nodes + "online").size() < 2) return std::nullopt;
  // An unknown node is -1; in a virtual machine the file may be missing.
  const Cores own = numbers(text({"/bus/pci/devices/", bus_id, "/numa_node"}));
  if (own.empty()) return std::nullopt;
  const Cores near = numbers(text({nodes, "node", own.front(), "/cpulist"}));
  NumaNode node{own.front(), {}};
  std::ranges::set_intersection(near, allowed, std::back_inserter(node.cores));
  if (node.cores.empty() || node.cores == allowed) return std::nullopt;
  return node;
}

/// Binds the calling thread, and threads that it starts later, to the node's cores and prefers the
/// node's memory, pinned memory included. Returns false if the affinity could not be set.
inline bool stay_at(const NumaNode& node) {
  CoreSets sets{};
  for (const std::size_t core : node.cores) CPU_SET_S(core, sizeof sets, sets.data());
  if (::sched_setaffinity(0, sizeof sets, sets.data()) != 0) return false;
  // Linux allocates on the running thread's node unless the program was started with another memory
  // policy. A container may forbid to change the policy; then the affinity has to suffice.
  constexpr std::size_t word = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> mask{};
  if (node.node < mask.size() * word) {
    mask[node.node / word] = 1UL << (node.node % word);
    constexpr int preferred = 1;  // MPOL_PREFERRED, without the headers that define it differently
    static_cast<void>(::syscall(SYS_set_mempolicy, preferred, mask.data(), mask.size() * word + 1));
  }
  return true;
}

/// `LOCKSTEP_NUMA=0` disables the binding of threads.
inline bool wants_numa() {
  const char* const wish = std::getenv("LOCKSTEP_NUMA");
  return wish == nullptr || std::string_view(wish) != "0";
}

}  // namespace lockstep::detail
