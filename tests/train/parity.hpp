// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The cases of ddp.json: parameters and losses as PyTorch's DDP has them, trained through
/// any communicator.

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/trainer/ddp.hpp"
#include "reference.hpp"
#include "train/plain_mlp.hpp"

namespace parity {

using namespace train;
using ranks::Ends;
using ranks::require;
using Network = PlainMlp<12, 16, 5>;

inline bool close(double a, double b) {
  return std::abs(a - b) <= 1e-9 * std::max(std::abs(b), 1e-3);
}

void compare(auto& ddp, const nlohmann::json& expected, const std::string& how) {
  const auto each = [&](const char* name, const auto& view) {
    const std::vector<double> want = expected["params"][name];
    require(want.size() == view.size(), how + ": sizes of " + name);
    for (std::size_t i = 0; i < want.size(); ++i) {
      require(close(view.data_handle()[i], want[i]),
              how + ": " + name + "[" + std::to_string(i) + "] is " +
                  std::to_string(view.data_handle()[i]) + ", PyTorch has " +
                  std::to_string(want[i]));
    }
  };
  each("fc1.weight", ddp.param("fc1.weight"_p));
  each("fc1.bias", ddp.param("fc1.bias"_p));
  each("fc2.weight", ddp.param("fc2.weight"_p));
  each("fc2.bias", ddp.param("fc2.bias"_p));
  each("fc3.weight", ddp.param("fc3.weight"_p));
  each("fc3.bias", ddp.param("fc3.bias"_p));
}

/// The way of a trainer: `step` for every micro-batch.
template <std::size_t Accumulated>
double by_steps(auto& ddp, std::size_t step, std::size_t rank, const nlohmann::json& c) {
  double loss = 0;
  for (std::size_t m = 0; m < Accumulated; ++m) {
    loss +=
        ddp.step(reference_batch(c["batch"], 12, 5, step * Accumulated + m, rank)) / Accumulated;
  }
  return loss;
}

/// The way of a PyTorch user: losses divided by hand, no_sync for all but the last.
template <std::size_t Accumulated>
double by_phases(auto& ddp, std::size_t step, std::size_t rank, const nlohmann::json& c) {
  ddp.model().loss_scale = 1.0 / Accumulated;
  double loss = 0;
  auto local = ddp.no_sync();
  for (std::size_t m = 0; m + 1 < Accumulated; ++m) {
    const Samples batch = reference_batch(c["batch"], 12, 5, step * Accumulated + m, rank);
    loss += local.forward(batch).backward();
  }
  const Samples last =
      reference_batch(c["batch"], 12, 5, step * Accumulated + Accumulated - 1, rank);
  return loss + ddp.forward(last).backward().reduce().update();
}

template <std::size_t Accumulated, class... Ps>
void train_case(auto& comm, const nlohmann::json& c, bool by_hand, const std::string& how) {
  DistributedDataParallel<Network, Ps...> ddp(comm);
  set_options(ddp.optimizer(), c["hyper"]);
  for (std::size_t s = 0; s < c["steps"]; ++s) {
    double loss[] = {by_hand ? by_phases<Accumulated>(ddp, s, comm.rank().value(), c)
                             : by_steps<Accumulated>(ddp, s, comm.rank().value(), c)};
    comm.all_reduce(loss, Average{});
    const double want = c["mean_loss"][s];
    require(close(loss[0], want), how + ": loss of step " + std::to_string(s) + " is " +
                                      std::to_string(loss[0]) + ", PyTorch has " +
                                      std::to_string(want));
  }
  compare(ddp, c, how);
}

/// Trains on processes that meet in this way; `train(comm, how)`.
template <class Meeting>
void check_ranks(const nlohmann::json& c, const std::string& how, auto train) {
  const Ends ends = ranks::run_processes<Meeting>(c["world"], std::chrono::seconds(20),
                                                  [&](auto& comm) { train(comm, how); });
  for (std::size_t r = 0; r < ends.size(); ++r) {
    BOOST_TEST(ends[r] == "", "rank " << r << ": " << ends[r]);
  }
}

/// Both cases of an optimizer, each in all ways that `run_case` knows.
template <class Rule, std::size_t Accumulated>
void run_both(const std::string& name, const auto& run_case) {
  std::size_t cases = 0;
  for (const nlohmann::json& c : reference("ddp.json")) {
    if (c["optimizer"] != name) continue;
    ++cases;
    if (c["clip"].is_null()) {
      BOOST_REQUIRE(c["accumulate"] == 1);
      run_case.template operator()<Rule, Clip<>, 1>(c);
    } else {
      BOOST_REQUIRE(c["clip"] == 0.05);
      BOOST_REQUIRE(c["accumulate"] == Accumulated);
      run_case.template operator()<Rule, Clip<0.05>, Accumulated>(c);
    }
  }
  BOOST_TEST(cases == 2u);
}

/// All cases.
void run_all(const auto& run_case) {
  run_both<SGD, 2>("sgd", run_case);
  run_both<SGDMomentum, 2>("sgd_momentum", run_case);
  run_both<SGDNesterov, 3>("sgd_nesterov", run_case);
  run_both<Adam, 3>("adam", run_case);
  run_both<AdamW, 2>("adamw", run_case);
}

}  // namespace parity
