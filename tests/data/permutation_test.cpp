// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/data/order.hpp"

#include <algorithm>
#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_permutation)

namespace {

using Items = std::vector<std::uint32_t>;

Items torch_items(std::size_t n, std::uint64_t seed) {
  Items items(n);
  detail::torch_permutation(std::span(items), seed);
  return items;
}

Items keyed_items(std::size_t n, std::uint64_t key) {
  const detail::KeyedPermutation permutation(n, key);
  Items items(n);
  for (std::size_t i = 0; i < n; ++i) items[i] = static_cast<std::uint32_t>(permutation[i]);
  return items;
}

/// Blocks of so many samples, windows of so many blocks.
struct Blocks {
  std::size_t samples;
  std::size_t block;
  std::size_t window;

  Items items(std::uint64_t key) const {
    const detail::BlockOrder order(samples, block, window, key);
    Items items(samples);
    for (std::size_t i = 0; i < samples; ++i) items[i] = static_cast<std::uint32_t>(order[i]);
    return items;
  }
};

std::vector<Blocks> random_blocks() {
  std::mt19937_64 random(19);
  std::vector<Blocks> cases{{0, 4, 2}, {1, 1, 1}, {7, 100, 100}, {100, 1, 7}, {100, 7, 1}};
  for (int i = 0; i < 150; ++i)
    cases.push_back({random() % 400, 1 + random() % 40, 1 + random() % 12});
  return cases;
}

bool is_permutation_of_all(Items items) {
  std::sort(items.begin(), items.end());
  for (std::size_t i = 0; i < items.size(); ++i)
    if (items[i] != i) return false;
  return true;
}

/// How many standard deviations the chi-square statistic of `counts` is above its mean, if all
/// should be equal.
double surprise(const std::vector<std::size_t>& counts) {
  const double total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), 0ul));
  const double expected = total / static_cast<double>(counts.size());
  double chi2 = 0;
  for (std::size_t count : counts) {
    const double off = static_cast<double>(count) - expected;
    chi2 += off * off / expected;
  }
  const double freedom = static_cast<double>(counts.size() - 1);
  return (chi2 - freedom) / std::sqrt(2 * freedom);
}

}  // namespace

BOOST_AUTO_TEST_CASE(blocks_of_draws_are_the_standard_generators) {
  for (std::uint32_t seed : {0u, 1u, 5489u, 0xffffffffu}) {
    std::mt19937 standard(seed);
    detail::MersenneTwister ours(seed);
    detail::MersenneTwister::Block block{};
    for (int i = 0; i < 5; ++i) {
      ours.draw(block);
      for (std::uint32_t draw : block) BOOST_TEST_REQUIRE(draw == standard());
    }
  }
}

BOOST_AUTO_TEST_CASE(known_permutations_of_pytorch_come_out) {
  BOOST_TEST(torch_items(10, 0) == (Items{4, 1, 7, 5, 3, 9, 0, 8, 6, 2}));
  BOOST_TEST(torch_items(10, 42) == (Items{2, 6, 1, 8, 4, 5, 0, 9, 3, 7}));
  BOOST_TEST(torch_items(10, (1ull << 32) + 42) == torch_items(10, 42));
}

/// Division by doubles in blocks against the formula, across the ends of blocks.
BOOST_AUTO_TEST_CASE(blocks_swap_what_the_formula_swaps) {
  for (std::size_t n : {0, 1, 2, 3, 623, 624, 625, 626, 1248, 1249, 1250, 20000}) {
    Items expected(n);
    std::iota(expected.begin(), expected.end(), 0u);
    std::mt19937 draw(static_cast<std::uint32_t>(n));
    for (std::size_t i = 0; i + 1 < n; ++i) std::swap(expected[i], expected[i + draw() % (n - i)]);
    BOOST_TEST(torch_items(n, n) == expected);
  }
}

