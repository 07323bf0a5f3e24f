// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/data/sampler.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "data/sha256.hpp"
#include "lockstep/detail/core/error.hpp"
#include "reference.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(data_sampler)

namespace {

template <class S>
std::vector<std::size_t> draws(S& sampler) {
  std::vector<std::size_t> indices;
  for (std::size_t index : sampler) indices.push_back(index);
  return indices;
}

/// How often each sample is drawn over all ranks, counting every draw by its weight.
template <class Remainder, class Order>
std::map<std::size_t, float> coverage(std::size_t n, std::size_t world, SamplerOptions options) {
  std::map<std::size_t, float> seen;
  for (std::size_t r = 0; r < world; ++r) {
    DistributedSampler<Remainder, Order> sampler(n, WorldSize{world}, Rank{r}, options);
    for (std::size_t k = 0; k < sampler.size(); ++k) seen[sampler[k]] += sampler.weight(k);
  }
  return seen;
}

struct Case {
  std::size_t n;
  std::size_t world;
  SamplerOptions options;
};

std::vector<Case> random_cases() {
  std::mt19937_64 random(7);
  std::vector<Case> cases{{3, 8, {}}, {1, 1, {}}, {8, 8, {}}, {0, 4, {}}};
  for (int i = 0; i < 60; ++i)
    cases.push_back({random() % 200, 1 + random() % 17, {random() % 4 != 0, Seed{random()}}});
  return cases;
}

template <class Order>
void check_coverage() {
  for (const auto& [n, world, options] : random_cases()) {
    BOOST_TEST_CONTEXT("n = " << n << ", world = " << world) {
      const auto exact = coverage<Exact, Order>(n, world, options);
      const auto masked = coverage<Masked, Order>(n, world, options);
      BOOST_TEST(exact.size() == n);
      BOOST_TEST(masked.size() == n);
      for (const auto& [sample, weight] : exact) BOOST_TEST((sample < n && weight == 1.f));
      for (const auto& [sample, weight] : masked) BOOST_TEST((sample < n && weight == 1.f));
      const auto dropped = coverage<DropLast, Order>(n, world, options);
      BOOST_TEST(dropped.size() == n / world * world);
      for (const auto& [sample, weight] : dropped) BOOST_TEST((sample < n && weight == 1.f));
      std::size_t padded = 0;
      for (const auto& [sample, weight] : coverage<Padding, Order>(n, world, options)) {
        BOOST_TEST((sample < n && weight >= 1.f));
        padded += static_cast<std::size_t>(weight);
      }
      BOOST_TEST(padded == (n + world - 1) / world * world);
    }
  }
}

template <class Sampler>
void expect_error(Sampler& sampler, const SamplerState& state, const std::string& problem) {
  BOOST_CHECK_EXCEPTION(sampler.resume(state), Error, [&](const Error& error) {
    BOOST_TEST(error.problem() == problem);
    return !error.advice().empty();
  });
}

template <class Remainder>
std::vector<std::size_t> reference_draws(const nlohmann::json& c) {
  DistributedSampler<Remainder> sampler(c["n"], WorldSize{c["world"]}, Rank{c["rank"]},
                                        {c["shuffle"], Seed{c["seed"]}});
  sampler.set_epoch(Epoch{c["epoch"]});
  BOOST_TEST(sampler.size() == c["length"].get<std::size_t>());
  return draws(sampler);
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_case_of_pytorchs_distributed_sampler_is_drawn) {
  std::size_t cases = 0;
  for (const auto& c : reference("sampler.json")) {
    BOOST_TEST_CONTEXT(c.dump()) {
      const auto indices =
          c["drop_last"] ? reference_draws<DropLast>(c) : reference_draws<Padding>(c);
      BOOST_TEST((c.contains("indices") || c.contains("sha256")), "nothing to compare with");
      if (c.contains("indices"))
        BOOST_TEST(indices == c["indices"].get<std::vector<std::size_t>>());
      if (c.contains("sha256")) {
        std::string text;
        for (std::size_t index : indices) text += (text.empty() ? "" : ",") + std::to_string(index);
        BOOST_TEST(sha256(text) == c["sha256"].get<std::string>());
      }
      ++cases;
    }
  }
  BOOST_TEST(cases != 0u);
}

BOOST_AUTO_TEST_CASE(every_remainder_policy_covers_what_it_promises) {
  check_coverage<TorchShuffle>();
  check_coverage<KeyedShuffle>();
  check_coverage<BlockShuffle<7, 3>>();
  check_coverage<InOrder>();
}

BOOST_AUTO_TEST_CASE(padding_may_exceed_the_data_set) {
  for (std::size_t r = 0; r < 8; ++r) {
    DistributedSampler<Padding, InOrder> sampler(3, WorldSize{8}, Rank{r});
    BOOST_TEST(draws(sampler) == std::vector<std::size_t>{r % 3});
    BOOST_TEST((DistributedSampler<Masked>(3, WorldSize{8}, Rank{r}).weight(0) == (r < 3)));
    BOOST_TEST(DistributedSampler<Exact>(3, WorldSize{8}, Rank{r}).size() == (r < 3));
    BOOST_TEST(DistributedSampler<DropLast>(3, WorldSize{8}, Rank{r}).size() == 0u);
  }
}

BOOST_AUTO_TEST_CASE(no_samples_give_no_draws) {
  DistributedSampler<> torch(0, WorldSize{4}, Rank{1});
  DistributedSampler<Masked, KeyedShuffle> keyed(0, WorldSize{4}, Rank{1});
  BOOST_TEST((draws(torch).empty() && draws(keyed).empty()));
}

BOOST_AUTO_TEST_CASE(a_rank_outside_of_the_world_is_an_error) {
  const auto make = [](std::size_t world, std::size_t rank) {
    return DistributedSampler<>(10, WorldSize{world}, Rank{rank});
  };
  BOOST_CHECK_EXCEPTION(make(4, 4), Error, [](const Error& error) {
    return error.problem() == "rank 4 of a world of 4";
  });
  BOOST_CHECK_THROW(make(0, 0), Error);
}

BOOST_AUTO_TEST_CASE(epochs_differ_and_repeat) {
  const auto check = [](auto sampler) {
    const auto first = draws(sampler);
    BOOST_TEST(draws(sampler) == first);
    sampler.set_epoch(Epoch{1});
    const auto second = draws(sampler);
    BOOST_TEST(second != first);
    sampler.set_epoch(Epoch{0});
    BOOST_TEST(draws(sampler) == first);
  };
  check(DistributedSampler<>(100, WorldSize{2}, Rank{1}));
  check(DistributedSampler<Exact, KeyedShuffle>(100, WorldSize{2}, Rank{1}));
  check(DistributedSampler<Exact, BlockShuffle<7, 3>>(100, WorldSize{2}, Rank{1}));
}

/// The order of an epoch is the same for any number of ranks, which draw from it in turn: so ranks
/// are in the same window at the same time, and no rank has more of it than another by two draws.
BOOST_AUTO_TEST_CASE(ranks_share_every_window_of_a_block_shuffle) {
  std::mt19937_64 random(23);
  for (int i = 0; i < 50; ++i) {
    const std::size_t n = random() % 500;
    const SamplerOptions options{.seed = Seed{random()}};
    const Epoch epoch{random() % 5};
    using Order = BlockShuffle<16, 4>;
    DistributedSampler<Exact, Order> alone(n, WorldSize{1}, Rank{0}, options);
    alone.set_epoch(epoch);
    for (std::size_t world = 1; world <= 4; ++world) {
      for (std::size_t rank = 0; rank != world; ++rank) {
        DistributedSampler<Exact, Order> sampler(n, WorldSize{world}, Rank{rank}, options);
        sampler.set_epoch(epoch);
        for (std::size_t k = 0; k < sampler.size(); ++k)
          BOOST_TEST_REQUIRE(sampler[k] == alone[rank + k * world]);
      }
    }
  }
}

BOOST_AUTO_TEST_CASE(no_epoch_of_a_keyed_shuffle_is_one_of_the_next_seed) {
  DistributedSampler<Exact, KeyedShuffle> a(100, WorldSize{1}, Rank{0}, {true, Seed{0}});
  DistributedSampler<Exact, KeyedShuffle> b(100, WorldSize{1}, Rank{0}, {true, Seed{1}});
  a.set_epoch(Epoch{1});
  BOOST_TEST(draws(a) != draws(b));
}

BOOST_AUTO_TEST_CASE(resuming_in_mid_epoch_goes_on_as_if_nothing_had_happened) {
  const auto check = [](auto sampler) {
    auto other = sampler;
    sampler.set_epoch(Epoch{3});
    const auto whole = draws(sampler);
    for (std::size_t stop : {std::size_t{0}, std::size_t{1}, whole.size() / 2, whole.size()}) {
      std::vector<std::size_t> seen;
      sampler.start();
      SamplerState state = sampler.state();
      for (std::size_t index : sampler) {
        if (seen.size() == stop) break;
        seen.push_back(index);
        state = sampler.state();
      }
      BOOST_TEST(state.position == stop);
      other.resume(state);
      BOOST_TEST((other.state() == state));
      other.set_epoch(Epoch{3});  // as loops over epochs do
      for (std::size_t index : draws(other)) seen.push_back(index);
      BOOST_TEST(seen == whole);
      BOOST_TEST(draws(other) == whole);  // once resumed, epochs are whole again
    }
  };
  check(DistributedSampler<>(101, WorldSize{4}, Rank{3}));
  check(DistributedSampler<Exact, KeyedShuffle>(101, WorldSize{4}, Rank{3}));
  check(DistributedSampler<Exact, BlockShuffle<7, 3>>(101, WorldSize{4}, Rank{3}));
  check(DistributedSampler<Masked, InOrder>(101, WorldSize{4}, Rank{3}));
}

BOOST_AUTO_TEST_CASE(the_state_of_one_rank_restores_all) {
  DistributedSampler<Exact> first(9, WorldSize{4}, Rank{0});
  DistributedSampler<Exact> last(9, WorldSize{4}, Rank{3});
  for (std::size_t index : first) (void)index;
  BOOST_TEST(first.position() == 3u);
  last.resume(first.state());
  BOOST_TEST(last.position() == 2u);
  BOOST_TEST(draws(last).empty());
}

BOOST_AUTO_TEST_CASE(a_state_of_other_draws_is_rejected) {
  DistributedSampler<> sampler(100, WorldSize{4}, Rank{0}, {true, Seed{5}});
  const SamplerState own = sampler.state();
  SamplerState state = own;
  state.samples = 99;
  expect_error(sampler, state, "the saved state has sample count 99, this sampler has 100");
  state = own;
  state.world = WorldSize{0};
  expect_error(sampler, state, "the saved state has index 0 of 100 in a world of 0");
  state = own;
  state.first = 101;
  expect_error(sampler, state, "the saved state has index 101 of 100 in a world of 4");
  state.first = 97;  // one draw is left for each rank of four, two for each of two
  state.position = 2;
  expect_error(sampler, state, "the saved state is at draw 2 of an epoch of 1");
  state = own;
  state.seed = Seed{6};
  expect_error(sampler, state, "the saved state has seed 6, this sampler has 5");
  state = own;
  state.position = 26;
  expect_error(sampler, state, "the saved state is at draw 26 of an epoch of 25");
  DistributedSampler<Padding, KeyedShuffle> keyed(100, WorldSize{4}, Rank{0}, {true, Seed{5}});
  expect_error(sampler, keyed.state(), "the saved state was drawn by another rule");
  DistributedSampler<> unshuffled(100, WorldSize{4}, Rank{0}, {false, Seed{5}});
  expect_error(sampler, unshuffled.state(), "the saved state was drawn by another rule");
  BOOST_TEST((sampler.state() == own));
  DistributedSampler<Padding, BlockShuffle<7, 3>> blocks(100, WorldSize{4}, Rank{0});
  const DistributedSampler<Padding, BlockShuffle<3, 7>> others(100, WorldSize{4}, Rank{0});
  expect_error(blocks, others.state(), "the saved state was drawn by another rule");
}

namespace {

/// The draws of one epoch by several worlds, one after the other: how often each sample came.
template <class Remainder, class Order>
struct BrokenEpoch {
  std::map<std::size_t, std::size_t> drawn{};
  std::size_t weighed = 0;    ///< draws of weight 1
  std::size_t repeats = 0;    ///< draws of samples that had come before
  std::size_t most_rest = 0;  ///< the largest world that ended the epoch, less one

