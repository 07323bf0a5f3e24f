// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/core/random_stream.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <random>
#include <set>

using namespace lockstep;

static_assert(std::uniform_random_bit_generator<RandomStream>);
static_assert(RandomStream(Seed{3}).uniform() < 1 && RandomStream(Seed{3}).below(1) == 0);
static_assert(rank_seed(Seed{1}, Rank{0}) != rank_seed(Seed{0}, Rank{1}));

BOOST_AUTO_TEST_SUITE(core_random_stream)

BOOST_AUTO_TEST_CASE(the_numbers_are_those_of_splitmix64) {
  // Sebastiano Vigna's splitmix64.c, seeded with 1234567 and with 0.
  RandomStream random(Seed{1234567});
  for (std::uint64_t expected : {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                                 4593380528125082431u, 16408922859458223821u}) {
    BOOST_TEST(random() == expected);
  }
  BOOST_TEST(RandomStream(Seed{0})() == 0xe220a8397b1dcdafu);
}

BOOST_AUTO_TEST_CASE(a_stream_jumps_to_where_another_has_come) {
  RandomStream walked(Seed{5});
  for (int i = 0; i < 1000; ++i) walked();
  RandomStream jumped(Seed{5}, walked.position());
  RandomStream discarded(Seed{5});
  discarded.discard(1000);
  const std::uint64_t next = walked();
  BOOST_TEST(jumped() == next);
  BOOST_TEST(discarded() == next);
}

BOOST_AUTO_TEST_CASE(seeds_of_ranks_differ_within_and_between_jobs) {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < 64; ++seed) {
    for (std::size_t rank = 0; rank < 64; ++rank) {
      seeds.insert(rank_seed(Seed{seed}, Rank{rank}).value());
    }
  }
  BOOST_TEST(seeds.size() == 64u * 64u);
  BOOST_TEST(rank_seed(Seed{0}, Rank{0}).value() == 5197578548964807871u);
  BOOST_TEST(rank_seed(Seed{42}, Rank{3}).value() == 8971565426155258802u);
}

// A key gives every layer numbers of its own, by name or text. Other bits would be other masks for
// jobs that are resumed.
BOOST_AUTO_TEST_CASE(known_numbers_of_layers) {
  constexpr LayerRandom noise = detail::layer_random(7, detail::layer_hash("noise"_p));
  BOOST_TEST(noise.bits(0) == 13499009448203007785u);
  BOOST_TEST(noise.bits(1'000'000) == 13757217943488410680u);
  BOOST_TEST(noise.uniform(3) == 0.3959011435508728f);
  BOOST_TEST(noise.uniform<double>(3) == 0.39590118389987594);
  BOOST_TEST(detail::layer_random(7, detail::layer_hash("noise")).bits(0) == noise.bits(0));
  BOOST_TEST(detail::layer_random(7, detail::layer_hash("noise2")).bits(0) != noise.bits(0));
  BOOST_TEST(detail::layer_random(8, detail::layer_hash("noise")).bits(0) != noise.bits(0));
}

BOOST_AUTO_TEST_CASE(known_values_of_every_distribution) {
  RandomStream random(Seed{42});
  BOOST_TEST(random.uniform() == 0.7415648787718233);
  BOOST_TEST(random.uniform<float>() == 0.1599103808403015f);
  BOOST_TEST(random.uniform(-2.0, 3.0) == -0.6069943487243067);
  BOOST_TEST(random.below(1000) == 352u);
  BOOST_TEST(random.normal() == 0.6598589561708116);
  BOOST_TEST(random.normal(10, 0.5) == 10.153968211698768);
}

BOOST_AUTO_TEST_CASE(uniform_numbers_stay_below_the_upper_end) {
  RandomStream random(Seed{1});
  const double high = std::nextafter(1.0, 2.0);
  for (int i = 0; i < 1000; ++i) {
    BOOST_TEST_REQUIRE(random.uniform(1.0, high) == 1.0);
    const float x = random.uniform(-1.f, 1.f);
    BOOST_TEST_REQUIRE((x >= -1.f && x < 1.f));
  }
}

BOOST_AUTO_TEST_CASE(numbers_below_n_are_equally_likely) {
  RandomStream random(Seed{2});
  std::array<int, 5> counts{};
  for (int i = 0; i < 50000; ++i) ++counts.at(random.below(5));
  for (int count : counts) BOOST_TEST(std::abs(count - 10000) < 400);
  // The largest n there is, and one that needs no bits.
  BOOST_TEST(random.below(~std::uint64_t{0}) < ~std::uint64_t{0});
  BOOST_TEST(random.below(1) == 0u);
  BOOST_CHECK_THROW(random.below(0), Error);
}

BOOST_AUTO_TEST_CASE(normal_numbers_have_the_moments_and_tails_of_the_distribution) {
  RandomStream random(Seed{3});
  constexpr int n = 200000;
  double sum = 0;
  double squares = 0;
  double fourth = 0;
  int beyond_two = 0;
  for (int i = 0; i < n; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    beyond_two += std::abs(x) > 2 ? 1 : 0;
  }
  BOOST_TEST(std::abs(sum / n) < 0.01);
  BOOST_TEST(std::abs(squares / n - 1) < 0.02);
  BOOST_TEST(std::abs(fourth / n - 3) < 0.1);
  BOOST_TEST(std::abs(static_cast<double>(beyond_two) / n - 0.0455) < 0.003);
}

BOOST_AUTO_TEST_SUITE_END()
