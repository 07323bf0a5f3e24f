// SPDX-License-Identifier: Apache-2.0
// A network with batch norms on real processes: as PyTorch trains it, and, for random shapes and
// batches of different size, as one process trains it on the samples of all ranks.
#include "train/convnet_case.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include "comm/repeat.hpp"
#include "train/closeness.hpp"

BOOST_AUTO_TEST_SUITE(convolutional_networks)

namespace {

using namespace convnets;

constexpr std::size_t most_numbers = 4096;
using Result = std::array<double, most_numbers>;

struct Shares {
  Network::Sizes sizes;
  std::vector<std::size_t> rows;  // of each rank
  std::size_t salt = 0;

  static constexpr std::size_t steps = 3;

  std::size_t samples() const {
    std::size_t sum = 0;
    for (const std::size_t own : rows) sum += own;
    return sum;
  }
  /// All ranks divide by the mean number of samples: their average is the mean over all samples.
  Images share(std::size_t s, std::size_t rank) const {
    Images own = reference_images(sizes, rows[rank], salt + s, rank);
    own.divisor = static_cast<double>(samples()) / static_cast<double>(rows.size());
    return own;
  }
  Images whole(std::size_t s) const {
    Images all;
    for (std::size_t r = 0; r < rows.size(); ++r) all.add(share(s, r));
    all.divisor = static_cast<double>(samples());
    return all;
  }
  std::string text() const {
    std::ostringstream out;
    out << sizes.channels << "-" << sizes.first << "-" << sizes.second << "-" << sizes.classes
        << " channels, side " << sizes.side << ", salt " << salt << ", rows";
    for (const std::size_t own : rows) out << " " << own;
    return out.str();
  }
};

Shares random_shares(ranks::Chance& chance) {
  Shares c{{1 + chance(2), 4 + chance(6), 1 + chance(4), 1 + chance(4), 2 + chance(5)},
           std::vector<std::size_t>(1 + chance(4)),
           chance(1000)};
  while (c.samples() == 0)
    for (std::size_t& own : c.rows) own = chance(5);
  return c;
}

/// Trains on `world` ranks; `batch(s, rank)` is a rank's. After every step all ranks have the same
/// parameters and, where norms are synced, the same running statistics; those of the end are
/// returned.
template <class... Ps>
std::vector<double> train_on_ranks(const Shares& c, std::size_t world, const auto& batch) {
  const ranks::Common<Result> result;
  const ranks::Common<std::size_t> count;
  const Ends ends = ranks::run_processes(world, std::chrono::seconds(20), [&](auto& comm) {
    DistributedDataParallel<Network, Optimizer<SGD>, Ps...> ddp(comm, Network(c.sizes));
    ddp.optimizer().lr = 0.05;
    constexpr bool agree = (std::is_same_v<Ps, Norms<Synced>> || ...);
    std::vector<double> own;
    for (std::size_t s = 0; s < Shares::steps; ++s) {
      ddp.step(batch(s, comm.rank().value()));
      own = numbers_of(ddp, world == 1 || agree);
      std::vector<double> all(world * own.size());
      comm.all_gather(own, all);
      for (std::size_t i = 0; i < all.size(); ++i)
        require(all[i] == own[i % own.size()], "ranks differ after step " + std::to_string(s));
    }
    require(own.size() <= most_numbers, "the network is too large for this test");
    if (comm.rank() == Rank{0}) {
      std::copy(own.begin(), own.end(), result->begin());
      *count = own.size();
    }
  });
  for (std::size_t r = 0; r < world; ++r)
    BOOST_TEST(ends[r] == "", c.text() << ": rank " << r << ": " << ends[r]);
  return {result->begin(), result->begin() + static_cast<std::ptrdiff_t>(*count)};
}

template <class... Ps>
std::vector<double> train_together(const Shares& c) {
  return train_on_ranks<Ps...>(c, c.rows.size(),
                               [&](std::size_t s, std::size_t rank) { return c.share(s, rank); });
}

std::vector<double> train_alone(const Shares& c) {
  return train_on_ranks<Norms<Synced>>(c, 1,
                                       [&](std::size_t s, std::size_t) { return c.whole(s); });
}

/// Of the parameters, where one has no buffers.
double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

}  // namespace

BOOST_AUTO_TEST_CASE(synced_norms_train_as_pytorch_does_in_one_process) {
  check_every_case<ranks::SharedMemory, Norms<Synced>>(8);
}

BOOST_AUTO_TEST_CASE(synced_norms_train_as_pytorch_does_while_buckets_are_under_way) {
  check_every_case<ranks::SharedMemory, Norms<Synced>, Sharding<Replicated>,
                   Buckets<BucketLimits{100, 400}>>(4);
}

BOOST_AUTO_TEST_CASE(ranks_with_different_numbers_of_samples_train_like_one_process_on_all) {
  ranks::Chance chance;
  for (int i = 0; i < ranks::repetitions(6, 100); ++i) {
    const Shares c = random_shares(chance);
    const std::vector<double> together = train_together<Norms<Synced>>(c);
    train::require_close(together, train_alone(c), c.text());
    BOOST_TEST((train_together<Norms<Synced>>(c) == together), c.text() << ": runs differ");
  }
}

// In a world of one there is nothing to share. In a larger one statistics over a rank's own samples
// are others, and so is what is trained with them.
BOOST_AUTO_TEST_CASE(local_norms_differ_from_synced_ones_unless_a_rank_is_alone) {
  Shares c{{1, 8, 2, 3, 4}, {4}, 5};
  BOOST_TEST((train_together<Norms<Local>>(c) == train_together<Norms<Synced>>(c)));
  c.rows = {3, 3};
  const std::vector<double> alone = train_alone(c);
  BOOST_TEST(largest_difference(train_together<Norms<Synced>>(c), alone) < 1e-10);
  BOOST_TEST(largest_difference(train_together<Norms<Local>>(c), alone) > 1e-3);
}

BOOST_AUTO_TEST_SUITE_END()
