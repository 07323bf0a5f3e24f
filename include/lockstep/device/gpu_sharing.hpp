// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Which rank gets which GPU, and when several may have one.

#include <cstdlib>
#include <map>

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

/// The `index`-th entry of a list such as CUDA_VISIBLE_DEVICES; empty where there is none.
inline std::string_view listed_entry(std::string_view list, std::size_t index) {
  for (; index > 0; --index) {
    const std::size_t comma = list.find(',');
    if (comma == std::string_view::npos) return {};
    list.remove_prefix(comma + 1);
  }
  return list.substr(0, list.find(','));
}

/// The GPU of a rank as other ranks can recognise it.
struct GpuIdentity {
  std::string host;
  /// The GPU's UUID; of a MIG slice the slice's own.
  std::string uuid;
  /// Its place on the bus, which slices of one GPU have in common.
  std::string bus;
};

/// What the ranks of a communicator find when they compare their GPUs. A launcher that shows each
/// rank only its own GPU (Slurm's --gpus-per-task, MPS, MIG) looks from inside one process like one
/// that makes all share, so that numbers cannot tell.
struct GpuVerdict {
  explicit GpuVerdict(const std::vector<GpuIdentity>& gpus) : has_neighbour(gpus.size()) {
    using Key = std::pair<std::string_view, std::string_view>;
    std::map<Key, std::size_t> first;  // the first rank with a key
    for (std::size_t r = 0; r < gpus.size(); ++r) {
      const GpuIdentity& gpu = gpus[r];
      is_one_host = is_one_host && gpu.host == gpus[0].host;
      const auto same = first.emplace(Key{gpu.host, gpu.uuid}, r);
      if (!same.second && !shared) shared.emplace(Rank{same.first->second}, Rank{r});
      // LOCKSTEP_HOST can make hosts of one machine, and NCCL does not know of that.
      for (const Key& key : {Key{gpu.host, gpu.bus}, Key{"", gpu.uuid}}) {
        const auto beside = first.emplace(key, r);
        if (!beside.second) has_neighbour[beside.first->second] = has_neighbour[r] = true;
      }
    }
  }

  /// The first two ranks of a host that have the same GPU, if there are any.
  std::optional<std::pair<Rank, Rank>> shared;
  /// Is another rank on the same board? NCCL refuses that, even for different slices of a GPU.
  std::vector<bool> has_neighbour;
  bool is_one_host = true;
};

/// Throws, on all ranks alike, if two have one GPU and that was not asked for.
inline void require_own_gpus(const GpuVerdict& verdict, const std::vector<GpuIdentity>& gpus,
                             Rank rank, bool may_share) {
  if (!verdict.shared || may_share) return;
  const auto [first, second] = *verdict.shared;
  fail("Device<Cuda>",
       {"ranks ", first, " and ", second, " have the same GPU, ", gpus[first.value()].uuid,
        visible_devices_text()},
       "start as many ranks on a host as it has GPUs and let each see all of them or its own, or "
       "set LOCKSTEP_SHARE_GPUS=1 to let ranks share",
       rank);
}

/// The GPU of a host's `local_rank`-th rank. Ranks share GPUs in turn if that is allowed.
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

}  // namespace lockstep::detail
