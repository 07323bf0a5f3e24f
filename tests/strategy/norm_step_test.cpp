// SPDX-License-Identifier: Apache-2.0
// The ranks over which norms take their statistics, as a model's step gives them, and the buffers
// that need no broadcast because of them.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/detail/topology/grid.hpp"
#include "lockstep/detail/trainer/wrappers.hpp"
#include "train/sheet.hpp"

BOOST_AUTO_TEST_SUITE(norm_steps)

namespace {

using namespace train;

/// A batch that DP can cut.
struct Numbers {
  std::vector<double> all;
  std::size_t size() const { return all.size(); }
  double sum() const { return std::accumulate(all.begin(), all.end(), 0.0); }
  Numbers slice(std::size_t first, std::size_t count) const {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
    return {{begin, begin + static_cast<std::ptrdiff_t>(count)}};
  }
};

/// A buffer that says that it is a norm's.
struct RunningMean : Buffer<"mean", double, 1> {
  static constexpr bool is_batch_norm = true;
};

/// Its loss is the mean of all ranks' numbers; the gradient of a is their sum, and of b one.
template <class Statistic>
struct Pool {
  using Parameters = ParameterList<Parameter<"a", double, 2>, Parameter<"b", double, 2>>;
  using Buffers = BufferList<Scope<"norm", BufferList<Statistic>>>;

  std::size_t counted = 0;  // ranks, in the latest forward pass
  std::vector<double> met;  // in the buffer, by every forward pass in training
  const char* trouble = nullptr;

  void initialize(auto& initial) const {
    initial.param("a"_p)(0) = initial.param("b"_p)(0) = 0;
    initial.buffer("norm.mean"_p)(0) = -1;
  }

  double forward(auto& step, const Numbers& batch) {
    const auto& ranks = step.norm_ranks();
    constexpr bool communicates = std::remove_cvref_t<decltype(ranks)>::communicates;
    static_assert(!communicates || std::decay_t<decltype(step)>::is_training());
    if (trouble != nullptr) throw std::runtime_error(trouble);
    counted = ranks.world();
    const std::vector<double> own{static_cast<double>(batch.size()), batch.sum()};
    std::vector<double> all = own;
    if constexpr (communicates) {
      all.resize(2 * ranks.world());
      ranks.all_gather(std::span<const double>(own), std::span<double>(all));
      require(all[2 * ranks.rank().value() + 1] == own[1], "its own packet is not at its place");
    }
    double samples = 0;
    double sum = 0;
    for (std::size_t r = 0; r < counted; ++r) {
      samples += all[2 * r];
      sum += all[2 * r + 1];
    }
    const double mean = sum / samples;
    if (!step.is_training()) return mean;
    met.push_back(step.buffer("norm.mean"_p)(0));
    step.buffer("norm.mean"_p)(0) = mean;
    return mean;
  }

  /// The bucket of b is under way while the norm's sum is taken.
  void backward(auto& step, const Numbers& batch) {
    if constexpr (uses<decltype(step)>("b"_p)) step.set_grad("b"_p, {1, 1});
    const auto& ranks = step.norm_ranks();
    double sum[] = {batch.sum()};
    if constexpr (std::remove_cvref_t<decltype(ranks)>::communicates)
      ranks.all_reduce(std::span<double>(sum));
    step.set_grad("a"_p, {sum[0], 0});
  }
};
using Norm = Pool<RunningMean>;
using Pieces = Buckets<BucketLimits{0, 0}>;

/// A rank's numbers in a step; some have none.
Numbers numbers_of(std::size_t rank, std::size_t step) {
  Numbers batch;
  for (std::size_t i = 0; i < (rank + 2 * step + 1) % 3; ++i)
    batch.all.push_back(static_cast<double>(1 + rank + 10 * step + i));
  if (batch.all.empty() && rank == 0) batch.all = {0.5};
  return batch;
}

/// All numbers of ranks [first, last).
Numbers union_of(std::size_t first, std::size_t last, std::size_t step) {
  Numbers all;
  for (std::size_t r = first; r < last; ++r) {
    const Numbers own = numbers_of(r, step);
    all.all.insert(all.all.end(), own.all.begin(), own.all.end());
  }
  return all;
}

double mean_of(const Numbers& batch) { return batch.sum() / static_cast<double>(batch.size()); }

/// Statistics over groups of so many ranks; `by_batch` batches make an update.
template <class Ddp>
void norms_case(std::size_t world, std::size_t group, std::size_t by_batch, bool broadcasts,
                auto... set) {
  all_well(world, [&](Shared& comm) {
    const std::size_t me = comm.rank().value();
    const std::size_t first = me / group * group;
    Ddp ddp(comm);
    ddp.optimizer().lr = 1;
    double a = 0;
    std::vector<double> met;
    double mean = -1;
    for (std::size_t s = 0; s < 4; ++s) {
      met.push_back(broadcasts && s != 0 ? mean_of(union_of(0, group, s - 1)) : mean);
      mean = mean_of(union_of(first, first + group, s));
      require(ddp.step(set..., numbers_of(me, s)) == mean, "the loss is another");
      require(ddp.model().counted == group, "other ranks");
      require(ddp.buffer("norm.mean"_p)(0) == mean, "the buffer is another");
      require(ddp.model().met == met, "the buffer was another before the step");
      a -= static_cast<double>(group) / static_cast<double>(world * by_batch) *
           union_of(0, world, s).sum();
      if ((s + 1) % by_batch == 0) require(ddp.param("a"_p)(0) == a, "the parameter is another");
      // An evaluation communicates nothing: one rank makes it alone.
      if (me == 1) {
        require(ddp.evaluate(Numbers{{4, 6}}) == 5, "the evaluation is another");
        require(ddp.model().counted == 1, "an evaluation has counted ranks");
      }
    }
  });
}

using Within = DistributedDataParallel<Norm, Norms<Synced, WithinGroup>, Groups<Grid<dynamic, 2>>,
                                       Sharding<ZeroRedundancy, Gradients>, Pieces>;
using OneSubgraph =
    DistributedDataParallel<Norm, Norms<Synced>, Sharding<Replicated>, Pieces, Accumulate<2>,
                            UnusedParameters<Subgraphs<SameOnAllRanks, Subgraph<"front", "a">>>>;

template <class Model, class... Ps>
using Traits = detail::ReplicaTraits<Model, CanonicalPolicies<Ps...>>;

// Only what ranks could differ in is broadcast or averaged.
static_assert(Traits<Norm>::broadcasts_buffers);
static_assert(!Traits<Norm, Norms<Synced>>::broadcasts_buffers);
static_assert(!Traits<Norm, Norms<Synced>, Buffers<Synced>>::averages_buffers);
static_assert(Traits<Norm, Norms<Local>, Buffers<Synced>>::averages_buffers);
static_assert(Traits<Norm, Norms<Synced, WithinGroup>, Groups<Grid<4, 2>>>::broadcasts_buffers);
static_assert(Traits<Pool<Buffer<"mean", double, 1>>, Norms<Synced>>::broadcasts_buffers);
static_assert(!Traits<Norm, Norms<Synced>, World<1>>::syncs_norms);

/// A norm beside a buffer that each rank may write as it likes.
struct Beside : Norm {
  using Buffers = BufferList<RunningMean, Buffer<"own", double, 1>>;
};
static_assert(Traits<Beside, Norms<Synced>>::broadcasts_buffers);
static_assert(Traits<Beside, Norms<Synced>, Buffers<Synced>>::averages_buffers);

}  // namespace

