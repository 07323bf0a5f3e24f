// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of a replica that shows the numbers of its optimizer.

#include <cstddef>
#include <cstdint>

namespace lockstep::detail {

/// A base of `Self`, the replica. None of its members communicates.
template <class Self>
class ReplicaOptions {
 public:
  /// The optimizer's numbers, which must be the same on all ranks: `replica.optimizer().lr = 0.01`.
  auto& optimizer() { return self().updater_.options(); }
  /// Those of a set that is one of `ParameterGroups`: `replica.optimizer(NoDecay<>{})`.
  template <class Set>
  auto& optimizer(Set set) {
    return self().updater_.options(set);
  }
  /// The numbers of all groups.
  auto& group_options() { return self().updater_.group_options(); }
  auto& schedule() { return self().updater_.schedule(); }
  void begin_schedule(std::uint64_t step) { self().updater_.begin_schedule(step); }
  void set_epoch(std::uint64_t epoch) { self().updater_.set_epoch(epoch); }
  double learning_rate() const { return self().updater_.learning_rate(); }
  std::uint64_t updates() const { return self().updater_.steps(); }
  /// The bytes of the optimizer's states that this rank keeps.
  std::size_t state_bytes() const { return self().updater_.state_bytes(); }
  /// The bytes of the gradients that it keeps.
  std::size_t gradient_bytes() const { return self().gradients_.bytes(); }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }
};

}  // namespace lockstep::detail
