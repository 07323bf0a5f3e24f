// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Jobs on GPUs whose ranks are threads of one process, or one alone.

#include <chrono>

#include "lockstep/detail/comm/loopback.cuh"
#include "lockstep/detail/comm/threads/communicator.cuh"
#include "lockstep/detail/strategy/gpu_execution.cuh"
#include "lockstep/detail/trainer/connection.hpp"

namespace lockstep {

template <>
struct Connection<Cuda, void> {
  template <class Policies>
  static auto make(Session& session, const std::string& = "world") {
    return CudaLoopbackCommunicator(detail::gpu_of(session.membership()));
  }
};

template <>
struct Connection<Cuda, Shm> {
  static constexpr bool ranks_are_threads = true;
  template <class Policies>
  static auto make(Session& session, const std::string& name = "world") {
    return make_thread_communicator<detail::static_world<Policies>>(session.membership(),
                                                                    session.store(), name);
  }
};

namespace detail {

/// Every replica has a GPU; with `LOCKSTEP_SHARE_GPUS=1` several may share one.
template <class Policies>
class ReplicaRendezvous<Cuda, Policies> {
  static constexpr std::size_t static_size = static_world<Policies>;
  static constexpr bool alone = static_size == 1;

 public:
  using communicator =
      std::conditional_t<alone, CudaLoopbackCommunicator, ThreadCommunicator<static_size>>;

  static std::size_t devices() { return std::max<std::size_t>(1, visible_gpus()); }

  /// `devices` are the GPUs of the replicas; without any, the first ones.
  ReplicaRendezvous(std::size_t replicas, std::chrono::milliseconds timeout,
                    const std::vector<std::size_t>& devices)
      : timeout_(timeout),
        devices_(devices),
        world_(std::make_shared<threads::SharedWorld>(WorldSize{replicas})),
        gpus_(replicas) {}

  std::size_t size() const { return gpus_.size(); }

  void prepare(Rank rank) {
    const std::size_t i = rank.value();
    if (devices_.empty()) {
      gpus_[i] = std::make_shared<Gpu>(Gpu::of(rank, i, size(), wants_shared_gpus()));
    } else {
      require_device(i);
      gpus_[i] = std::make_shared<Gpu>(rank, devices_[i]);
    }
  }
  communicator join(Rank rank) {
    std::shared_ptr<Gpu> gpu = std::move(gpus_[rank.value()]);
    const OnGpu current(gpu->index());  // the model's function may have selected another
    if constexpr (alone) {
      return communicator(std::move(gpu));
    } else {
      return communicator(world_, rank, std::move(gpu), timeout_);
    }
  }

 private:
  void require_device(std::size_t replica) const {
    const std::size_t wanted = devices_[replica];
    const std::size_t visible = visible_gpus();
    if (wanted >= visible) {
      fail("DP", {"device ", wanted, " is wanted and ", visible, " GPUs are visible"},
           "count devices from 0, and check CUDA_VISIBLE_DEVICES");
    }
    const bool is_listed_twice = std::count(devices_.begin(), devices_.end(), wanted) > 1;
    if (is_listed_twice && !wants_shared_gpus()) {
      fail("DP", {"device ", wanted, " is listed twice"},
           "list every GPU once, or set LOCKSTEP_SHARE_GPUS=1 to let replicas share it");
    }
  }

  std::chrono::milliseconds timeout_;
  std::vector<std::size_t> devices_;
  std::shared_ptr<threads::SharedWorld> world_;
  std::vector<std::shared_ptr<Gpu>> gpus_;
};

}  // namespace detail

}  // namespace lockstep
