// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Ranks with different numbers of batches, against PyTorch's figures and against the same
/// sums in one process. For any communicator.

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/ranks.hpp"
#include "comm/repeat.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "optim/plain.hpp"
#include "reference.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

namespace joining {

using namespace train;
using Network = PlainMlp<dynamic, dynamic, dynamic>;

/// Trains a case of join.json on one rank, and compares what comes out.
template <class... Ps>
void train_case(auto& comm, const nlohmann::json& c) {
  const std::size_t in = c.at("dims").at(0), out = c.at("dims").at(2), rows = c.at("batch");
  const std::size_t me = comm.rank().value();
  const std::size_t batches = c.at("batches_per_rank").at(me);
  Network network;
  network.in = in;
  network.hidden = c.at("dims").at(1);
  network.out = out;
  DistributedDataParallel<Network, Optimizer<SGD>, Buckets<BucketLimits{600, 1500}>, Ps...> ddp(
      comm, network);
  ddp.optimizer().lr = c.at("lr");
  {
    auto joined = ddp.join();
    for (std::size_t s = 0; s != batches; ++s) {
      const Samples batch = reference_batch(rows, in, out, s, me);
      // All ways to make a step; ranks need not choose the same.
      if ((s + me) % 3 == 0) {
        ddp.step(batch);
      } else if ((s + me) % 3 == 1) {
        ddp.forward(batch).backward().reduce().update();
      } else {
        ddp.forward(batch).backward().reduce_and_update();
      }
    }
    if (me % 2 == 0) joined.finish();  // and the others at the end of the scope
  }
  constexpr std::array names{"fc1.weight", "fc1.bias",   "fc2.weight",
                             "fc2.bias",   "fc3.weight", "fc3.bias"};
  std::size_t p = 0;
  Network::for_each_parameter(ddp, [&](const auto& view) {
    const std::string name = names[p++];
    const std::vector<double> want = c.at("params").at(name);
    require(want.size() == view.size(), "the size of " + name);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double have = view.data_handle()[i];
      require(std::abs(have - want[i]) <= 1e-9 * std::max(std::abs(want[i]), 1e-3),
              name + "[" + std::to_string(i) + "] is " + std::to_string(have) + ", PyTorch has " +
                  std::to_string(want[i]));
    }
  });
}

/// Trains every case of join.json that divides as `ByLive` says. Returns how many there are.
template <class Rendezvous, bool ByLive, class... Ps>
std::size_t train_cases() {
  using Divided = std::conditional_t<ByLive, UnevenInputs<Join, DivideByLive>, UnevenInputs<Join>>;
  std::size_t trained = 0;
  std::size_t number = 0;
  for (const nlohmann::json& c : reference("join.json")) {
    const std::string name = "join.json, case " + std::to_string(number++);
    const std::size_t world = c.at("world");
    BOOST_TEST_REQUIRE(c.at("batches_per_rank").size() == world, name);
    if (c.at("divide_by_initial_world_size") == ByLive) continue;
    ++trained;
    const Ends ends = ranks::run_processes<Rendezvous>(
        world, std::chrono::seconds(20), [&](auto& comm) { train_case<Divided, Ps...>(comm, c); });
    for (std::size_t r = 0; r < world; ++r)
      BOOST_TEST(ends[r] == "", name << ", rank " << r << ": " << ends[r]);
  }
  return trained;
}

/// A sheet with a buffer that forgets slowly: its value tells which batches it saw, in which order.
template <class... Elements>
struct Seeing : Sheet<Elements...> {
  using Buffers = BufferList<Buffer<"seen", double, 1>>;
  double forward(auto& step, const Entry& entry) {
    step.buffer("seen"_p)(0) = 0.5 * step.buffer("seen"_p)(0) + entry.loss;
    return entry.loss;
  }
};

/// Loops over batches, each rank with its own number of them.
struct Loops {
  std::size_t world = 1;
  std::size_t micro_batches = 1;
  bool by_live = false;
  bool leaves_out = false;  ///< some batches use no a, b or c
  double max_norm = std::numeric_limits<double>::infinity();
  std::size_t poisoned = dynamic;  ///< the batch of rank 0 whose gradient is not finite
  std::vector<std::vector<std::size_t>> batches{};  ///< by loop, then by rank

  Entry entry(std::size_t rank, std::size_t batch) const {
    Entry entry;
    for (std::size_t p = 0; p != 3; ++p) {
      entry.gradient[p] = wave(3 * rank + 5 * batch + p, 1, 1);
      entry.used[p] = !leaves_out || (rank + batch + p) % 3 != 0;
    }
    if (rank == 0 && batch == poisoned) entry.gradient[1] = std::nan("");
    entry.loss = 1 + static_cast<double>(rank) + 0.25 * static_cast<double>(batch);
    return entry;
  }

  std::string text() const {
    std::string all = std::to_string(world) + " ranks, " + std::to_string(micro_batches) +
                      " micro-batches, batches";
    for (const auto& loop : batches) {
      for (const std::size_t n : loop) all += " " + std::to_string(n);
      all += ";";
    }
    return all;
  }
};

