// SPDX-License-Identifier: Apache-2.0
// What a replica gets of batches, arrays, views and containers of them.
#include "lockstep/detail/strategy/scatter.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <cuda/std/mdspan>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/data/batch.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(scatter)

using namespace lockstep::detail;

namespace {

using Labelled = LabelledBatch<float, std::int32_t>;

template <class Batch>
ShareOf<Batch> share(const Batch& batch, std::size_t replicas, std::size_t i) {
  std::optional<ShareOf<Batch>> taken;
  take_share(batch, BatchCut{replicas, {}}, i, taken);
  return *std::move(taken);
}

template <class Batch>
std::vector<std::size_t> samples(const Batch& batch, std::size_t replicas) {
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < replicas; ++i)
    all.push_back(samples_of(batch, BatchCut{replicas, {}}, i));
  return all;
}

using Counts = std::vector<std::size_t>;

/// Says what it is cut into without owning any of it.
struct Window {
  std::size_t begin = 0, count = 0;
  std::size_t size() const { return count; }
  Window slice(std::size_t first, std::size_t n) const { return {begin + first, n}; }
};

struct Settings {
  double temperature = 1;
};

}  // namespace

BOOST_AUTO_TEST_CASE(labelled_batches_are_cut_by_rows_into_memory_that_is_kept) {
  Labelled batch;
  batch.resize(5, 2);
  for (std::size_t i = 0; i < 10; ++i) batch.inputs[i] = static_cast<float>(i);
  for (std::size_t i = 0; i < 5; ++i) {
    batch.labels[i] = static_cast<std::int32_t>(i);
    batch.weights[i] = static_cast<float>(i) / 4;
  }
  std::optional<Labelled> taken;
  take_share(batch, BatchCut{4, {}}, 0, taken);
  const float* const memory = taken->inputs.data();
  take_share(batch, BatchCut{4, {}}, 2, taken);
  BOOST_TEST(taken->inputs.data() == memory);
  BOOST_TEST(taken->size() == 1u);
  BOOST_TEST(taken->width == 2u);
  BOOST_TEST((taken->inputs == std::vector<float>{8, 9}));
  BOOST_TEST((taken->labels == std::vector<std::int32_t>{4}));
  BOOST_TEST((taken->weights == std::vector<float>{1}));
  BOOST_TEST((samples(batch, 4) == Counts{2, 2, 1, 0}));
}

BOOST_AUTO_TEST_CASE(spans_and_views_are_cut_without_a_copy) {
  std::vector<float> values(24);
  const std::span<float> span(values);
  static_assert(std::is_same_v<ShareOf<std::span<float>>, std::span<float>>);
  BOOST_TEST(share(span, 3, 1).data() == values.data() + 8);
  BOOST_TEST(share(span, 3, 1).size() == 8u);

  const HostView<float, 4, 3, 2> tensor(values.data());
  const auto rows = share(tensor, 3, 1);
  static_assert(std::is_same_v<decltype(rows), const HostView<float, dynamic, 3, 2>>);
  BOOST_TEST(rows.extent(0) == 2u);
  BOOST_TEST(&rows(0, 0, 0) == &tensor(2, 0, 0));
  BOOST_TEST(&rows(1, 2, 1) == &tensor(3, 2, 1));
  BOOST_TEST((samples(tensor, 3) == Counts{2, 2, 0}));

  const HostView<const float, dynamic, dynamic> runtime(values.data(), 6, 4);
  BOOST_TEST(&share(runtime, 4, 1)(1, 3) == &runtime(3, 3));
  BOOST_TEST(share(runtime, 4, 2).extent(1) == 4u);

  const cuda::std::mdspan<float, cuda::std::extents<std::size_t, 4, 6>> foreign(values.data());
  BOOST_TEST(&share(foreign, 4, 1)(0, 5) == &foreign(1, 5));
}

BOOST_AUTO_TEST_CASE(vectors_stay_vectors) {
  const std::vector<std::vector<int>> sentences{{1}, {2, 3}, {}, {4, 5, 6}};
  BOOST_TEST((share(sentences, 2, 1) == std::vector<std::vector<int>>{{}, {4, 5, 6}}));
  BOOST_TEST((share(std::vector<bool>{true, false, true}, 2, 1) == std::vector<bool>{true}));
}

BOOST_AUTO_TEST_CASE(containers_are_recursed_into_and_the_rest_is_shared) {
  std::vector<float> x(8), y(4);
  const Settings settings{0.5};
  const std::tuple batch(std::span<const float>(x),
                         std::pair(std::vector<int>{1, 2, 3, 4}, settings),
                         std::array{std::span(y), std::span(y)}, std::string("shared"));
  const auto own = share(batch, 2, 1);
  BOOST_TEST(std::get<0>(own).data() == x.data() + 4);
  BOOST_TEST((std::get<1>(own).first == std::vector{3, 4}));
  BOOST_TEST(&std::get<1>(own).second == &std::get<1>(batch).second);  // a reference, not a copy
  BOOST_TEST(std::get<2>(own)[1].data() == y.data() + 2);
  BOOST_TEST(&std::get<3>(own) == &std::get<3>(batch));

  const std::map<std::string, std::vector<int>> named{{"ids", {1, 2, 3}}, {"mask", {0, 1, 1}}};
  BOOST_TEST((share(named, 2, 1).at("ids") == std::vector{3}));
  const std::unordered_map<std::string, Window> windows{{"a", {10, 4}}};
  BOOST_TEST(share(windows, 2, 1).at("a").begin == 12u);
}

BOOST_AUTO_TEST_CASE(only_what_holds_rows_is_cut) {
  static_assert(is_cut<Labelled> && is_cut<Window> && is_cut<std::vector<int>>);
  static_assert(is_cut<std::tuple<int, std::span<int>>> && is_cut<std::map<int, Window>>);
  static_assert(!is_cut<Settings> && !is_cut<int> && !is_cut<std::string>);
  static_assert(!is_cut<std::tuple<int, Settings>> && !is_cut<std::array<int, 4>>);
  static_assert(!is_cut<std::map<int, double>> && !is_cut<HostView<float>>);
}

BOOST_AUTO_TEST_CASE(everything_is_cut_by_its_own_size_and_the_fewest_parts_decide_who_runs) {
  // As zip does in PyTorch's scatter: of 8 rows the last two are left out.
  const std::tuple uneven(Window{0, 8}, Window{0, 5});
  BOOST_TEST((samples(uneven, 4) == Counts{2, 2, 2, 0}));
  BOOST_TEST(std::get<1>(share(uneven, 4, 2)).count == 1u);
  BOOST_TEST((samples(std::tuple(Window{0, 8}, Window{0, 0}), 4) == Counts{0, 0, 0, 0}));
  BOOST_TEST((samples(Window{0, 2}, 4) == Counts{1, 1, 0, 0}));
}

BOOST_AUTO_TEST_SUITE_END()
