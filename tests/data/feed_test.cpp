// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/data/feed.hpp"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <boost/test/unit_test.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks.hpp"
#include "data/fed.hpp"
#include "lockstep/detail/comm/groups.hpp"
#include "lockstep/detail/data/batch.hpp"
#include "lockstep/detail/data/tokens.hpp"
#include "lockstep/detail/topology/grid.hpp"

using namespace lockstep;
using namespace std::chrono_literals;
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

// Ranks 0, 1 and 3 of six tell their parts: the reader's, a leader's and a member's.
BOOST_AUTO_TEST_CASE(batches_go_from_the_reader_to_leaders_and_on_to_members) {
  constexpr Grid<6, 3> grid;
  const auto part = [&]<class Choice>(Choice, std::size_t rank) {
    const detail::FeedRoute route = detail::feed_route<Choice>(grid, Rank{rank});
    std::string words = std::to_string(route.reader.value()) + " reads, ";
    words += std::to_string(route.from.value()) + " sends:";
    for (const auto& [whose, to] : route.carried)
      words += " " + std::to_string(whose.value()) + " to " + std::to_string(to.value());
    return words;
  };
  BOOST_TEST(part(LeaderOfGroup{}, 0) == "0 reads, 0 sends: 1 to 1 2 to 2 0 to 0");
  BOOST_TEST(part(LeaderOfGroup{}, 3) == "3 reads, 3 sends: 4 to 4 5 to 5 3 to 3");
  BOOST_TEST(part(LeaderOfGroup{}, 4) == "3 reads, 3 sends: 4 to 4");
  BOOST_TEST(part(ScatterThenBroadcast{}, 0) ==
             "0 reads, 0 sends: 4 to 3 5 to 3 3 to 3 1 to 1 2 to 2 0 to 0");
  BOOST_TEST(part(ScatterThenBroadcast{}, 3) == "0 reads, 0 sends: 4 to 4 5 to 5 3 to 3");
  BOOST_TEST(part(ScatterThenBroadcast{}, 4) == "0 reads, 3 sends: 4 to 4");
}

BOOST_AUTO_TEST_CASE(an_archive_of_another_type_is_rejected) {
  fed::Rows rows;
  fed::Numbers{9}.load(std::vector<std::size_t>{4, 0, 8}, {Seed{1}, Epoch{2}}, rows);
  detail::ArchiveWriter writer;
  writer.put(rows);
  fed::Rows again;
  again.names.resize(7, "what was there before is gone");
  detail::ArchiveReader(writer.written()).take(again);
  BOOST_TEST((again == rows));
  Batch other;
  const auto is_rejection = [](const Error& error) {
    return std::string(error.what()).find("does not hold a batch of this type") !=
           std::string::npos;
  };
  BOOST_CHECK_EXCEPTION(detail::ArchiveReader(writer.written()).take(other), Error, is_rejection);
  // Neither is one that was cut anywhere, nor one that goes on.
  for (std::size_t size = 0; size < writer.size(); size += 1 + size / 3)
    BOOST_CHECK_EXCEPTION(detail::ArchiveReader(writer.written().first(size)).take(again), Error,
                          is_rejection);
  writer.put(std::uint8_t{0});
  BOOST_CHECK_EXCEPTION(detail::ArchiveReader(writer.written()).take(again), Error, is_rejection);
}