BOOST_AUTO_TEST_CASE(a_draw_divided_as_doubles_leaves_the_integers_remainder) {
  std::mt19937_64 random(1);
  const auto check = [](std::uint32_t draw, std::uint32_t choices) {
    const auto quotient = static_cast<std::uint32_t>(static_cast<double>(draw) / choices);
    BOOST_TEST_REQUIRE(quotient == draw / choices);
  };
  for (int i = 0; i < 100'000; ++i) {
    const auto choices = static_cast<std::uint32_t>(1 + random() % detail::wide_draws_from);
    const auto draw = static_cast<std::uint32_t>(random());
    check(draw, choices);
    check(draw / choices * choices, choices);      // exact
    check(draw / choices * choices - 1, choices);  // and just below
  }
  check(0xffffffffu, 1);
}

BOOST_AUTO_TEST_CASE(huge_sets_are_shuffled_inside_out_with_64_bit_draws) {
  BOOST_TEST(detail::wide_draws_from == 214748364u);
  for (std::size_t n : {0, 1, 2, 311, 312, 313, 1000}) {
    Items expected(n);
    std::mt19937 draw(9);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t high = draw();
      const std::size_t z = (high << 32 | draw()) % (i + 1);
      expected[i] = static_cast<std::uint32_t>(i);
      expected[i] = expected[z];
      expected[z] = static_cast<std::uint32_t>(i);
    }
    Items items(n);
    detail::shuffle_with_wide_draws(std::span(items), 9);
    BOOST_TEST(items == expected);
    std::vector<std::uint64_t> wide(n);
    detail::shuffle_with_wide_draws(std::span(wide), 9);
    BOOST_TEST(std::equal(wide.begin(), wide.end(), expected.begin(), expected.end()));
  }
}

