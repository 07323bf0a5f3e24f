// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Assignment of GPUs to ranks, and whether ranks may share one.

#include <cstdlib>
#include <map>

#include "lockstep/detail/core/error.hpp"

namespace lockstep::detail {

/// Does `LOCKSTEP_SHARE_GPUS=1` allow more ranks than GPUs? Meant for trials and tests.
inline bool wants_shared_gpus() {
  const char* const text = std::getenv("LOCKSTEP_SHARE_GPUS");
  return text != nullptr && std::string_view(text) != "" && std::string_view(text) != "0";
}

/// The value of CUDA_VISIBLE_DEVICES for error messages; empty if unset.
inline std::string visible_devices_text() {
  const char* const list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) return "";
  return std::string(" (CUDA_VISIBLE_DEVICES is ") + (*list == '\0' ? "empty" : list) + ")";
}

/// The `index`-th entry of a comma-separated list such as CUDA_VISIBLE_DEVICES, or empty.
inline std::string_view listed_entry(std::string_view list, std::size_t index) {
  for (; index > 0; --index) {
    const std::size_t comma = list.find(',');
    if (comma == std::string_view::npos) return {};
    list.remove_prefix(comma + 1);
  }
  return list.substr(0, list.find(','));
}

/// Identifies a rank's GPU to other ranks.
struct GpuIdentity {
  std::string host;
  std::string uuid;  // of the GPU or of the MIG slice
  std::string bus;   // the PCI bus id, which MIG slices of one GPU share
};

/// Compares all ranks' GPUs by identity: launchers may show each rank its own as device 0.
struct GpuSharing {
  explicit GpuSharing(const std::vector<GpuIdentity>& gpus) : has_neighbour(gpus.size()) {
    using Key = std::pair<std::string_view, std::string_view>;
    std::map<Key, std::size_t> first;  // the first rank with a key
    for (std::size_t r = 0; r < gpus.size(); ++r) {
      const GpuIdentity& gpu = gpus[r];
      is_one_host = is_one_host && gpu.host == gpus[0].host;
      const auto same = first.emplace(Key{gpu.host, gpu.uuid}, r);
      if (!same.second && !shared) shared.emplace(Rank{same.first->second}, Rank{r});
      // LOCKSTEP_HOST can split one machine into several hosts, which NCCL does not see.
      for (const Key& key : {Key{gpu.host, gpu.bus}, Key{"", gpu.uuid}}) {
        const auto beside = first.emplace(key, r);
        if (!beside.second) has_neighbour[beside.first->second] = has_neighbour[r] = true;
      }
    }
  }

  std::optional<std::pair<Rank, Rank>> shared;  // the first two of a host with the same GPU
  /// Does another rank use the same board? NCCL rejects that, even for different MIG slices.
  std::vector<bool> has_neighbour;
  bool is_one_host = true;
};

/// Throws on all ranks if two ranks have the same GPU and sharing was not requested.
inline void require_own_gpus(const GpuSharing& sharing, const std::vector<GpuIdentity>& gpus,
                             Rank rank, bool may_share) {
  if (!sharing.shared || may_share) return;
  const auto [first, second] = *sharing.shared;
  fail("Device<Cuda>",
       {"ranks ", first, " and ", second, " have the same GPU, ", gpus[first.value()].uuid,
        visible_devices_text()},
       "start as many ranks on a host as it has GPUs and let each see all of them or its own, or "
       "set LOCKSTEP_SHARE_GPUS=1 to let ranks share",
       rank);
}

/// The GPU index of a host's `local_rank`-th rank: round robin if sharing is allowed.
inline std::size_t gpu_index(Rank rank, std::size_t local_rank, std::size_t local_world,
                             std::size_t gpus, bool may_share) {
  if (gpus == 0) {
    fail("Device<Cuda>", {"this process sees no GPU", visible_devices_text()},
         "run it where one is (nvidia-smi lists them, CUDA_VISIBLE_DEVICES can hide them), or use "
         "Device<Cpu>",
         rank);
  }
  if (local_world > gpus && !may_share) {
    fail("Device<Cuda>",
         {local_world, " ranks on this host have ", gpus, gpus == 1 ? " GPU" : " GPUs",
          visible_devices_text()},
         "start fewer ranks, or set LOCKSTEP_SHARE_GPUS=1 if ranks are to share a GPU", rank);
  }
  return local_rank % gpus;
}

/// The GPU index of a host's `local_rank`-th rank in the list that the program or its user gave.
inline std::size_t listed_gpu(Rank rank, std::size_t local_rank,
                              const std::vector<std::size_t>& devices, std::size_t gpus,
                              bool may_share) {
  if (local_rank >= devices.size()) {
    fail("Device<Cuda>",
         {"local rank ", local_rank, " has no device: ", devices.size(), " are listed"},
         "list one device for each rank of the host (--devices, LOCKSTEP_DEVICES, set_devices)",
         rank);
  }
  const std::size_t device = devices[local_rank];
  if (device >= gpus) {
    fail("Device<Cuda>",
         {"device ", device, " is wanted, and this process sees ", gpus,
          gpus == 1 ? " GPU" : " GPUs", visible_devices_text()},
         "count devices from 0, among those that CUDA_VISIBLE_DEVICES leaves", rank);
  }
  if (!may_share && std::count(devices.begin(), devices.end(), device) > 1) {
    fail("Device<Cuda>", {"device ", device, " is listed twice"},
         "list every GPU once, or set LOCKSTEP_SHARE_GPUS=1 if ranks are to share one", rank);
  }
  return device;
}

}  // namespace lockstep::detail
