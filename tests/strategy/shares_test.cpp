// SPDX-License-Identifier: Apache-2.0
// Who gets which rows of a batch.
#include "lockstep/strategy/scatter.hpp"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(shares)

using namespace lockstep::detail;

namespace {

using Sizes = std::vector<std::size_t>;

Sizes weighted_sizes(std::size_t size, const std::vector<double>& weights) {
  Sizes sizes;
  std::size_t next = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const RowRange rows = weighted_share(size, weights, i);
    BOOST_TEST_REQUIRE(rows.first == next);
    next += rows.count;
    sizes.push_back(rows.count);
  }
  BOOST_TEST_REQUIRE(next == size);
  return sizes;
}

}  // namespace

BOOST_AUTO_TEST_CASE(chunks_have_the_sizes_that_torch_chunk_gives) {
  struct Known {
    std::size_t size, replicas;
    Sizes sizes;
  };
  // [t.size(0) for t in torch.arange(size).chunk(replicas)], PyTorch 2.9.1
  const std::vector<Known> known{{1, 1, {1}},
                                 {1, 4, {1}},
                                 {2, 4, {1, 1}},
                                 {3, 4, {1, 1, 1}},
                                 {4, 4, {1, 1, 1, 1}},
                                 {5, 4, {2, 2, 1}},
                                 {6, 4, {2, 2, 2}},
                                 {7, 4, {2, 2, 2, 1}},
                                 {8, 4, {2, 2, 2, 2}},
                                 {9, 4, {3, 3, 3}},
                                 {10, 4, {3, 3, 3, 1}},
                                 {7, 3, {3, 3, 1}},
                                 {10, 3, {4, 4, 2}},
                                 {3, 2, {2, 1}},
                                 {16, 6, {3, 3, 3, 3, 3, 1}},
                                 {13, 6, {3, 3, 3, 3, 1}},
                                 {12, 8, {2, 2, 2, 2, 2, 2}},
                                 {100, 8, {13, 13, 13, 13, 13, 13, 13, 9}}};
  for (const Known& k : known) {
    Sizes sizes;
    for (std::size_t i = 0; i != k.replicas && chunk(k.size, k.replicas, i).count != 0; ++i)
      sizes.push_back(chunk(k.size, k.replicas, i).count);
    BOOST_TEST(sizes == k.sizes, k.size << " rows for " << k.replicas << " replicas");
  }
}

BOOST_AUTO_TEST_CASE(chunks_are_all_rows_in_order) {
  for (std::size_t size = 1; size < 40; ++size) {
    for (std::size_t n = 1; n < 12; ++n) {
      std::size_t next = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const RowRange rows = chunk(size, n, i);
        BOOST_TEST_REQUIRE(rows.first == next);
        next += rows.count;
      }
      BOOST_TEST_REQUIRE(next == size);
    }
  }
}

BOOST_AUTO_TEST_CASE(weights_are_shares_and_remainders_go_to_the_largest) {
  BOOST_TEST((weighted_sizes(8, {1, 1, 1, 1}) == Sizes{2, 2, 2, 2}));
  BOOST_TEST((weighted_sizes(8, {3, 1}) == Sizes{6, 2}));
  BOOST_TEST((weighted_sizes(10, {1, 1, 1}) == Sizes{4, 3, 3}));
  BOOST_TEST((weighted_sizes(10, {0.26, 0.37, 0.37}) == Sizes{2, 4, 4}));
  BOOST_TEST((weighted_sizes(7, {1, 2, 1}) == Sizes{2, 3, 2}));  // 1.75, 3.5, 1.75
  BOOST_TEST((weighted_sizes(3, {1, 0.01, 1}) == Sizes{2, 0, 1}));
}

BOOST_AUTO_TEST_CASE(any_weights_share_all_rows_to_within_one) {
  std::mt19937 random(3);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> weights(1 + random() % 9);
    for (double& weight : weights) weight = 1e-3 + static_cast<double>(random() % 1000);
    const std::size_t size = random() % 200;
    const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
    const Sizes sizes = weighted_sizes(size, weights);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double exact = static_cast<double>(size) * weights[i] / all;
      BOOST_TEST_REQUIRE(std::abs(static_cast<double>(sizes[i]) - exact) < 1);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
