// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What `ParallelStrategy<DP>` is told when it is made: how many replicas, and where.

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/launch/rendezvous.hpp"
#include "lockstep/topology/world.hpp"

namespace lockstep {

/// How many replicas, on which devices, and how long they wait for each other.
struct DpOptions {
  std::size_t replicas = dynamic;  ///< `dynamic`: as many as `World<N>` says, else one per device
  Seed seed{0};
  std::chrono::milliseconds timeout = default_timeout;
  /// The GPU of every replica; empty: the first ones. A CPU is one device, and there the numbers
  /// only say how many replicas there are, and which of them `output_device` means.
  std::vector<std::size_t> devices{};
  /// One of the devices: its replica gathers outputs and takes their loss. Without it, the first.
  std::optional<std::size_t> output_device{};
};

namespace detail {

/// How many replicas these options mean: as many as are wanted, listed or known when compiled
/// (`StaticReplicas`), else one for each device.
template <std::size_t StaticReplicas, class Meeting>
std::size_t replicas_of(const DpOptions& options) {
  std::size_t wanted = options.replicas;
  if (const std::size_t listed = options.devices.size(); listed != 0) {
    if (wanted != dynamic && wanted != listed) {
      throw Error("DP",
                  std::to_string(wanted) + " replicas are wanted and " + std::to_string(listed) +
                      " devices are listed",
                  "leave replicas out: every device has one");
    }
    wanted = listed;
  }
  if (wanted == 0) throw Error("DP", "no replicas are wanted", "ask for one at least");
  if (wanted == dynamic) wanted = StaticReplicas == dynamic ? Meeting::devices() : StaticReplicas;
  require_world<StaticReplicas>(WorldSize{wanted}, Rank{0});
  return wanted;
}

/// The replica of the output device.
inline std::size_t output_replica(const DpOptions& options, std::size_t replicas) {
  if (!options.output_device) return 0;
  const std::size_t wanted = *options.output_device;
  if (options.devices.empty() && wanted < replicas) return wanted;
  for (std::size_t i = 0; i != options.devices.size(); ++i)
    if (options.devices[i] == wanted) return i;
  throw Error("DP", "output_device " + std::to_string(wanted) + " has no replica",
              "name one of the devices");
}

}  // namespace detail

}  // namespace lockstep
