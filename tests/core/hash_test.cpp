// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/detail/core/hash.hpp"

BOOST_AUTO_TEST_SUITE(core_checksum)

namespace {

std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  return lockstep::detail::Checksum().add(bytes).value();
}

using namespace lockstep::detail;

std::vector<std::byte> random_data(std::size_t count, std::uint64_t stream) {
  std::vector<std::byte> data(count);
  for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<std::byte>(random_at(stream, i));
  return data;
}

}  // namespace

BOOST_AUTO_TEST_CASE(it_is_the_same_in_whatever_portions_the_bytes_come) {
  const std::vector<std::byte> data = random_data(1000, 1);
  for (std::size_t size : {0, 1, 7, 8, 63, 64, 65, 128, 129, 1000}) {
    const std::span<const std::byte> all(data.data(), size);
    const std::uint64_t whole = checksum_of(all);
    for (std::uint64_t round = 0; round < 20; ++round) {
      Checksum checksum;
      for (std::size_t done = 0, portion = 0; done < size; ++portion) {
        const std::size_t most = random_at(round, portion) % (round < 10 ? 9 : 200);
        const std::size_t taken = std::min(most, size - done);
        checksum.add(all.subspan(done, taken));
        done += taken;
      }
      BOOST_TEST(checksum.value() == whole);
    }
  }
}

BOOST_AUTO_TEST_CASE(every_flipped_bit_and_every_length_changes_it) {
  std::vector<std::byte> data = random_data(200, 2);
  std::set<std::uint64_t> seen{checksum_of(data)};
  for (std::size_t bit = 0; bit < 8 * data.size(); ++bit) {
    data[bit / 8] ^= std::byte{1} << bit % 8;
    BOOST_TEST(seen.insert(checksum_of(data)).second);
    data[bit / 8] ^= std::byte{1} << bit % 8;
  }
  for (std::size_t size = 0; size < data.size(); ++size)
    BOOST_TEST(seen.insert(checksum_of(std::span(data).first(size))).second);
}

BOOST_AUTO_TEST_CASE(zeros_of_different_lengths_differ) {
  const std::vector<std::byte> zeros(300);
  std::set<std::uint64_t> seen;
  for (std::size_t size = 0; size <= zeros.size(); ++size)
    BOOST_TEST(seen.insert(checksum_of(std::span(zeros).first(size))).second);
}

BOOST_AUTO_TEST_CASE(two_changes_do_not_cancel_each_other) {
  // Signs of doubles, in one lane and in several; and swapped words and blocks.
  std::vector<std::byte> data = random_data(512, 3);
  std::set<std::uint64_t> seen{checksum_of(data)};
  for (std::size_t a = 7; a < data.size(); a += 8) {
    for (std::size_t b = 7; b < a; b += 8) {
      data[a] ^= std::byte{0x80};
      data[b] ^= std::byte{0x80};
      BOOST_TEST(seen.insert(checksum_of(data)).second);
      data[a] ^= std::byte{0x80};
      data[b] ^= std::byte{0x80};
      const auto swap_words = [&] {
        std::swap_ranges(data.begin() + (a - 7), data.begin() + (a + 1), data.begin() + (b - 7));
      };
      swap_words();
      BOOST_TEST(seen.insert(checksum_of(data)).second);
      swap_words();
    }
  }
}

BOOST_AUTO_TEST_CASE(it_is_the_same_on_every_machine_and_in_every_version) {
  std::vector<std::byte> data(100);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i);
  BOOST_TEST(checksum_text(checksum_of(data)) == "4d079fc7f4d84ed9");
  BOOST_TEST(checksum_text(checksum_of({})) == "86a4557d9a2d405c");
}

BOOST_AUTO_TEST_CASE(texts_are_read_back_and_other_texts_are_none) {
  for (std::uint64_t value :
       {std::uint64_t{0}, std::uint64_t{0xfedcba9876543210}, ~std::uint64_t{0}})
    BOOST_TEST((checksum_from(checksum_text(value)) == value));
  for (const char* text : {"", "0", "00000000000000000", "000000000000000g", "000000000000000A"})
    BOOST_TEST(!checksum_from(text));
}

BOOST_AUTO_TEST_SUITE_END()
