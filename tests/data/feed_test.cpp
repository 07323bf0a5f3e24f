// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/feed.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <string>
#include <vector>

#include "comm/ranks.hpp"
#include "lockstep/comm/groups.hpp"
#include "lockstep/topology/grid.hpp"
#include "lockstep/topology/transposed.hpp"

using namespace lockstep;
using ranks::require;

BOOST_AUTO_TEST_SUITE(feed)

namespace {

using Batch = LabelledBatch<float, int>;

/// A batch whose every element tells the number it was made with.
Batch make_batch(std::size_t rows, std::size_t width, int number) {
  Batch batch;
  batch.resize(rows, width);
  for (std::size_t i = 0; i < batch.inputs.size(); ++i)
    batch.inputs[i] = static_cast<float>(number) + static_cast<float>(i) / 1024;
  for (std::size_t i = 0; i < rows; ++i) {
    batch.labels[i] = number * 100 + static_cast<int>(i);
    batch.weights[i] = i % 2 == 0 ? 1.f : 0.f;
  }
  return batch;
}

void require_same(const Batch& got, const Batch& expected) {
  require(got.width == expected.width && got.size() == expected.size(), "the shape is another");
  require(got.inputs == expected.inputs, "inputs differ");
  require(got.labels == expected.labels, "labels differ");
  require(got.weights == expected.weights, "weights differ");
}

void require_success(const ranks::Ends& ends) {
  for (const std::string& end : ends) BOOST_TEST(end == "");
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_batch_of_any_size_reaches_all_ranks_from_any_root) {
  for (const std::size_t world : {1, 2, 4}) {
    require_success(ranks::run(ranks::As::processes, world, [&](auto& comm) {
      Batch batch = make_batch(3, 3, 99);  // what was there before is gone
      int number = 0;
      for (const std::size_t rows : {5, 0, 700, 1}) {
        for (const std::size_t width : {7, 784, 0}) {
          const Rank root{static_cast<std::size_t>(++number) % world};
          const Batch expected = make_batch(rows, width, number);
          if (comm.rank() == root) batch = expected;
          broadcast_batch(comm, batch, root);
          require_same(batch, expected);
        }
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(every_rank_gets_the_batch_that_is_its_own) {
  for (const std::size_t world : {1, 2, 4}) {
    require_success(ranks::run(ranks::As::processes, world, [&](auto& comm) {
      Batch mine;
      for (std::size_t turn = 0; turn < 6; ++turn) {
        // Rank 1 gets none at all, the others more than fits into one message.
        const auto expected = [&](std::size_t w) {
          return make_batch(w == 1 ? 0 : 50 * w + turn, 400 + w, static_cast<int>(w + turn));
        };
        const Rank root{turn % world};
        std::vector<Batch> batches;
        for (std::size_t w = 0; comm.rank() == root && w < world; ++w)
          batches.push_back(expected(w));
        scatter_batches(comm, batches, mine, root);
        require_same(mine, expected(comm.rank().value()));
      }
    }));
  }
}

BOOST_AUTO_TEST_CASE(one_scatters_to_leaders_and_groups_broadcast) {
  require_success(ranks::run(ranks::As::processes, 4, [](auto& comm) {
    constexpr Grid<4, 2> grid;
    auto group = join_groups(comm, grid);
    auto across = join_groups(comm, transpose(grid));
    const std::size_t g = grid.group_rank(comm.rank()).value();
    Batch batch;
    if (grid.local_group_rank(comm.rank()).value() == 0) {
      std::vector<Batch> batches;
      if (comm.rank() == Rank{0}) batches = {make_batch(4, 3, 0), make_batch(9, 5, 1)};
      scatter_batches(across, batches, batch, Rank{0});
    }
    broadcast_batch(group, batch, Rank{0});
    require_same(batch, g == 0 ? make_batch(4, 3, 0) : make_batch(9, 5, 1));
  }));
}

BOOST_AUTO_TEST_CASE(too_few_batches_are_an_error_on_all_ranks) {
  const auto ends = ranks::run(ranks::As::processes, 2, [](auto& comm) {
    Batch mine;
    scatter_batches(comm, std::vector<Batch>(1), mine, Rank{0});
  });
  BOOST_TEST(ends[0].find("rank 0, scatter_batches: 1 batches for 2 ranks; give root one") !=
             std::string::npos);
  BOOST_TEST(ends[1].find("rank 0") != std::string::npos);
}

BOOST_AUTO_TEST_SUITE_END()
