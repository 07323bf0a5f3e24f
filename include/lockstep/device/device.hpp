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

struct Cpu : Choice<axes::Device> {
  static constexpr std::string_view name = "Cpu";
  using memory = HostMemory;
};

struct Cuda : Choice<axes::Device> {
  static constexpr std::string_view name = "Cuda";
  using memory = DeviceMemory;
};

template <class Kind>
struct Device : detail::ChoicePolicy<axes::Device, Kind> {};

}  // namespace lockstep