  BrokenEpoch(const Case& c, std::mt19937_64& random) {
    SamplerState state;
    for (bool over = false, begun = false; !over; begun = true) {
      const std::size_t world = begun ? 1 + random() % 17 : c.world;
      std::vector<DistributedSampler<Remainder, Order>> ranks;
      for (std::size_t r = 0; r != world; ++r) {
        ranks.emplace_back(c.n, WorldSize{world}, Rank{r}, c.options);
        ranks.back().set_epoch(Epoch{2});
        if (begun) ranks.back().resume(state);
      }
      const std::size_t left = ranks[0].size() - ranks[0].position();
      const std::size_t steps = random() % 3 == 0 ? left : random() % (left + 1);
      over = steps == left;
      for (std::size_t r = 0; r != world; ++r) draw(ranks[r], steps);
      // The last rank's state will do as well as the first's, except where `Exact` ends.
      state = ranks[over ? 0 : world - 1].state();
      most_rest = world - 1;
    }
    check_over(c, state);
  }

 private:
  void draw(DistributedSampler<Remainder, Order>& sampler, std::size_t steps) {
    sampler.start();
    for (; steps != 0 && sampler.position() != sampler.size(); --steps) {
      const std::size_t sample = sampler[sampler.position()];
      repeats += drawn[sample]++ != 0;
      weighed += sampler.weight(sampler.position()) == 1.f;
      sampler.advance(1);
    }
  }

