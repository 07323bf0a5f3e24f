// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Threads and memory at the NUMA node of a rank's GPU, as the kernel describes nodes under
/// /sys.

#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/macros.hpp"

namespace lockstep::detail {

/// Numbers of cores, ascending.
using Cores = std::vector<std::size_t>;

/// A list of cores as the kernel writes it: `0-3,8`.
Cores parse_cores(std::string_view list);
std::string cores_text(const Cores& cores);

/// The cores on which the calling thread may run.
Cores allowed_cores();

/// A NUMA node, and those of its cores that a thread may use.
struct NumaPlace {
  std::size_t node = 0;
  Cores cores;
};

/// Where a thread that may run on `allowed` is near the PCI device `bus_id` (`0000:1b:00.0`);
/// `sysfs` is where /sys is mounted. Nothing where there is nothing to do: the host has one node,
/// the device's node is not known, or the thread may use none of its cores, or no others.
std::optional<NumaPlace> numa_place(const std::string& sysfs, std::string_view bus_id,
                                    const Cores& allowed);

/// Binds the calling thread, and threads that it starts later, to the cores of a place. Memory that
/// they allocate, pinned memory too, is the node's as long as it has any. Returns whether it could.
bool stay_at(const NumaPlace& place);

/// `LOCKSTEP_NUMA=0` leaves all threads where they are.
inline bool wants_numa() {
  const char* const wish = std::getenv("LOCKSTEP_NUMA");
  return wish == nullptr || std::string_view(wish) != "0";
}

}  // namespace lockstep::detail
