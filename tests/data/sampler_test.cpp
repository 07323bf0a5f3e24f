// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/sampler.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "data/sha256.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/data/distributed_sampler.hpp"
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
void expect_error(Sampler& sampler, const detail::SamplerState& state, const std::string& problem) {
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
      detail::SamplerState state = sampler.state();
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

BOOST_AUTO_TEST_CASE(a_state_of_other_draws_is_refused) {
  DistributedSampler<> sampler(100, WorldSize{4}, Rank{0}, {true, Seed{5}});
  const detail::SamplerState own = sampler.state();
  detail::SamplerState state = own;
  state.samples = 99;
  expect_error(sampler, state, "the saved state has sample count 99, this sampler has 100");
  state = own;
  state.world = WorldSize{2};
  expect_error(sampler, state, "the saved state has world size 2, this sampler has 4");
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
}

BOOST_AUTO_TEST_CASE(a_torch_shuffle_of_more_than_32_bits_is_refused) {
  DistributedSampler<> sampler(std::size_t{1} << 33, WorldSize{4}, Rank{0});
  BOOST_CHECK_THROW(sampler[0], Error);
  const DistributedSampler<Exact, KeyedShuffle> keyed(std::size_t{1} << 63, WorldSize{4}, Rank{0});
  BOOST_TEST(keyed[keyed.size() - 1] < std::size_t{1} << 63);
}

BOOST_AUTO_TEST_CASE(the_policy_names_remainder_and_order) {
  using P = Sampler<Distributed, Masked, KeyedShuffle>;
  static_assert(P::well_formed && P::built());
  static_assert(!Sampler<Distributed, KeyedShuffle, Masked>::well_formed);
  static_assert(std::is_same_v<Sampler<Distributed>::order, TorchShuffle>);
  const auto fingerprint = []<class Given>(Given) {
    detail::Hash hash;
    Given::fingerprint(hash);
    return hash.value();
  };
  BOOST_TEST(fingerprint(P{}) != fingerprint(Sampler<Distributed, Masked>{}));
}

BOOST_AUTO_TEST_SUITE_END()