  /// An epoch that is over has no draws left in any world, and the next one is whole.
  static void check_over(const Case& c, const SamplerState& state) {
    for (const std::size_t world : {std::size_t{1}, c.world, std::size_t{5}}) {
      DistributedSampler<Remainder, Order> sampler(c.n, WorldSize{world}, Rank{0}, c.options);
      const std::size_t whole = sampler.size();
      sampler.resume(state);
      BOOST_TEST(draws(sampler).empty());
      BOOST_TEST(draws(sampler).size() == whole);
    }
  }
};

template <class Order>
void check_broken_epochs() {
  std::mt19937_64 random(11);
  for (const Case& c : random_cases()) {
    BOOST_TEST_CONTEXT("n = " << c.n << ", first world = " << c.world) {
      const BrokenEpoch<Exact, Order> exact(c, random);
      BOOST_TEST(exact.drawn.size() == c.n);
      BOOST_TEST(exact.repeats == 0u);
      const BrokenEpoch<Masked, Order> masked(c, random);
      BOOST_TEST(masked.drawn.size() == c.n);
      BOOST_TEST(masked.weighed == c.n);
      BOOST_TEST(masked.repeats <= masked.most_rest);
      const BrokenEpoch<Padding, Order> padded(c, random);
      BOOST_TEST(padded.drawn.size() == c.n);
      BOOST_TEST(padded.repeats <= padded.most_rest);
      const BrokenEpoch<DropLast, Order> dropped(c, random);
      BOOST_TEST(dropped.repeats == 0u);
      BOOST_TEST(c.n - dropped.drawn.size() <= dropped.most_rest);
    }
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(another_number_of_ranks_loses_and_repeats_nothing) {
  check_broken_epochs<TorchShuffle>();
  check_broken_epochs<KeyedShuffle>();
  check_broken_epochs<BlockShuffle<7, 3>>();
  check_broken_epochs<InOrder>();
}

BOOST_AUTO_TEST_CASE(a_world_that_comes_back_draws_what_it_would_have_drawn) {
  // Two draws of four ranks and one of two are two and a half rounds of four.
  DistributedSampler<Exact> four(50, WorldSize{4}, Rank{1});
  DistributedSampler<Exact> two(50, WorldSize{2}, Rank{1});
  const auto whole = draws(four);
  four.start();
  four.advance(2);
  two.resume(four.state());
  BOOST_TEST(two.size() == 21u);
  two.start();
  two.advance(2);
  four.resume(two.state());
  BOOST_TEST(four.state().first == 12u);
  BOOST_TEST(draws(four) == std::vector<std::size_t>(whole.begin() + 3, whole.end()));
  two.resume(four.state());
  two.set_epoch(Epoch{1});
  BOOST_TEST(two.size() == 25u);
}

BOOST_AUTO_TEST_CASE(a_torch_shuffle_of_more_than_32_bits_is_rejected) {
  DistributedSampler<> sampler(std::size_t{1} << 33, WorldSize{4}, Rank{0});
  BOOST_CHECK_THROW(sampler[0], Error);
  const DistributedSampler<Exact, KeyedShuffle> keyed(std::size_t{1} << 63, WorldSize{4}, Rank{0});
  BOOST_TEST(keyed[keyed.size() - 1] < std::size_t{1} << 63);
}

BOOST_AUTO_TEST_CASE(the_policy_names_remainder_and_order) {
  using P = Sampler<Distributed, Masked, KeyedShuffle>;
  static_assert(P::well_formed);
  static_assert(!Sampler<Distributed, KeyedShuffle, Masked>::well_formed);
  static_assert(std::is_same_v<Sampler<Distributed>::order, TorchShuffle>);
  const auto fingerprint = []<class Given>(Given) {
    detail::Hash hash;
    Given::fingerprint(hash);
    return hash.value();
  };
  BOOST_TEST(fingerprint(P{}) != fingerprint(Sampler<Distributed, Masked>{}));
  using Blocks = Sampler<Distributed, Masked, BlockShuffle<8, 2>>;
  static_assert(Blocks::well_formed);
  BOOST_TEST(fingerprint(Blocks{}) !=
             fingerprint(Sampler<Distributed, Masked, BlockShuffle<2, 8>>{}));
}

BOOST_AUTO_TEST_SUITE_END()
