// SPDX-License-Identifier: Apache-2.0
// Who owns what under Sharding<ZeroRedundancy>: slices of buckets.
#include "lockstep/detail/strategy/sharding/sharding.hpp"

#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <random>

#include "lockstep/detail/core/half.hpp"

BOOST_AUTO_TEST_SUITE(shards)

namespace {

using namespace lockstep;

template <class T>
void check_shards(std::size_t count, std::size_t world) {
  const std::size_t length = detail::shard_length<T>(count, world);
  std::size_t end = 0;
  for (std::size_t r = 0; r != world; ++r) {
    const detail::Shard shard = detail::shard_of<T>(count, r, world);
    BOOST_TEST_REQUIRE(shard.begin == end);  // each begins where the one before it ends
    BOOST_TEST_REQUIRE(shard.count() <= length);
    if (shard.count() != 0) BOOST_TEST_REQUIRE(shard.begin == r * length);
    end = shard.end;
  }
  BOOST_TEST_REQUIRE(end == count);
  BOOST_TEST_REQUIRE(length * sizeof(T) % detail::shard_alignment == 0);
  // What collectives move is in the bucket and the room behind it.
  BOOST_TEST_REQUIRE(length * world * sizeof(T) <= count * sizeof(T) + detail::shard_room);
  // A rank has its share and less than one alignment unit more.
  BOOST_TEST_REQUIRE(length * sizeof(T) <
                     (count + world - 1) / world * sizeof(T) + detail::shard_alignment);
}

}  // namespace

BOOST_AUTO_TEST_CASE(shards_cover_a_bucket_and_reach_no_further_than_the_room) {
  std::mt19937 random(7);
  for (int i = 0; i < 60; ++i) {
    const std::size_t count = random() % 5000;
    const std::size_t world = i % 2 == 0 ? 1 + random() % 9 : 1 + random() % detail::most_shards;
    check_shards<double>(count, world);
    check_shards<float>(count, world);
    check_shards<Half>(count, world);
  }
  BOOST_CHECK_NO_THROW(detail::require_shards(detail::most_shards, Rank{0}));
  BOOST_CHECK_THROW(detail::require_shards(detail::most_shards + 1, Rank{0}), Error);
}

BOOST_AUTO_TEST_SUITE_END()