BOOST_AUTO_TEST_CASE(norms_are_taken_over_all_ranks) {
  for (const std::size_t world : {1, 2, 4})
    norms_case<DistributedDataParallel<Norm, Norms<Synced>>>(world, world, 1, false);
}

BOOST_AUTO_TEST_CASE(norms_are_taken_over_the_ranks_of_a_group_while_shards_are_under_way) {
  for (const std::size_t world : {2, 4}) norms_case<Within>(world, 2, 1, true);
}

BOOST_AUTO_TEST_CASE(norms_are_taken_in_every_micro_batch_of_a_sub_graph) {
  for (const std::size_t world : {1, 3}) norms_case<OneSubgraph>(world, world, 2, false, "front"_s);
}

BOOST_AUTO_TEST_CASE(a_rank_that_fails_is_told_to_those_that_wait_for_its_statistics) {
  const Ends ends = ranks::run(As::processes, 3, [](Shared& comm) {
    DistributedDataParallel<Norm, Norms<Synced>> ddp(comm);
    ddp.step(numbers_of(comm.rank().value(), 0));
    if (comm.rank() == Rank{1}) ddp.model().trouble = "the layer is out of luck";
    ddp.step(numbers_of(comm.rank().value(), 1));
  });
  all_say(ends, "the layer is out of luck");
}

BOOST_AUTO_TEST_CASE(replicas_of_dp_take_norms_together) {
  using Dp = DataParallel<Norm, Norms<Synced>>;
  const Watchdog watchdog;
  for (const std::size_t replicas : {1, 2, 3}) {
    Dp dp({.replicas = replicas});
    dp.optimizer().lr = 1;
    double a = 0;
    for (std::size_t s = 0; s < 3; ++s) {
      Numbers batch{{1, 4, 2, 8, 5, 7}};
      batch.all.resize(6 - s);
      BOOST_TEST(std::abs(dp.step(batch) - mean_of(batch)) < 1e-12);
      a -= batch.sum();
      BOOST_TEST(std::abs(dp.param("a"_p)(0) - a) < 1e-12);
      dp.for_each_model([&](const Norm& model) { BOOST_TEST(model.counted == replicas); });
    }
    // Nothing is begun with a batch that leaves a replica out; evaluations may.
    if (replicas == 3) {
      std::string words;
      try {
        dp.step(Numbers{{1, 2}});
      } catch (const std::exception& error) {
        words = error.what();
      }
      BOOST_TEST(words.find("replica 2 has no sample of a batch of 2") != std::string::npos, words);
      BOOST_TEST(dp.evaluate(Numbers{{1, 2}}) == 1.5);
      dp.step(Numbers{{1, 2, 3}});
      BOOST_TEST(std::abs(dp.param("a"_p)(0) - (a - 6)) < 1e-12);
    }
  }
  // One that fails would leave the others waiting: the job is over, and says so.
  Dp dp({.replicas = 2});
  bool is_first = true;
  dp.for_each_model([&](Norm& model) {
    if (!std::exchange(is_first, false)) model.trouble = "the layer is out of luck";
  });
  for (int again = 0; again < 2; ++again) {
    std::string words;
    try {
      dp.step(Numbers{{1, 2}});
    } catch (const std::exception& error) {
      words = error.what();
    }
    BOOST_TEST(words.find("the layer is out of luck") != std::string::npos, words);
  }
}

BOOST_AUTO_TEST_SUITE_END()
