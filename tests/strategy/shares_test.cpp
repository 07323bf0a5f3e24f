// SPDX-License-Identifier: Apache-2.0
// Who gets which rows of a batch.
#include "lockstep/detail/strategy/scatter.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(shares)

using namespace lockstep::detail;

namespace {

using Sizes = std::vector<std::size_t>;

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

BOOST_AUTO_TEST_CASE(shares_are_all_rows_in_order) {
  for (const bool evenly : {false, true}) {
    for (std::size_t size = 1; size < 40; ++size) {
      for (std::size_t n = 1; n < 12; ++n) {
        std::size_t next = 0;
        for (std::size_t i = 0; i < n; ++i) {
          const RowRange rows = BatchCut{n, evenly}.rows(size, i);
          BOOST_TEST_REQUIRE(rows.first == next);
          next += rows.count;
        }
        BOOST_TEST_REQUIRE(next == size);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(even_shares_differ_by_one_row_and_the_first_are_the_longer_ones) {
  const auto sizes = [](std::size_t size, std::size_t n) {
    Sizes all;
    for (std::size_t i = 0; i < n; ++i) all.push_back(even_share(size, n, i).count);
    return all;
  };
  BOOST_TEST((sizes(8, 4) == Sizes{2, 2, 2, 2}));
  BOOST_TEST((sizes(10, 3) == Sizes{4, 3, 3}));
  BOOST_TEST((sizes(5, 4) == Sizes{2, 1, 1, 1}));
  BOOST_TEST((sizes(2, 3) == Sizes{1, 1, 0}));
}

BOOST_AUTO_TEST_SUITE_END()
