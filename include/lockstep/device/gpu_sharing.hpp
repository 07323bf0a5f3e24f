// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which rank gets which GPU, and when several may have one.

#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>

#include "lockstep/core/error.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::detail {

/// Does `LOCKSTEP_SHARE_GPUS=1` allow more ranks than GPUs? It is meant for trials and tests.
inline bool wants_shared_gpus() {
  const char* const text = std::getenv("LOCKSTEP_SHARE_GPUS");
  return text != nullptr && std::string_view(text) != "" && std::string_view(text) != "0";
}

/// The value of CUDA_VISIBLE_DEVICES, to be added to a sentence; nothing where it is not set.
inline std::string visible_devices_text() {
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) return "";
  return std::string(" (CUDA_VISIBLE_DEVICES is ") + (*list == '\0' ? "empty" : list) + ")";
}

/// The GPU of a host's `local_rank`-th rank. Ranks share GPUs in turn if that is allowed.
inline std::size_t gpu_index(Rank rank, std::size_t local_rank, std::size_t local_world,
                             std::size_t gpus, bool may_share) {
  if (gpus == 0) {
    throw Error("Device<Cuda>", "this process sees no GPU" + visible_devices_text(),
                "run it where one is (nvidia-smi lists them, CUDA_VISIBLE_DEVICES can hide them), "
                "or use Device<Cpu>",
                rank);
  }
  if (local_world > gpus && !may_share) {
    throw Error(
        "Device<Cuda>",
        std::to_string(local_world) + " ranks on this host have " + std::to_string(gpus) +
            (gpus == 1 ? " GPU" : " GPUs") + visible_devices_text(),
        "start fewer ranks, or set LOCKSTEP_SHARE_GPUS=1 if ranks are to share a GPU, or if "
        "the launcher shows each rank only its own",
        rank);
  }
  return local_rank % gpus;
}

}  // namespace lockstep::detail
