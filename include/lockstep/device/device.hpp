// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The device axis: where a replica's tensors live and its steps run.

#include <string_view>

#include "lockstep/core/choice.hpp"
#include "lockstep/core/view.hpp"

namespace lockstep {

namespace axes {
struct Device {
  static constexpr std::string_view name = "Device";
};
}  // namespace axes

/// Models run on the host.
struct Cpu : Choice<axes::Device> {
  static constexpr std::string_view name = "Cpu";
  using memory = HostMemory;
};

/// Models enqueue kernels on a GPU; needs lockstep.cuh or nccl.cuh.
struct Cuda : Choice<axes::Device> {
  static constexpr std::string_view name = "Cuda";
  using memory = DeviceMemory;
};

/// The policy that says where models run: `Device<Cuda>`.
template <class Kind>
struct Device : detail::ChoicePolicy<axes::Device, Kind> {};

}  // namespace lockstep
