// SPDX-License-Identifier: Apache-2.0
// For random shapes, worlds and batches: ranks over shares of a batch train like one process over
// all of it, hold the same bits after every step, and do so again.
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "comm/repeat.hpp"
#include "lockstep/detail/core/hash.hpp"
#include "optim/plain.hpp"
#include "train/closeness.hpp"
#include "train/plain_mlp.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(training_properties)

namespace {

using namespace train;
using Network = PlainMlp<dynamic, dynamic, dynamic>;

constexpr std::size_t most_parameters = 6000;
using Result = std::array<double, most_parameters>;

struct Case {
  std::size_t world = 1;
  std::size_t in = 1, hidden = 1, out = 1;
  std::size_t rows = 1;  // of a rank's micro-batch
  std::size_t micro_batches = 1;
  std::size_t updates = 3;
  std::size_t salt = 0;
  As as = As::processes;

  Network network() const { return network_of(in, hidden, out); }
  /// Rank r's part of micro-batch m of update u.
  Samples share(std::size_t u, std::size_t m, std::size_t r) const {
    return reference_batch(rows, in, out, salt + u * micro_batches + m, r);
  }
  /// Everything of update u.
  Samples whole(std::size_t u) const {
    Samples all{in, {}, {}};
    for (std::size_t m = 0; m < micro_batches; ++m) {
      for (std::size_t r = 0; r < world; ++r) {
        const Samples part = share(u, m, r);
        all.x.insert(all.x.end(), part.x.begin(), part.x.end());
        all.y.insert(all.y.end(), part.y.begin(), part.y.end());
      }
    }
    return all;
  }
  std::string text() const {
    std::ostringstream out_text;
    out_text << world << (as == As::processes ? " processes, " : " threads, ") << in << "-"
             << hidden << "-" << out << ", " << rows << " rows, " << micro_batches
             << " micro-batches, salt " << salt;
    return out_text.str();
  }
};

Case random_case(ranks::Chance& chance, std::size_t micro_batches) {
  Case c;
  c.world = 1 + chance(4);
  c.in = 1 + chance(40);
  c.hidden = 1 + chance(40);
  c.out = 2 + chance(20);
  c.rows = 1 + chance(5);
  c.micro_batches = micro_batches;
  c.salt = chance(1000);
  c.as = chance(4) == 0 ? As::threads : As::processes;
  return c;
}

template <class F>
void for_each_number(const auto& step, const F& f) {
  std::size_t i = 0;
  Network::for_each_parameter(step, [&](const auto& view) {
    for (std::size_t k = 0; k < view.size(); ++k) f(i++, view.data_handle()[k]);
  });
}

/// An arena's tensors, all to be written.
struct Writable {
  const detail::Layout<Network>& layout;
  std::byte* data;
  auto param(auto key) const { return layout.view<HostMemory, false>(data, key); }
};

/// One process over the whole batch, without any of the library but its views.
template <class Rule>
std::vector<double> train_in_one_process(const Case& c, const Rule& rule, double max_norm) {
  Network network = c.network();
  const detail::Layout<Network> layout(network);
  const HostArena parameters(layout.plan().bytes), gradients(layout.plan().bytes);
  detail::BareStep<Network> step(network, {parameters.data(), gradients.data(), nullptr});
  Writable initial{layout, parameters.data()};
  network.initialize(initial);
  const Writable slopes{layout, gradients.data()};
  std::vector<Rule> rules(most_parameters, rule);
  for (std::size_t u = 0; u < c.updates; ++u) {
    const Samples batch = c.whole(u);
    network.forward(step, batch);
    network.backward(step, batch);
    std::vector<double> g(most_parameters);
    double squares = 0;
    for_each_number(slopes, [&](std::size_t i, double value) {
      g[i] = value;
      squares += value * value;
    });
    const double factor = std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6));
    for_each_number(initial,
                    [&](std::size_t i, double& value) { rules[i].update(value, factor * g[i]); });
  }
  std::vector<double> all;
  for_each_number(step, [&](std::size_t, double value) { all.push_back(value); });
  return all;
}

std::uint64_t hash_of_bits(const auto& ddp) {
  detail::Hash hash;
  for_each_number(ddp, [&](std::size_t, double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    hash.number(bits);
  });
  return hash.value();
}

/// Trains on ranks; parameters must be the same bits everywhere after every micro-batch. Returns
/// rank 0's.
template <class... Ps>
std::vector<double> train_on_ranks(const Case& c, const std::string& how) {
  const ranks::Common<Result> result;
  const Ends ends = ranks::run(c.as, c.world, [&](Shared& comm) {
    DistributedDataParallel<Network, Ps...> ddp(comm, c.network());
    ddp.optimizer().lr = 0.05;
    for (std::size_t u = 0; u < c.updates; ++u) {
      for (std::size_t m = 0; m < c.micro_batches; ++m) {
        ddp.step(c.share(u, m, comm.rank().value()));
        const std::uint64_t mine[] = {hash_of_bits(ddp)};
        std::vector<std::uint64_t> all(c.world);
        comm.all_gather(mine, all);
        for (const std::uint64_t other : all)
          require(other == mine[0], "the bits differ after update " + std::to_string(u));
      }
    }
    if (comm.rank() == Rank{0})
      for_each_number(ddp, [&](std::size_t i, double value) { (*result)[i] = value; });
  });
  const std::size_t count = (c.in + c.hidden + c.out) * c.hidden + 2 * c.hidden + c.out;
  for (std::size_t r = 0; r < c.world; ++r)
    BOOST_TEST(ends[r] == "", how << ", " << c.text() << ": rank " << r << ": " << ends[r]);
  return {result->begin(), result->begin() + static_cast<std::ptrdiff_t>(count)};
}

template <class... Ps>
void check_properties(const Case& c, const auto& rule, double max_norm) {
  using Pieces = Buckets<BucketLimits{200, 3000}>;
  const std::vector<double> one = train_in_one_process(c, rule, max_norm);
  const std::vector<double> shared = train_on_ranks<Ps...>(c, "shared");
  const std::vector<double> copies =
      train_on_ranks<Sharding<Replicated>, Pieces, Ps...>(c, "replicated");
  require_close(shared, one, c.text() + ": shared parameters against one process");
  require_close(copies, one, c.text() + ": replicated against one process");
  BOOST_TEST((train_on_ranks<Ps...>(c, "again") == shared), c.text() << ": runs differ");
  BOOST_TEST((train_on_ranks<Sharding<Replicated>, Pieces, Ps...>(c, "again") == copies),
             c.text() << ": runs differ, replicated");
}

constexpr double no_limit = std::numeric_limits<double>::infinity();

}  // namespace

BOOST_AUTO_TEST_CASE(ranks_train_like_one_process_with_momentum) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 60); ++i) {
    check_properties<Optimizer<SGDMomentum>>(random_case(chance, 1),
                                             plain::Sgd{.lr = 0.05, .momentum = 0.9}, no_limit);
  }
}

BOOST_AUTO_TEST_CASE(ranks_train_like_one_process_with_adamw_clipping_and_accumulation) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(4, 60); ++i) {
    check_properties<Optimizer<AdamW>, Accumulate<2>, Clip<0.3>>(
        random_case(chance, 2), plain::Adam{.lr = 0.05, .weight_decay = 0.01, .decoupled = true},
        0.3);
  }
}

BOOST_AUTO_TEST_SUITE_END()