/// What one process comes to.
struct Outcome {
  PlainSheet<plain::Adam> sheet{plain::Adam{.lr = 0.05, .weight_decay = 0.01, .decoupled = true}};
  double seen = 0;
  std::size_t rounds = 0;
};

inline Outcome simulate(const Loops& loops) {
  Outcome outcome;
  std::vector<double> seen(loops.world, 0);
  std::vector<std::size_t> first(loops.world, 0);
  for (const std::vector<std::size_t>& batches : loops.batches) {
    std::vector<std::size_t> next(loops.world, 0);
    std::size_t newest = 0;
    while (true) {
      std::array<double, 3> sum{};
      std::array<bool, 3> used{};
      std::vector<std::size_t> count(loops.world, 0);  // of micro-batches in this round
      std::size_t live = 0;
      std::size_t lowest = loops.world;
      for (std::size_t r = 0; r != loops.world; ++r) {
        count[r] = std::min(loops.micro_batches, batches[r] - next[r]);
        if (count[r] == 0) continue;
        ++live;
        lowest = std::min(lowest, r);
        for (std::size_t m = 0; m != count[r]; ++m) {
          const Entry entry = loops.entry(r, first[r] + next[r] + m);
          for (std::size_t p = 0; p != 3; ++p) {
            if (!entry.used[p]) continue;
            used[p] = true;
            sum[p] += entry.gradient[p] / static_cast<double>(count[r]);
          }
          // The buffers of the newest rank come before the batch that completes a step.
          if (m + 1 != loops.micro_batches) seen[r] = 0.5 * seen[r] + entry.loss;
        }
      }
      if (live == 0) break;
      const double given = seen[newest];
      for (std::size_t r = 0; r != loops.world; ++r) {
        seen[r] = given;
        if (count[r] == loops.micro_batches)
          seen[r] = 0.5 * given + loops.entry(r, first[r] + next[r] + count[r] - 1).loss;
        next[r] += count[r];
      }
      newest = lowest;
      ++outcome.rounds;
      double squares = 0;
      for (std::size_t p = 0; p != 3; ++p) {
        sum[p] /= static_cast<double>(loops.by_live ? live : loops.world);
        for (std::size_t i = 0; i != sheet_sizes[p]; ++i)
          squares += slope(sum[p], i) * slope(sum[p], i);
      }
      if (std::isnan(squares)) continue;
      const double factor = std::min(1.0, loops.max_norm / (std::sqrt(squares) + 1e-6));
      for (std::size_t p = 0; p != 3; ++p)
        if (used[p]) outcome.sheet.update(p, factor * sum[p]);
    }
    std::fill(seen.begin(), seen.end(), seen[newest]);
    for (std::size_t r = 0; r != loops.world; ++r) first[r] += batches[r];
  }
  outcome.seen = seen[0];
  return outcome;
}

/// One rank of them.
template <class... Ps>
void run_loops(auto& comm, const Loops& loops, const Outcome& want, double within = 1e-12) {
  const std::size_t me = comm.rank().value();
  DistributedDataParallel<Seeing<>, Optimizer<AdamW>, Ps...> ddp(comm);
  ddp.optimizer().lr = 0.05;
  std::size_t batch = 0;
  for (const std::vector<std::size_t>& batches : loops.batches) {
    auto joined = ddp.join();
    for (std::size_t s = 0; s != batches[me]; ++s) ddp.step(loops.entry(me, batch++));
  }
  compare(ddp, want.sheet, "parameters", within);
  require(ddp.updates() == want.rounds, "there were " + std::to_string(ddp.updates()) +
                                            " updates instead of " + std::to_string(want.rounds));
  require(std::abs(ddp.buffer("seen"_p)(0) - want.seen) <= 1e-12,
          "the buffer is " + std::to_string(ddp.buffer("seen"_p)(0)) + " instead of " +
              std::to_string(want.seen));
}

/// Random numbers of batches; some ranks may have none.
inline Loops random_loops(ranks::Chance& chance, std::size_t micro_batches) {
  Loops loops;
  loops.world = 1 + chance(4);
  loops.micro_batches = micro_batches;
  loops.batches.resize(2);
  for (auto& loop : loops.batches)
    for (std::size_t r = 0; r != loops.world; ++r) loop.push_back(chance(8));
  return loops;
}

template <class Rendezvous, class... Ps>
void check_loops(const Loops& loops) {
  const Outcome want = simulate(loops);
  const Ends ends =
      ranks::run_processes<Rendezvous>(loops.world, std::chrono::seconds(20),
                                       [&](auto& comm) { run_loops<Ps...>(comm, loops, want); });
  for (std::size_t r = 0; r < loops.world; ++r)
    BOOST_TEST(ends[r] == "", loops.text() << " rank " << r << ": " << ends[r]);
}

}  // namespace joining
