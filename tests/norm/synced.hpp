// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Batch norms over several ranks: the cases of syncbn.json, and random ones, through any
/// communicator.

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "norm/held.hpp"
#include "reference.hpp"
#include "train/plain_mlp.hpp"

namespace synced {

using namespace lockstep;
using norm_test::Numbers;
using norm_test::PlainNorm;
using ranks::Ends;
using ranks::require;

using Values = HostView<double, dynamic, dynamic, dynamic>;

/// A rank's part of an input, and of the gradient of its output.
struct Part {
  Numbers x, dy;
};

/// One batch norm, with or without ReLU. It keeps what it computed.
struct Net {
  using Norm = BatchNorm<"bn1", dynamic, double>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;

  std::size_t channels = 0;
  bool has_relu = false;
  Norm norm{};
  Numbers y{}, dx{};

  void shapes(auto& shape) const { Norm::shapes(shape, channels); }
  void initialize(auto& initial) const {
    for (std::size_t c = 0; c != channels; ++c) {
      initial.param("bn1.weight"_p)(c) = train::wave(c, 3, 1);
      initial.param("bn1.bias"_p)(c) = train::wave(c, 4, 1);
    }
  }

  static Values view(const Numbers& numbers) {
    return Values(const_cast<double*>(numbers.values.data()), numbers.samples, numbers.channels,
                  numbers.positions);
  }
  double forward(auto& step, const Part& part) {
    y = part.x.like();
    if (has_relu) {
      norm.forward_relu(step, view(part.x), view(y));
    } else {
      norm.forward(step, view(part.x), view(y));
    }
    return 0;
  }
  void backward(auto& step, const Part& part) {
    dx = part.x.like();
    if (has_relu) {
      norm.backward_relu(step, view(part.x), view(part.dy), view(dx));
    } else {
      norm.backward(step, view(part.x), view(part.dy), view(dx));
    }
  }
};

/// What all ranks have together must come out.
struct Expected {
  std::vector<double> y, dx, dweight, dbias, running_mean, running_var;
};

inline void require_close(double have, double want, const std::string& what) {
  require(std::abs(have - want) <= 1e-10 * std::max(1.0, std::abs(want)),
          what + " is " + std::to_string(have) + " instead of " + std::to_string(want));
}

/// One step of `parts`, of which this rank has its own; the results of others lie before its own.
template <class... Policies>
void check_step(auto& comm, const std::vector<Part>& parts, bool has_relu,
                const Expected& expected) {
  const std::size_t me = comm.rank().value();
  const auto world = static_cast<double>(parts.size());
  const Part& part = parts[me];
  DistributedDataParallel<Net, Norms<Synced>, Policies...> ddp(
      comm, Net{.channels = part.x.channels, .has_relu = has_relu});
  auto reduced = ddp.forward(part).backward().reduce();
  std::size_t first = 0;
  for (std::size_t r = 0; r != me; ++r) first += parts[r].x.values.size();
  for (std::size_t i = 0; i != part.x.values.size(); ++i) {
    const std::string at = "[" + std::to_string(i) + "]";
    require_close(ddp.model().y.values[i], expected.y[first + i], "y" + at);
    require_close(ddp.model().dx.values[i], expected.dx[first + i], "dx" + at);
  }
  for (std::size_t c = 0; c != part.x.channels; ++c) {
    const std::string at = "[" + std::to_string(c) + "]";
    // DDP has averaged what is each rank's own.
    require_close(reduced.grad("bn1.weight"_p)(c) * world, expected.dweight[c], "dweight" + at);
    require_close(reduced.grad("bn1.bias"_p)(c) * world, expected.dbias[c], "dbias" + at);
    require_close(ddp.buffer("bn1.running_mean"_p)(c), expected.running_mean[c], "mean" + at);
    require_close(ddp.buffer("bn1.running_var"_p)(c), expected.running_var[c], "variance" + at);
  }
  std::vector<double> statistics;  // the same bits on all ranks, without a broadcast
  ddp.for_each_buffer([&](auto, const auto& view) {
    for (std::size_t i = 0; i != view.size(); ++i)
      statistics.push_back(static_cast<double>(view.data_handle()[i]));
  });
  std::vector<double> first_ranks = statistics;
  comm.broadcast(first_ranks, Rank{0});
  require(first_ranks == statistics, "running statistics are not those of rank 0");
  std::move(reduced).update();
}

inline void check_ends(const Ends& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r)
    BOOST_TEST(ends[r] == "", "rank " << r << ": " << ends[r]);
}

/// Every case of syncbn.json, on as many ranks as it has.
template <class Rendezvous, class... Policies>
void check_every_case() {
  std::size_t cases = 0;
  for (const nlohmann::json& c : reference("syncbn.json")) {
    const std::size_t channels = c.at("channels");
    const std::size_t positions = c.at("spatial");
    const std::vector<std::size_t> samples = c.at("batch_per_rank");
    std::vector<Part> parts;
    for (std::size_t r = 0; r != samples.size(); ++r) {
      Numbers x{samples[r], channels, positions,
                std::vector<double>(samples[r] * channels * positions)};
      Numbers dy = x;
      for (std::size_t i = 0; i != x.values.size(); ++i) {
        x.values[i] = train::wave(i, 20 + static_cast<double>(r), 2);
        dy.values[i] = train::wave(i, 60 + static_cast<double>(r), 1);
      }
      parts.push_back({std::move(x), std::move(dy)});
    }
    const Expected expected{c.at("y"),     c.at("dx"),           c.at("dweight"),
                            c.at("dbias"), c.at("running_mean"), c.at("running_var")};
    BOOST_TEST_CONTEXT("syncbn.json, case " << cases)
    check_ends(ranks::run_processes<Rendezvous>(
        parts.size(), std::chrono::seconds(20),
        [&](auto& comm) { check_step<Policies...>(comm, parts, false, expected); }));
    ++cases;
  }
  BOOST_TEST(cases != 0u, "syncbn.json has no cases");
}

/// What one process finds on the union of all parts.
inline Expected expected_of_union(const std::vector<Part>& parts, bool has_relu) {
  Part all{{0, parts[0].x.channels, parts[0].x.positions}, {}};
  for (const Part& part : parts) {
    all.x.samples += part.x.samples;
    all.x.values.insert(all.x.values.end(), part.x.values.begin(), part.x.values.end());
    all.dy.values.insert(all.dy.values.end(), part.dy.values.begin(), part.dy.values.end());
  }
  const std::size_t channels = all.x.channels;
  Numbers g = all.x.like();
  g.values = all.dy.values;
  std::vector<double> weight(channels);
  for (std::size_t c = 0; c != channels; ++c) weight[c] = train::wave(c, 3, 1);
  PlainNorm plain;
  const Numbers normal = plain.normal(all.x);
  Numbers y = all.x.like();
  for (std::size_t i = 0; i != y.values.size(); ++i) {
    const std::size_t c = i / y.positions % channels;
    y.values[i] = normal.values[i] * weight[c] + train::wave(c, 4, 1);
    if (has_relu && y.values[i] <= 0) y.values[i] = g.values[i] = 0;
  }
  const Numbers dx = plain.backward(normal, g, weight);
  Expected expected{y.values, dx.values, plain.dweight, plain.dbias, plain.mean, plain.variance};
  const auto count = static_cast<double>(y.count());
  for (double& mean : expected.running_mean) mean *= 0.1;
  for (double& variance : expected.running_var)
    variance = 0.9 + 0.1 * variance * count / (count - 1);
  return expected;
}

}  // namespace synced