BOOST_AUTO_TEST_CASE(the_librarys_batches_are_packed) {
  const auto sent = []<class B>(const B& batch) {
    detail::ArchiveWriter writer;
    writer.put(batch);
    B got;
    detail::ArchiveReader(writer.written()).take(got);
    return got;
  };
  PaddedBatch<float, std::string> padded;
  padded.resize(2, 3);
  padded.inputs = {1, 2, 3, 4, 5, 0};
  padded.lengths = {3, 2};
  padded.labels = {"first", ""};
  padded.weights = {1, 0};
  const auto rows = sent(padded);
  BOOST_TEST((rows.width == 3 && rows.inputs == padded.inputs && rows.lengths == padded.lengths &&
              rows.labels == padded.labels && rows.weights == padded.weights));
  const RaggedBatch<Half, int> ragged{{Half(1.f), Half(2.f)}, {0, 2, 2}, {7, 8}, {1, 0}};
  const auto joined = sent(ragged);
  BOOST_TEST((joined.size() == 2 && float(joined.row(0)[1]) == 2.f && joined.row(1).empty()));
  BOOST_TEST((joined.labels == ragged.labels && joined.weights == ragged.weights));
  TokenBatch<std::uint16_t> tokens;
  tokens.resize(2, 2);
  tokens.tokens = {9, 8, 7, 6, 5, 50'000};
  tokens.weights = {1, 0};
  const auto windows = sent(tokens);
  BOOST_TEST((windows.length == 2 && windows.tokens == tokens.tokens &&
              windows.weights == tokens.weights));
}

BOOST_AUTO_TEST_CASE(fed_ranks_have_the_batches_that_they_would_have_read) {
  for (const std::size_t world : {1, 2, 4}) {
    require_success(ranks::run(ranks::As::processes, world, [](auto& comm) {
      fed::check<DistributedSampler<Masked, TorchShuffle>>(comm, {{0, 1, 26}});
      fed::check<DistributedSampler<Exact, KeyedShuffle>>(comm, {{27}});
    }));
  }
}

BOOST_AUTO_TEST_CASE(what_a_reader_throws_is_thrown_by_all_that_it_feeds_in_place_of_the_batch) {
  for (const bool scatters : {false, true}) {
    const auto ends = ranks::run(ranks::As::processes, 4, [&](auto& comm) {
      detail::FeedLine<ranks::Shared&> line(
          comm, fed::route_of(2, scatters, comm.world_size(), comm.rank()));
      // Rank 1 draws it in its fifth batch.
      const fed::Numbers numbers{40, line.reads(), 17};
      DistributedSampler<Padding, InOrder> sampler(40, comm.world_size(), comm.rank());
      DataLoader<fed::Numbers, decltype(sampler),
                 detail::FedBatches<fed::Numbers, decltype(sampler), decltype(line)>>
          loader(numbers, sampler, {.batch_size = 1, .workers = 2}, line);
      std::size_t batches = 0;
      std::string words;
      try {
        for ([[maybe_unused]] const auto& batch : loader) ++batches;
      } catch (const std::exception& error) {
        require(batches == 4, "it comes in place of batch " + std::to_string(batches));
        words = error.what();
      }
      comm.barrier();  // the end of a rank would end the others
      require(words.empty(), words);
    });
    for (std::size_t r = 0; r < (scatters ? 4 : 2); ++r) {
      BOOST_TEST(ends[r].find("sample 17 is bad") != std::string::npos, ends[r]);
      BOOST_TEST((ends[r].find("rank 0 failed: lockstep: rank 0") != std::string::npos) == (r != 0),
                 ends[r]);
    }
    if (!scatters) BOOST_TEST(ends[2] + ends[3] == "");
  }
}

// A rank whose program throws has asked for batches that the other has not, and does not ask for
// while it waits for the first. run_processes is the watchdog.
BOOST_AUTO_TEST_CASE(an_exception_on_one_rank_does_not_wait_for_batches) {
  for (const std::size_t culprit : {0, 1}) {
    const ranks::Common<std::atomic<bool>> has_thrown;
    const auto ends = ranks::run_processes(
        2, 120s,
        [&](auto& comm) {
          detail::FeedLine<ranks::Shared&> line(
              comm, fed::route_of(2, true, comm.world_size(), comm.rank()));
          const auto loop = [&] {
            const fed::Numbers numbers{200, line.reads()};
            DistributedSampler<Padding, InOrder> sampler(200, comm.world_size(), comm.rank());
            DataLoader<fed::Numbers, decltype(sampler),
                       detail::FedBatches<fed::Numbers, decltype(sampler), decltype(line)>>
                loader(numbers, sampler, {.batch_size = 5}, line);
            std::size_t batches = 0;
            for ([[maybe_unused]] const auto& batch : loader) {
              const bool is_culprit = comm.rank() == Rank{culprit};
              if (++batches == 3 && is_culprit) throw std::runtime_error("enough");
              while (batches == 2 && !is_culprit && !*has_thrown) std::this_thread::sleep_for(1ms);
            }
          };
          try {
            loop();
          } catch (...) {
            *has_thrown = true;
            throw;
          }
        },
        60s);
    BOOST_TEST(ends[culprit] == "enough");
    BOOST_TEST(ends[1 - culprit].find("rank " + std::to_string(culprit)) != std::string::npos,
               ends[1 - culprit]);
  }
}

BOOST_AUTO_TEST_CASE(a_reader_that_dies_is_named) {
  const auto ends = ranks::run_processes(
      2, 120s,
      [](auto& comm) {
        detail::FeedLine<ranks::Shared&> line(
            comm, fed::route_of(2, true, comm.world_size(), comm.rank()));
        const fed::Numbers numbers{200, line.reads()};
        DistributedSampler<Padding, InOrder> sampler(200, comm.world_size(), comm.rank());
        DataLoader<fed::Numbers, decltype(sampler),
                   detail::FedBatches<fed::Numbers, decltype(sampler), decltype(line)>>
            loader(numbers, sampler, {.batch_size = 5}, line);
        std::size_t batches = 0;
        for ([[maybe_unused]] const auto& batch : loader) {
          if (++batches == 3 && comm.rank() == Rank{0}) kill(getpid(), SIGKILL);
        }
      },
      60s);
  BOOST_TEST(ranks::tells_of_death(ends[1]), ends[1]);
  BOOST_TEST(ends[1].find("rank 0's process ended") != std::string::npos, ends[1]);
}

BOOST_AUTO_TEST_SUITE_END()
