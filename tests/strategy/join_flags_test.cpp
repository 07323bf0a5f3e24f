// SPDX-License-Identifier: Apache-2.0
// Join flags say which ranks have batches, whatever type they travel in and however they are
// averaged.
#include "lockstep/detail/strategy/feature/join.hpp"

#include <bit>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <random>
#include <vector>

#include "lockstep/detail/core/half.hpp"

BOOST_AUTO_TEST_SUITE(join_flags)

namespace {

using namespace lockstep;
using namespace lockstep::detail;

/// What ranks send, added up in the type that travels; each is multiplied by `before`, the sum by
/// `after`.
template <class T>
LiveRanks travel(const std::vector<bool>& live, double before, double after) {
  using A = Accumulator<T>;
  std::vector<T> sum(join_flags_for(live.size()), T{});
  for (std::size_t r = 0; r != live.size(); ++r) {
    for (std::size_t i = 0; i != sum.size(); ++i) {
      const T own =
          static_cast<T>(static_cast<A>(join_flag<T>(i, r, live[r])) * static_cast<A>(before));
      sum[i] = static_cast<T>(static_cast<A>(sum[i]) + static_cast<A>(own));
    }
  }
  for (T& value : sum) value = static_cast<T>(static_cast<A>(value) * static_cast<A>(after));
  return read_join_flags(sum.data(), sum.size(), 1 / (before * after), 17);
}

template <class T>
void check(const std::vector<bool>& live) {
  LiveRanks want{0, 17};
  for (std::size_t r = 0; r != live.size(); ++r) {
    if (live[r] && want.count++ == 0) want.lowest = r;
  }
  const auto ranks = static_cast<double>(live.size());
  const double part = 1 / static_cast<double>(std::bit_ceil(live.size()));
  for (const LiveRanks& have : {travel<T>(live, 1, 1), travel<T>(live, 1, 1 / ranks),
                                travel<T>(live, 1 / ranks, 1), travel<T>(live, part, 1)}) {
    BOOST_TEST(have.count == want.count, live.size() << " ranks");
    BOOST_TEST(have.lowest == want.lowest, live.size() << " ranks");
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(every_type_carries_any_set_of_ranks) {
  std::mt19937 random(3);
  for (const std::size_t world : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 63u, 100u, 333u, 4096u}) {
    for (const unsigned one_in : {1u, 2u, 50u, 100000u}) {
      if (world > 1000 && one_in != 2) continue;  // the work grows with the square
      std::vector<bool> live(world);
      for (std::size_t r = 0; r != world; ++r) live[r] = random() % one_in == 0;
      if (world <= 1000) check<double>(live);
      if (world <= 1000) check<float>(live);
      check<BFloat16>(live);
      check<Half>(live);
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
