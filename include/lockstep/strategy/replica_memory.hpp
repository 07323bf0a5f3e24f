// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that compares jobs over ranks, and then takes memory for tensors.

#include <cstddef>
#include <cstdint>
#include <span>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/strong.hpp"
#include "lockstep/model/fingerprint.hpp"
#include "lockstep/strategy/agreement.hpp"

namespace lockstep::detail {

/// A base of `Self`, the replica.
template <class Self>
class ReplicaMemory {
 protected:
  /// Before a collective: ranks of this host that allocate or free for themselves have done so.
  void settle_allocations() {
    auto& comm = self().comm_;
    if constexpr (requires { comm.settle_allocations(); }) comm.settle_allocations();
  }

  /// The memory of the parameters, where all ranks have the same ones. **Ranks** all.
  template <class Policies>
  std::byte* agree_and_allocate() {
    using traits = typename Self::traits;
    const auto& layouts = self().layouts_;
    settle_allocations();
    if constexpr (!traits::alone) {
      const auto fingerprint = fingerprint_of<Policies>(layouts.parameters, layouts.buffers);
      require_agreement(self().comm_, fingerprint, [&] {
        return job_description<Policies>(layouts.parameters, layouts.buffers);
      });
    }
    const std::size_t size = layouts.parameters.plan().all_bytes;
    if constexpr (traits::shares_parameters) {
      return bytes(self().comm_.template allocate_shared<std::uint8_t>(size));
    } else {
      return allocate(size);
    }
  }

  std::byte* allocate(std::size_t size) {
    return size == 0 ? nullptr : bytes(self().comm_.template allocate<std::uint8_t>(size));
  }

  void broadcast(std::byte* data, std::size_t size, JobCall part_of = current_job_call(),
                 Rank root = Rank{0}) {
    if (size == 0) return;
    self().comm_.broadcast(std::span(reinterpret_cast<std::uint8_t*>(data), size), root, part_of);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }

  static std::byte* bytes(std::span<std::uint8_t> memory) {
    return reinterpret_cast<std::byte*>(memory.data());
  }
};

}  // namespace lockstep::detail
