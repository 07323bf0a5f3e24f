// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Parameters' own counts of updates on a GPU, and which parameters a step uses.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/call.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/device/cuda/memory.cuh"
#include "lockstep/optim/counted_update.cuh"
#include "lockstep/optim/parameter_pieces.cuh"

namespace lockstep::detail {

/// All of it lies in device memory, where kernels find what is used, count it and compute its
/// numbers: the host neither waits nor knows, and a captured step holds it all.
template <class Comm, class OptimizerPolicy>
class GpuCountedUpdates {
 public:
  /// `group_of(parameter)` is the number of its group.
  template <class Plan, class GroupOf>
  GpuCountedUpdates(Comm& comm, const Plan& plan, const GroupOf& group_of)
      : comm_(comm),
        count_(plan.placements.size()),
        used_(comm.template allocate<std::uint8_t>(count_ + 1)),
        updates_(count_ * sizeof(std::uint64_t)),
        numbers_((count_ + 1) * size_of_numbers(OptimizerPolicy{})),
        order_(upload(make_order(plan))),
        groups_(upload(make_groups(group_of))),
        pieces_(upload(make_parameter_pieces(plan))) {
    store_nothing(OptimizerPolicy{}, numbers_.data() + count_ * size_of_numbers(OptimizerPolicy{}));
  }

  /// How many updates each parameter had. Device memory, written in stream order.
  std::span<std::uint64_t> updates() const {
    return {reinterpret_cast<std::uint64_t*>(updates_.data()), count_};
  }
  /// All have had so many. **Host** blocks.
  void set_updates(std::uint64_t updates) {
    const std::vector<std::uint64_t> all(count_, updates);
    copy_now(updates_.data(), all.data(), updates_.bytes());
  }

  /// The step uses these parameters. A captured step keeps them. **Stream** in its order.
  void use(std::span<const std::uint8_t> used) { launch_store_flags(stream(), used_.data(), used); }
  /// The step uses what any rank uses. **Ranks** all.
  void agree() { comm_.all_reduce(used_.first(count_), Max{}, step_call_of_thread()); }

  /// The step uses parameters whose gradient, among these from `offset` of the arena on, is not
  /// zero. If `partials` are wanted, the pass sums up squares too. **Stream** in its order.
  template <ElementKind Travelling>
  void use_nonzero(std::size_t offset, std::size_t element, std::byte* averages, std::size_t count,
                   double* partials = nullptr) {
    find_used_by_kind<Travelling>(stream(), averages, where(offset, element), used_.data(),
                                  partials, count);
  }

  /// Counts what is used of the parameters from place `first` on, in the order of buckets, and
  /// computes the numbers of their update from those of the step. **Stream** in its order.
  void number(const std::byte* inputs, const std::byte* step, std::size_t first,
              std::size_t count) {
    number_counted(OptimizerPolicy{}, stream(), inputs, step,
                   CountedParameters{reinterpret_cast<const std::uint32_t*>(order_.data()),
                                     reinterpret_cast<const std::uint16_t*>(groups_.data()),
                                     used_.data(), updates().data()},
                   first, count, numbers_.data());
  }

  const std::byte* numbers() const { return numbers_.data(); }
  /// For kernels over elements of so many bytes, from `offset` of the arena on.
  ParameterPieces where(std::size_t offset, std::size_t element) const {
    return {reinterpret_cast<const GroupPiece*>(pieces_.data()),
            pieces_.bytes() / sizeof(GroupPiece), offset, element};
  }

 private:
  cudaStream_t stream() const { return comm_.gpu().stream(); }

  template <class T>
  static DeviceArena upload(const std::vector<T>& values) {
    DeviceArena arena(values.size() * sizeof(T));
    copy_now(arena.data(), values.data(), arena.bytes());
    return arena;
  }
  template <class Plan>
  static std::vector<std::uint32_t> make_order(const Plan& plan) {
    std::vector<std::uint32_t> order;
    for (std::size_t b = 0; b != plan.bucket_count; ++b) {
      for (const std::size_t p : plan.members(b)) order.push_back(static_cast<std::uint32_t>(p));
    }
    return order;
  }
  template <class GroupOf>
  std::vector<std::uint16_t> make_groups(const GroupOf& group_of) const {
    std::vector<std::uint16_t> groups(count_);
    for (std::size_t p = 0; p != count_; ++p) groups[p] = static_cast<std::uint16_t>(group_of(p));
    return groups;
  }

  Comm& comm_;
  std::size_t count_;             // of parameters; tables by parameter have one more for nobody
  std::span<std::uint8_t> used_;  // of the communicator, because ranks reduce it
  DeviceArena updates_;
  DeviceArena numbers_;
  DeviceArena order_;
  DeviceArena groups_;
  DeviceArena pieces_;
};

/// Where all parameters are updated in every step.
struct NoCountedUpdates {
  NoCountedUpdates(const auto&...) {}
  static constexpr std::span<std::uint64_t> updates() { return {}; }
};

}  // namespace lockstep::detail