BOOST_AUTO_TEST_CASE(a_keyed_permutation_is_a_bijection_of_any_size) {
  for (std::size_t n = 0; n < 300; ++n)
    BOOST_TEST_REQUIRE(is_permutation_of_all(keyed_items(n, n)), n);
  for (std::size_t n : {1023, 1024, 1025, 65537, 100'000})
    BOOST_TEST(is_permutation_of_all(keyed_items(n, 3)), n);
}

BOOST_AUTO_TEST_CASE(a_keyed_permutation_is_the_same_on_every_platform) {
  BOOST_TEST(keyed_items(10, 0) == (Items{0, 6, 2, 1, 8, 3, 9, 5, 4, 7}));
  BOOST_TEST(detail::KeyedPermutation(std::size_t{1} << 63, 7)[12345] == 1972783878397595067u);
  static_assert(detail::KeyedPermutation(1, 5)[0] == 0);
  BOOST_CHECK_THROW(detail::KeyedPermutation((std::size_t{1} << 63) + 1, 0), Error);
}

/// All orders of few items must be equally likely: over keys that count up, as epochs do.
BOOST_AUTO_TEST_CASE(every_order_of_few_items_is_as_likely) {
  for (std::size_t n : {3, 4, 5}) {
    std::size_t orders = 1;
    for (std::size_t i = 2; i <= n; ++i) orders *= i;
    std::map<Items, std::size_t> seen;
    for (std::uint64_t key = 0; key < 200 * orders; ++key) ++seen[keyed_items(n, key)];
    BOOST_TEST(seen.size() == orders);
    std::vector<std::size_t> counts;
    for (const auto& [order, count] : seen) counts.push_back(count);
    BOOST_TEST(surprise(counts) < 4., n);
  }
}

/// Where an item lands, and how far apart two neighbours land, must look like chance.
BOOST_AUTO_TEST_CASE(places_and_distances_are_spread_evenly) {
  constexpr std::size_t n = 1000;
  constexpr std::size_t bins = 50;
  std::vector<std::size_t> places(bins);
  std::vector<std::size_t> distances(bins);
  std::size_t fixed_points = 0;
  for (std::uint64_t key = 0; key < 300; ++key) {
    const detail::KeyedPermutation permutation(n, key);
    for (std::size_t i : {0, 1, 499, 500, 998}) {
      const std::size_t a = permutation[i];
      const std::size_t b = permutation[i + 1];
      ++places[a * bins / n];
      ++distances[(a + n - b) % n * bins / n];
    }
    for (std::size_t i = 0; i < n; ++i) fixed_points += permutation[i] == i;
  }
  BOOST_TEST(surprise(places) < 4.);
  BOOST_TEST(surprise(distances) < 4.);
  BOOST_TEST((fixed_points > 240u && fixed_points < 360u));  // one a permutation, on average
}

BOOST_AUTO_TEST_CASE(an_order_of_blocks_is_a_permutation_of_any_size) {
  for (const Blocks& blocks : random_blocks()) {
    BOOST_TEST_CONTEXT(blocks.samples << " samples, blocks of " << blocks.block << ", windows of "
                                      << blocks.window) {
      for (std::uint64_t key = 0; key < 3; ++key)
        BOOST_TEST_REQUIRE(is_permutation_of_all(blocks.items(key)));
    }
  }
}

/// A window's places draw from its blocks alone, and use them up: a disk reads `window` pieces
/// until they are over, and nothing twice.
BOOST_AUTO_TEST_CASE(a_window_touches_its_own_blocks_only) {
  for (const auto& [samples, block, window] : random_blocks()) {
    BOOST_TEST_CONTEXT(samples << " samples, blocks of " << block << ", windows of " << window) {
      const Items items = Blocks{samples, block, window}.items(samples);
      std::size_t over = 0;
      std::size_t windows = 0;
      for (std::size_t index = 0; index != samples; ++windows) {
        std::map<std::size_t, std::size_t> left;  // samples of each block that are still to come
        const auto is_used_up = [&] {
          return std::all_of(left.begin(), left.end(), [](auto& each) { return each.second == 0; });
        };
        do {
          const std::size_t of = items[index] / block;
          const std::size_t size = std::min(block, samples - of * block);
          if (left.try_emplace(of, size).second) ++over;
          --left[of];
          BOOST_TEST_REQUIRE(left.size() <= window);
          ++index;
        } while (index != samples && !(left.size() == window && is_used_up()));
        BOOST_TEST_REQUIRE(is_used_up());
      }
      const std::size_t blocks = (samples + block - 1) / block;
      BOOST_TEST(over == blocks);
      BOOST_TEST(windows == (blocks + window - 1) / window);
    }
  }
}

BOOST_AUTO_TEST_CASE(an_order_of_blocks_is_the_same_on_every_platform) {
  BOOST_TEST((Blocks{10, 3, 2}.items(0) == Items{6, 7, 8, 1, 0, 2, 3, 4, 5, 9}));
  static_assert(detail::BlockOrder(1, 4096, 16, 5)[0] == 0);
  const std::size_t many = (std::size_t{1} << 63) - 5;
  BOOST_TEST(detail::BlockOrder(many, 4096, 16, 7)[many - 1] == 1752222844897529852u);
}

/// One window with everything in it shuffles as a permutation does, also with a short block; and
/// the short block is as likely in any slot.
BOOST_AUTO_TEST_CASE(orders_of_blocks_and_of_their_samples_are_as_likely) {
  std::map<Items, std::size_t> seen;
  for (std::uint64_t key = 0; key < 6000; ++key) ++seen[Blocks{5, 2, 3}.items(key)];
  BOOST_TEST(seen.size() == 120u);
  std::vector<std::size_t> counts;
  for (const auto& [order, count] : seen) counts.push_back(count);
  BOOST_TEST(surprise(counts) < 4.);
  std::map<Items, std::size_t> blocks;
  for (std::uint64_t key = 0; key < 1200; ++key) {
    Items order;
    for (std::uint32_t sample : Blocks{11, 3, 1}.items(key))
      if (order.empty() || order.back() != sample / 3) order.push_back(sample / 3);
    ++blocks[order];
  }
  BOOST_TEST(blocks.size() == 24u);
  counts.clear();
  for (const auto& [order, count] : blocks) counts.push_back(count);
  BOOST_TEST(surprise(counts) < 4.);
  // Windows of one epoch differ as the orders of different keys do.
  std::map<Items, std::size_t> windows;
  const Items items = Blocks{4 * 1200, 4, 1}.items(5);
  for (std::size_t first = 0; first != items.size(); first += 4) {
    Items order;
    for (std::size_t i = first; i != first + 4; ++i) order.push_back(items[i] % 4);
    ++windows[order];
  }
  BOOST_TEST(windows.size() == 24u);
  counts.clear();
  for (const auto& [order, count] : windows) counts.push_back(count);
  BOOST_TEST(surprise(counts) < 4.);
}

BOOST_AUTO_TEST_SUITE_END()
