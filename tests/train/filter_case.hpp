// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cases of zero_filter.json, in some of whose steps fc2 takes no part.

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/detail/bucket/subgraphs.hpp"
#include "train/reference_case.hpp"

namespace train {

struct FilterCase {
  ReferenceCase reference;
  std::vector<std::size_t> skipped;
  bool filtered = false;

  bool leaves_out_fc2(std::size_t step) const {
    return std::ranges::find(skipped, step) != skipped.end();
  }
};

inline FilterCase filter_case(std::size_t number, nlohmann::json c) {
  const nlohmann::json decay = c.at("weight_decay");
  c["accumulate"] = 1;
  c["clip"] = nullptr;
  c["hyper"] = {{"lr", c.at("lr")}, {"weight_decay", decay}};
  c["mean_loss"] = std::vector<double>(c.at("steps").get<std::size_t>());
  FilterCase result{reference_case(number, c), c.at("skipped_steps"), c.at("filtered")};
  result.reference.name = "zero_filter.json, case " + std::to_string(number);
  return result;
}

// Steps of models that can leave fc2 out, in the ways there are.

inline constexpr auto step_with_zeros = [](auto& ddp, const auto& batch, bool left_out) {
  ddp.model().leaves_out_fc2 = left_out;
  ddp.step(batch);
};
inline constexpr auto step_without_gradient = [](auto& ddp, const auto& batch, bool left_out) {
  ddp.model().leaves_out_fc2 = left_out;
  ddp.model().gives_zeros = false;
  ddp.step(batch);
};
using WithoutFc2 = lockstep::Subgraph<"short", "fc1.*", "fc3.*">;
inline constexpr auto step_of_subgraph = [](auto& ddp, const auto& batch, bool left_out) {
  using namespace lockstep;
  if (left_out) {
    ddp.template step<"short"_s>(batch);
  } else {
    ddp.step(batch);
  }
};

/// Trains a job with AdamW's numbers as the case has them. `batch(samples)` is what a step gets.
void train_filtered(const FilterCase& c, auto& ddp, std::size_t rank, const auto& batch,
                    const auto& step) {
  if (c.reference.optimizer != "adamw") c.reference.fail("its optimizer is not AdamW");
  ddp.optimizer().lr = c.reference.hyper.at("lr");
  ddp.optimizer().weight_decay = c.reference.hyper.at("weight_decay");
  for (std::size_t s = 0; s < c.reference.steps; ++s)
    step(ddp, batch(c.reference.samples(s, rank)), c.leaves_out_fc2(s));
}

}  // namespace train
