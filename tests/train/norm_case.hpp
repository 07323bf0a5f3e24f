// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cases of syncbn_train.json: one process that trains fc1-bn1-ReLU-fc2 on the union of
/// all ranks' batches. CPUs and GPUs train the same cases, on every number of ranks that divides
/// the union: nothing here needs a device.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference.hpp"
#include "train/plain_mlp.hpp"

namespace train {

struct NormCase {
  std::string name;
  std::size_t world, steps, batch;
  std::size_t in, hidden, out;
  std::size_t evaluated_step;
  double lr, momentum;
  std::int64_t batches_tracked;
  std::vector<double> mean_loss, running_mean, running_var, eval_outputs;
  nlohmann::json params;

  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error(name + ": " + why);
  }

  /// The samples of all ranks' batches in a step.
  std::size_t rows() const { return world * batch; }
  /// Can so many ranks share them, equally many each?
  bool divides_among(std::size_t ranks) const { return rows() % ranks == 0; }

  /// What rank `rank` of `ranks` has of the union of all batches, in rank order.
  Samples samples(std::size_t step, std::size_t rank, std::size_t ranks) const {
    const std::size_t mine = rows() / ranks;
    return part(step, rank * mine, mine);
  }
  /// The batch whose outputs are known, in evaluation.
  Samples evaluated() const { return part(evaluated_step, 0, eval_outputs.size() / out); }

  template <class Model>
  Model model() const {
    Model model;
    model.in = in;
    model.hidden = hidden;
    model.out = out;
    return model;
  }

 private:
  Samples part(std::size_t step, std::size_t first, std::size_t count) const {
    Samples result{in, {}, {}};
    for (std::size_t i = first; i < first + count; ++i) {
      const Samples whole = reference_batch(batch, in, out, step, i / batch);
      const auto x = whole.x.begin() + static_cast<std::ptrdiff_t>(i % batch * in);
      result.x.insert(result.x.end(), x, x + static_cast<std::ptrdiff_t>(in));
      result.y.push_back(whole.y[i % batch]);
    }
    return result;
  }
};

/// Case `number` of syncbn_train.json, from 0.
inline NormCase norm_case(std::size_t number, const nlohmann::json& c) {
  NormCase result;
  result.name = "syncbn_train.json, case " + std::to_string(number);
  const auto count = [&](const nlohmann::json& value) {
    const double given = value;
    if (!(given > 0)) result.fail("a number that counts something is not above zero");
    return static_cast<std::size_t>(given);
  };
  try {
    result.world = count(c.at("world"));
    result.steps = count(c.at("steps"));
    result.batch = count(c.at("batch"));
    result.in = count(c.at("dims").at(0));
    result.hidden = count(c.at("dims").at(1));
    result.out = count(c.at("dims").at(2));
    result.lr = c.at("lr");
    result.momentum = c.at("momentum");
    result.mean_loss = c.at("mean_loss").get<std::vector<double>>();
    result.params = c.at("params");
    result.running_mean = c.at("running_mean").get<std::vector<double>>();
    result.running_var = c.at("running_var").get<std::vector<double>>();
    result.batches_tracked = c.at("num_batches_tracked");
    result.evaluated_step = count(c.at("eval_batch_step"));
    result.eval_outputs = c.at("eval_outputs").get<std::vector<double>>();
  } catch (const nlohmann::json::exception& error) {
    result.fail(error.what());
  }
  if (result.mean_loss.size() != result.steps)
    result.fail("mean_loss needs a number for each step");
  result.name += " (world " + std::to_string(result.world) + ", momentum " + c["momentum"].dump() +
                 ", dims " + c["dims"].dump() + ")";
  return result;
}

inline std::vector<NormCase> norm_cases() {
  std::vector<NormCase> all;
  for (const nlohmann::json& c : reference("syncbn_train.json"))
    all.push_back(norm_case(all.size(), c));
  if (all.empty()) throw std::runtime_error("syncbn_train.json has no cases");
  return all;
}

/// Throws unless numbers are PyTorch's, to rounding: `within` of the larger of 1e-3 and themselves.
inline void require_numbers(const NormCase& c, const std::vector<double>& have,
                            const std::vector<double>& want, const std::string& what,
                            double within = 1e-9) {
  if (have.size() != want.size())
    c.fail(what + " has " + std::to_string(have.size()) + " numbers, PyTorch has " +
           std::to_string(want.size()));
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::abs(have[i] - want[i]) <= within * std::max(std::abs(want[i]), 1e-3)) continue;
    char numbers[96];
    std::snprintf(numbers, sizeof numbers, "[%zu] is %.12g, PyTorch has %.12g", i, have[i],
                  want[i]);
    c.fail(what + numbers);
  }
}

/// Parameters, running statistics and their count, as a job has them on the host after all steps.
void require_trained(const NormCase& c, const auto& job, double within = 1e-9) {
  std::size_t parameters = 0;
  job.for_each_parameter([&](auto name, const auto& view) {
    const std::string text(name);
    require_numbers(c, std::vector<double>(view.data_handle(), view.data_handle() + view.size()),
                    c.params.at(text).template get<std::vector<double>>(), text, within);
    ++parameters;
  });
  if (parameters != c.params.size()) c.fail("not every parameter was compared");
  std::size_t buffers = 0;
  job.for_each_buffer([&](auto name, const auto& view) {
    const std::string text(name);
    const std::vector<double> have(view.data_handle(), view.data_handle() + view.size());
    if (text == "bn1.running_mean") {
      require_numbers(c, have, c.running_mean, text, within);
    } else if (text == "bn1.running_var") {
      require_numbers(c, have, c.running_var, text, within);
    } else if (text == "bn1.num_batches_tracked") {
      require_numbers(c, have, {static_cast<double>(c.batches_tracked)}, text);
    } else {
      c.fail("there is a buffer " + text);
    }
    ++buffers;
  });
  if (buffers != 3) c.fail("a norm has three buffers");
}

}  // namespace train
