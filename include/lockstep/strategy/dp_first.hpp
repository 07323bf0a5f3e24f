// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The part of `DP` that shows its first replica.

#include <cstdint>

namespace lockstep::detail {

/// A base of `Self`, replicas of `Model`.
template <class Self, class Model>
class DpFirst {
 public:
  /// These are of the first replica. All replicas follow the numbers of its optimizer:
  /// `dp.optimizer().lr = 0.01`. Its gradients are those of its latest share. Other replicas'
  /// writes to their buffers are lost.
  Model& model() { return self().first().model(); }
  const Model& model() const { return self().first().model(); }
  auto& optimizer() { return self().first().optimizer(); }
  template <class Set>
  auto& optimizer(Set set) {
    return self().first().optimizer(set);
  }
  auto& group_options() { return self().first().group_options(); }
  auto& schedule() { return self().first().schedule(); }
  double learning_rate() const { return self().first().learning_rate(); }
  std::uint64_t updates() const { return self().first().updates(); }
  auto param(auto key) const { return self().first().param(key); }
  auto grad(auto key) const { return self().first().grad(key); }
  auto buffer(auto key) const { return self().first().buffer(key); }
  /// Adds up the losses of many steps.
  auto loss_meter() { return self().first().loss_meter(); }

  /// Calls `f(name, view)` for every parameter, gradient or buffer of the first replica, as
  /// `param`, `grad` and `buffer` give them. On a GPU the host waits for it first.
  template <class F>
  void for_each_parameter(F&& f) const {
    self().first().for_each_parameter(f);
  }
  template <class F>
  void for_each_gradient(F&& f) const {
    self().first().for_each_gradient(f);
  }
  template <class F>
  void for_each_buffer(F&& f) const {
    self().first().for_each_buffer(f);
  }
  /// How many updates `Anomaly<Skip>` has left out. **Host** blocks until all steps are done.
  std::uint64_t skipped_steps() const { return self().first().skipped_steps(); }

 private:
  Self& self() { return static_cast<Self&>(*this); }
  const Self& self() const { return static_cast<const Self&>(*this); }
};

}  // namespace lockstep::detail
