// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A module in evaluation for a while.

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace lockstep {

inline namespace torch_modules {

/// Puts a module and all modules inside into evaluation, and each back into its own mode at the
/// end: a norm that a program keeps in evaluation while the rest trains stays there.
class [[nodiscard]] EvaluationMode {
 public:
  explicit EvaluationMode(::torch::nn::Module& module) : module_(module) {
    was_training_ = module.is_training();
    inner_ = module.modules(/*include_self=*/false);
    for (const auto& inner : inner_) inner_training_.push_back(inner->is_training());
    module_.eval();
  }
  ~EvaluationMode() {
    // `train` of an outer module sets the inner ones, which are listed behind it.
    module_.train(was_training_);
    for (std::size_t i = 0; i != inner_.size(); ++i) inner_[i]->train(inner_training_[i]);
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  ::torch::nn::Module& module_;
  bool was_training_ = true;
  std::vector<std::shared_ptr<::torch::nn::Module>> inner_;
  std::vector<bool> inner_training_;
};

}  // namespace torch_modules

}  // namespace lockstep
