// SPDX-License-Identifier: Apache-2.0
// Batch norms over real processes: PyTorch's figures, and one process on the union.
#include "norm/synced.hpp"

#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/detail/core/random_stream.hpp"

BOOST_AUTO_TEST_SUITE(synced_norms)

namespace {

using namespace synced;

}  // namespace

BOOST_AUTO_TEST_CASE(uneven_batches_are_normalised_as_pytorch_does) {
  check_every_case<ranks::SharedMemory>();
}

// Rank 1 has no samples where there are three ranks or more, and one position is rows.
BOOST_AUTO_TEST_CASE(ranks_find_what_one_process_finds_on_the_union) {
  RandomStream random(Seed{21});
  for (const std::size_t world : {1u, 2u, 3u, 4u}) {
    for (std::size_t repeat = 0; repeat != 3; ++repeat) {
      const std::size_t channels = 1 + random() % 20;
      const std::size_t positions = repeat == 0 ? 1 : 1 + random() % 30;
      std::vector<Part> parts;
      for (std::size_t r = 0; r != world; ++r) {
        const std::size_t samples = r == 1 && world > 2 ? 0 : 2 + random() % 9;
        Part part{norm_test::random_numbers<double>(samples, channels, positions, random),
                  norm_test::random_numbers<double>(samples, channels, positions, random)};
        parts.push_back(std::move(part));
      }
      const bool has_relu = repeat != 1;
      const Expected expected = expected_of_union(parts, has_relu);
      BOOST_TEST_CONTEXT(world << " ranks, " << channels << " channels, " << positions
                               << " positions")
      check_ends(ranks::run_processes(world, std::chrono::seconds(20), [&](ranks::Shared& comm) {
        check_step(comm, parts, has_relu, expected);
      }));
    }
  }
}

BOOST_AUTO_TEST_CASE(batches_that_are_empty_everywhere_change_nothing) {
  check_ends(ranks::run_processes(2, std::chrono::seconds(20), [](ranks::Shared& comm) {
    const Part part{{0, 3, 4}, {0, 3, 4}};
    const std::vector<double> none(3, 0.0);
    check_step(comm, {part, part}, true, {{}, {}, none, none, none, {1, 1, 1}});
  }));
}

BOOST_AUTO_TEST_CASE(one_value_of_all_ranks_is_rejected_on_all) {
  const Ends ends = ranks::run_processes(2, std::chrono::seconds(20), [](ranks::Shared& comm) {
    DistributedDataParallel<Net, Norms<Synced>> ddp(comm, Net{.channels = 2});
    Part part{{comm.rank().value(), 2, 1}, {comm.rank().value(), 2, 1}};
    part.x.values = part.dy.values = std::vector<double>(2 * comm.rank().value());
    static_cast<void>(ddp.forward(part));
  });
  for (const std::string& words : ends)
    BOOST_TEST(words.find("expected more than 1 value per channel") != std::string::npos, words);
}

BOOST_AUTO_TEST_SUITE_END()
