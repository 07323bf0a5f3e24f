// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How the batch norms of a module find the ranks of the step in which the module runs.

#include <torch/nn/module.h>

#include <memory>
#include <utility>

#include "lockstep/torch/norm_exchange.hpp"
#include "lockstep/torch/sync_batch_norm.hpp"

namespace lockstep::detail {

/// A model's member. In every pass of a training step the model says
///
///     const auto norms = norms_.open(module, step);
///
/// and norms that run until the end of the scope, or in the backward pass of what ran, know the
/// step's ranks. With `Norms<Synced>` all batch norms of the module are converted.
class SyncedNorms {
 public:
  SyncedNorms() = default;
  /// A copied model has another module and other ranks.
  SyncedNorms(const SyncedNorms&) {}
  SyncedNorms(SyncedNorms&&) noexcept = default;
  SyncedNorms& operator=(const SyncedNorms&) = delete;
  SyncedNorms& operator=(SyncedNorms&&) = delete;
  ~SyncedNorms() {
    if (exchange_) exchange_->end();
  }

  template <class Step>
  NormScope open(::torch::nn::Module& module, const Step& step) {
    const auto ranks = step.norm_ranks();
    if (!exchange_) exchange_ = std::make_shared<NormExchange>();
    if constexpr (decltype(ranks)::communicates) {
      if (!std::exchange(is_converted_, true)) convert_norms(module);
    }
    exchange_->use(ranks);
    return NormScope(exchange_);
  }

 private:
  std::shared_ptr<NormExchange> exchange_;
  bool is_converted_ = false;
};

}  // namespace lockstep::detail
