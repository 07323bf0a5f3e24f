// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The edge between a program and its job on a GPU: the job's GPU is current inside, and the
/// program's own again outside.

#include <exception>
#include <optional>

#include "lockstep/device/cuda/gpu.cuh"
#include "lockstep/device/cuda/runtime.cuh"

namespace lockstep::detail {

/// The calling thread, whichever it is, works on the GPU of a communicator while this object
/// lives, and its errors name the communicator's rank.
template <class Comm>
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Comm& comm) : current_(comm.gpu().index()) {
    rank_of_thread() = comm.rank();
  }
  /// Makes that GPU the calling thread's current one, for good.
  static void select(const Comm& comm) { select_gpu(comm.gpu().index()); }

 private:
  OnGpu current_;
};

/// The first member of an object on a GPU: the other members are constructed and destroyed there,
/// whatever the program's current GPU is.
template <class Comm>
class BuiltOnDeviceOf {
 public:
  explicit BuiltOnDeviceOf(const Comm& comm) { current_.emplace(comm); }

  /// All members are there.
  void leave() { current_.reset(); }
  /// The members are about to be destroyed, before this one.
  void return_to(const Comm& comm) noexcept {
    try {
      current_.emplace(comm);
    } catch (const std::exception&) {  // at the end of a process CUDA may be gone
      current_.reset();
    }
  }

 private:
  std::optional<OnDeviceOf<Comm>> current_;
};

}  // namespace lockstep::detail
