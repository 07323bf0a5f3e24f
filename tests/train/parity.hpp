// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Every case of ddp.json: parameters and losses as PyTorch's DDP has them, trained through
/// any communicator.

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/reference_case.hpp"

namespace parity {

using namespace train;
using ranks::Ends;
using Network = PlainMlp<dynamic, dynamic, dynamic>;

/// Small buckets: several are under way during backward.
using SmallBuckets = Buckets<BucketLimits{600, 1500}>;

/// Trains a case; `run_step(ddp, step)` returns the loss of this rank.
void require_pytorchs(auto& comm, auto& ddp, const ReferenceCase& c, const auto& run_step) {
  for (std::size_t s = 0; s < c.steps; ++s) {
    double loss[] = {run_step(s)};
    comm.all_reduce(loss, Average{});
    require_loss(c, s, loss[0]);
  }
  require_parameters(c, ddp, [](const auto& view) {
    return std::vector<double>(view.data_handle(), view.data_handle() + view.size());
  });
}

/// The way of a trainer: `step` for every micro-batch.
template <std::size_t MicroBatches, class... Ps>
void train_by_steps(auto& comm, const ReferenceCase& c) {
  DistributedDataParallel<Network, Optimizer<ReferenceRule>, Accumulate<MicroBatches>, Ps...> ddp(
      comm, c.model<Network>());
  choose_rule(ddp.optimizer(), c);
  require_pytorchs(comm, ddp, c, [&](std::size_t s) {
    double loss = 0;
    for (std::size_t m = s * MicroBatches; m < (s + 1) * MicroBatches; ++m)
      loss += ddp.step(c.samples(m, comm.rank().value())) / MicroBatches;
    return loss;
  });
}

/// The way of a PyTorch user: losses divided by hand, `no_sync` for all micro-batches but the last.
template <class... Ps>
void train_by_hand(auto& comm, const ReferenceCase& c) {
  DistributedDataParallel<Network, Ps...> ddp(comm, c.model<Network>());
  set_options(ddp.optimizer(), c);
  ddp.model().loss_scale = 1.0 / static_cast<double>(c.accumulate);
  require_pytorchs(comm, ddp, c, [&](std::size_t s) {
    const auto batch = [&](std::size_t m) {
      return c.samples(s * c.accumulate + m, comm.rank().value());
    };
    double loss = 0;
    auto local = ddp.no_sync();
    for (std::size_t m = 0; m + 1 < c.accumulate; ++m) {
      const Samples samples = batch(m);
      loss += local.forward(samples).backward();
    }
    const Samples last = batch(c.accumulate - 1);
    auto backwarded = ddp.forward(last).backward();
    // Both ways to end a step.
    return loss + (s % 2 == 0 ? std::move(backwarded).reduce().update()
                              : std::move(backwarded).reduce_and_update());
  });
}

/// Trains a case on processes that meet in this way; `train(comm)` throws what is wrong.
template <class Rendezvous>
Ends train_on_processes(const ReferenceCase& c, const auto& train) {
  return ranks::run_processes<Rendezvous>(c.world, std::chrono::seconds(20), train);
}

/// Runs every case; `run(c)` returns how each rank ended.
void check_every_case(const auto& run) {
  std::size_t cases = 0;
  for (const nlohmann::json& figures : reference("ddp.json")) {
    try {
      const ReferenceCase c = reference_case(cases, figures);
      const Ends ends = run(c);
      BOOST_TEST(ends.size() == c.world, c.name << ": not every rank ran");
      BOOST_TEST_CONTEXT(c.name) {
        for (std::size_t r = 0; r < ends.size(); ++r)
          BOOST_TEST(ends[r] == "", "rank " << r << ": " << ends[r]);
      }
    } catch (const std::exception& error) {
      BOOST_ERROR(error.what());
    }
    ++cases;
  }
  BOOST_TEST(cases != 0u, "ddp.json has no cases");
}

/// Runs a case by steps.
template <class Rendezvous, class... Ps>
Ends run_by_steps(const ReferenceCase& c) {
  Ends ends;
  with_policies(c, [&]<std::size_t MicroBatches, class ClipPolicy>() {
    ends = train_on_processes<Rendezvous>(
        c, [&](auto& comm) { train_by_steps<MicroBatches, ClipPolicy, Ps...>(comm, c); });
  });
  return ends;
}

}  // namespace parity
