// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What every wrapper of replicas lets its users reach.

#include <cstdint>

namespace lockstep::detail {

/// The model, the tensors and the numbers of `Wrapper::replica()`: that of a rank of DDP, or the
/// first of DP.
template <class Wrapper>
class ReplicaAccess {
 public:
  auto& model() { return replica().model(); }
  const auto& model() const { return replica().model(); }

  /// The optimizer's numbers: `ddp.optimizer().lr = 0.01`. The same on all ranks.
  auto& optimizer() { return replica().optimizer(); }
  auto& schedule() { return replica().schedule(); }
  double learning_rate() const { return replica().learning_rate(); }
  std::uint64_t updates() const { return replica().updates(); }

  template <class Key>
  auto param(Key key) const {
    return replica().param(key);
  }
  template <class Key>
  auto buffer(Key key) const {
    return replica().buffer(key);
  }
  /// After `reduce`, the average over ranks; before, this replica's own.
  template <class Key>
  auto grad(Key key) const {
    return replica().grad(key);
  }

  /// What adds up the losses of many steps.
  auto loss_meter() { return replica().loss_meter(); }

 private:
  auto& replica() { return static_cast<Wrapper&>(*this).replica(); }
  const auto& replica() const { return static_cast<const Wrapper&>(*this).replica(); }
};

}  // namespace lockstep::detail
