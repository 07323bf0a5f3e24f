// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The network of syncbn_train.json on the host, its linear layers in plain loops, and how a
/// job of any policies trains a case.

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/norm/batch_norm.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/norm_case.hpp"

namespace train {

struct NormMlp : PlainLayers {
  using Norm1 = BatchNorm<"bn1", dynamic, double>;
  using Parameters = ParameterList<Parameter<"fc1.weight", double, dynamic, dynamic>,
                                   Parameter<"fc1.bias", double, dynamic>, Norm1,
                                   Parameter<"fc2.weight", double, dynamic, dynamic>,
                                   Parameter<"fc2.bias", double, dynamic>>;
  using Buffers = BufferList<Norm1>;
  using Output = OutputOf<double, dynamic>;

  std::size_t in = 1, hidden = 1, out = 1;
  Norm1 norm1;

  auto output_extents() const { return std::array<std::size_t, 1>{out}; }
  void shapes(auto& shape) const {
    shape("fc1.weight"_p, hidden, in);
    shape("fc1.bias"_p, hidden);
    Norm1::shapes(shape, hidden);
    shape("fc2.weight"_p, out, hidden);
    shape("fc2.bias"_p, out);
  }
  auto rows(auto& values) const {
    using T = std::remove_pointer_t<decltype(values.data())>;
    return HostView<T, dynamic, dynamic>(values.data(), values.size() / hidden, hidden);
  }

  /// Buffers are not mentioned: a norm's first statistics are its own matter.
  void initialize(auto& initial) {
    double k = 1;
    initial.for_each_parameter([&](auto name, const auto& view) {
      for (std::size_t i = 0; i < view.size(); ++i)
        view.data_handle()[i] = wave(i, k, 0.2) + (name == "bn1.weight" ? 1 : 0);
      ++k;
    });
  }

  double forward(auto& step, const Samples& batch) {
    run(step, batch);
    return cross_entropy(batch.y, out, outputs);
  }
  void backward(auto& step, const Samples& batch) {
    std::vector<double> d = cross_entropy_gradient(batch.y, out, outputs);
    layer_back(step, "fc2.weight"_p, "fc2.bias"_p, activations, d);
    d = input_gradient(step.param("fc2.weight"_p), d);
    norm1.backward_relu(step, rows(sums), rows(std::as_const(d)), rows(d));
    layer_back(step, "fc1.weight"_p, "fc1.bias"_p, batch.x, d);
  }
  void predict(auto& step, const Samples& batch, auto rows) {
    run(step, batch);
    std::copy(outputs.begin(), outputs.end(), rows.data_handle());
  }

 private:
  void run(auto& step, const Samples& batch) {
    linear(step.param("fc1.weight"_p), step.param("fc1.bias"_p), batch.x, sums, false);
    activations.resize(sums.size());
    norm1.forward_relu(step, rows(std::as_const(sums)), rows(activations));
    linear(step.param("fc2.weight"_p), step.param("fc2.bias"_p), activations, outputs, false);
  }

  std::vector<double> sums, activations, outputs;
};

/// Which part of how many a rank has of the union of all batches.
struct Share {
  std::size_t part, parts;
};

/// Trains a case and compares everything that is known of it. What is different throws.
/// `mean(loss)` is the mean of the ranks' losses.
void train_norm_case(auto& job, const NormCase& c, Share share, const auto& mean) {
  job.optimizer().lr = c.lr;
  job.optimizer().momentum = c.momentum;
  for (std::size_t s = 0; s < c.steps; ++s) {
    const double loss = mean(job.step(c.samples(s, share.part, share.parts)));
    job.step_tail();
    require_numbers(c, {loss}, {c.mean_loss[s]}, "the loss of step " + std::to_string(s));
  }
  require_trained(c, job);
  const auto outputs = job.predict(c.evaluated());
  require_numbers(c, {outputs.data_handle(), outputs.data_handle() + outputs.size()},
                  c.eval_outputs, "an output in evaluation");
  require_trained(c, job);  // an evaluation changes nothing
}

template <class Job>
void train_norm_case_on(auto& comm, const NormCase& c, Share share) {
  Job ddp(comm, c.model<NormMlp>());
  train_norm_case(ddp, c, share, [&](double loss) { return comm.all_reduce(loss, Average{}); });
}

/// Every case on every number of ranks up to `most` that divides it.
template <class Rendezvous, class Job>
void check_every_norm_case(std::size_t most = 6, ranks::As as = ranks::As::processes) {
  for (const NormCase& c : norm_cases()) {
    for (std::size_t world = 1; world <= most; ++world) {
      if (!c.divides_among(world)) continue;
      const ranks::Ends ends = ranks::run<Rendezvous>(as, world, [&](auto& comm) {
        train_norm_case_on<Job>(comm, c, {comm.rank().value(), world});
      });
      for (std::size_t r = 0; r < world; ++r)
        BOOST_TEST(ends[r] == "", world << " ranks, rank " << r << ": " << ends[r]);
    }
  }
}

}  // namespace train
