// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/bucket/plan.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "lockstep/detail/bucket/buckets.hpp"
#include "lockstep/detail/bucket/layout.hpp"
#include "reference.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(bucket_plan)

namespace {

detail::TensorInfo tensor(ElementKind element, std::size_t count) { return {element, 1, {count}}; }

/// Buckets as lists of positions in the reversed parameter list, the way PyTorch's figures are
/// kept.
std::vector<std::vector<std::size_t>> over_reversed(const detail::BucketPlan<dynamic>& plan) {
  std::vector<std::vector<std::size_t>> buckets;
  for (std::size_t b = 0; b < plan.bucket_count; ++b) {
    auto& positions = buckets.emplace_back();
    for (std::size_t i : plan.members(b)) positions.push_back(plan.placements.size() - 1 - i);
  }
  return buckets;
}

/// Does a gradient complete its bucket if gradients arrive in reverse order?
constexpr bool completes(const auto& plan, std::size_t parameter) {
  const std::size_t bucket = plan.placements[parameter].bucket;
  return bucket != detail::no_bucket && plan.bucket_table[bucket].completed_by == parameter;
}

/// What a plan promises, whatever it was made from.
void check_plan(const detail::BucketPlan<dynamic>& plan,
                const std::vector<detail::TensorInfo>& tensors, BucketLimits limits) {
  std::size_t end = 0;
  std::size_t members = 0;
  std::map<ElementKind, std::size_t> seen;  // buckets by element type
  std::size_t last_completion = tensors.size();
  for (std::size_t b = 0; b < plan.bucket_count; ++b) {
    const detail::Bucket& bucket = plan.buckets()[b];
    BOOST_TEST_REQUIRE(bucket.offset == end);
    BOOST_TEST_REQUIRE(plan.members(b).size() == bucket.parameters);
    BOOST_TEST_REQUIRE(bucket.parameters != 0u);
    std::size_t payload = 0;
    std::size_t previous = tensors.size();
    for (std::size_t i : plan.members(b)) {
      BOOST_TEST_REQUIRE(i < previous);  // in order of arrival: last parameter first
      previous = i;
      const detail::Placement& place = plan.placements[i];
      BOOST_TEST_REQUIRE(place.bucket == b);
      BOOST_TEST_REQUIRE((tensors[i].element == bucket.element));
      BOOST_TEST_REQUIRE(place.offset == end);
      BOOST_TEST_REQUIRE(place.offset % arena_alignment == 0u);
      BOOST_TEST_REQUIRE(place.bytes == tensors[i].bytes());
      BOOST_TEST_REQUIRE(completes(plan, i) == (i == bucket.completed_by));
      end += detail::align_up(place.bytes);
      // Append, then close at the limit: before the last one, the bucket was still open.
      const std::size_t limit = seen[bucket.element] == 0 ? limits.first : limits.cap;
      if (i != bucket.completed_by) BOOST_TEST_REQUIRE(payload + place.bytes < limit);
      payload += place.bytes;
      ++members;
    }
    BOOST_TEST_REQUIRE(bucket.completed_by == plan.members(b).back());
    BOOST_TEST_REQUIRE(bucket.completed_by < last_completion);  // ordered by completion
    last_completion = bucket.completed_by;
    BOOST_TEST_REQUIRE(bucket.bytes == end - bucket.offset);
    BOOST_TEST_REQUIRE(bucket.count() * detail::element_size(bucket.element) == bucket.bytes);
    ++seen[bucket.element];
  }
  BOOST_TEST_REQUIRE(plan.bytes == end);
  BOOST_TEST_REQUIRE(members == tensors.size());
}

struct Mlp {
  using Parameters =
      ParameterList<Parameter<"fc1.weight", float, 128, 784>, Parameter<"fc1.bias", float, 128>,
                    Parameter<"fc2.weight", float, 10, 128>, Parameter<"fc2.bias", float, 10>>;
};

}  // namespace

BOOST_AUTO_TEST_CASE(the_assignment_is_pytorchs_in_every_reference_case) {
  std::size_t cases = 0;
  for (const auto& expected : reference("buckets.json")) {
    std::vector<detail::TensorInfo> tensors;
    for (std::size_t size : expected.at("sizes")) tensors.push_back(tensor(ElementKind::f32, size));
    const BucketLimits limits{expected.at("first"), expected.at("cap")};
    const auto plan = detail::make_bucket_plan<dynamic>(tensors, limits);
    BOOST_TEST_CONTEXT("case " << cases) {
      const auto assignment =
          expected.at("buckets_over_reversed").get<std::vector<std::vector<std::size_t>>>();
      BOOST_TEST((over_reversed(plan) == assignment));
      check_plan(plan, tensors, limits);
    }
    ++cases;
  }
  BOOST_TEST(cases != 0u);
}

BOOST_AUTO_TEST_CASE(random_models_of_mixed_types_get_sound_plans) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    std::vector<detail::TensorInfo> tensors(random() % 40);
    for (detail::TensorInfo& info : tensors) {
      info = tensor(static_cast<ElementKind>(1 + random() % 4), random() % 3000);
    }
    const BucketLimits limits{random() % 3 == 0 ? 0 : random() % 8000, random() % 20000};
    check_plan(detail::make_bucket_plan<dynamic>(tensors, limits), tensors, limits);
  }
}

BOOST_AUTO_TEST_CASE(frozen_tensors_lie_behind_the_plan_of_all_others) {
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    std::vector<detail::TensorInfo> tensors(1 + random() % 30);
    std::vector<bool> frozen(tensors.size());
    std::vector<detail::TensorInfo> others;  // what PyTorch's DDP sees
    std::vector<std::size_t> places;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      tensors[t] = tensor(static_cast<ElementKind>(1 + random() % 4), random() % 3000);
      frozen[t] = random() % 3 == 0;
      if (frozen[t]) continue;
      others.push_back(tensors[t]);
      places.push_back(t);
    }
    const BucketLimits limits{random() % 8000, random() % 20000};
    const auto want = detail::make_bucket_plan<dynamic>(others, limits);
    const auto plan = detail::make_bucket_plan<dynamic>(
        tensors, limits, [&](std::size_t t) -> bool { return frozen[t]; });
    BOOST_TEST_REQUIRE(plan.bytes == want.bytes);
    BOOST_TEST_REQUIRE(plan.trained == others.size());
    BOOST_TEST_REQUIRE(plan.bucket_count == want.bucket_count);
    for (std::size_t b = 0; b < want.bucket_count; ++b) {
      BOOST_TEST_REQUIRE(plan.buckets()[b].bytes == want.buckets()[b].bytes);
      BOOST_TEST_REQUIRE(plan.members(b).size() == want.members(b).size());
      for (std::size_t m = 0; m < want.members(b).size(); ++m) {
        const std::size_t t = places[want.members(b)[m]];
        BOOST_TEST_REQUIRE(plan.members(b)[m] == t);
        BOOST_TEST_REQUIRE(plan.placements[t].offset == want.placements[want.members(b)[m]].offset);
        BOOST_TEST_REQUIRE(plan.is_trained(t));
      }
    }
    std::size_t end = plan.bytes;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      if (!frozen[t]) continue;
      BOOST_TEST_REQUIRE(!plan.is_trained(t));
      BOOST_TEST_REQUIRE(!completes(plan, t));
      BOOST_TEST_REQUIRE(plan.placements[t].offset == end);
      BOOST_TEST_REQUIRE(plan.placements[t].bytes == tensors[t].bytes());
      end += detail::align_up(tensors[t].bytes());
    }
    BOOST_TEST_REQUIRE(plan.all_bytes == end);
  }
}

BOOST_AUTO_TEST_CASE(each_element_type_has_buckets_of_its_own_in_order_of_completion) {
  // Reversed: d2 h1 d1 h0 d0. The halves complete before the last double.
  const std::vector<detail::TensorInfo> tensors{
      tensor(ElementKind::f64, 4), tensor(ElementKind::f16, 4), tensor(ElementKind::f64, 4),
      tensor(ElementKind::f16, 4), tensor(ElementKind::f64, 4)};
  const auto plan = detail::make_bucket_plan<dynamic>(tensors, {64, 64});
  BOOST_TEST((over_reversed(plan) == std::vector<std::vector<std::size_t>>{{0, 2}, {1, 3}, {4}}));
}

BOOST_AUTO_TEST_CASE(a_limit_of_zero_closes_after_every_parameter) {
  const std::vector<detail::TensorInfo> tensors(3, tensor(ElementKind::f32, 0));
  BOOST_TEST(detail::make_bucket_plan<dynamic>(tensors, {0, 0}).bucket_count == 3u);
}

BOOST_AUTO_TEST_CASE(the_compilers_plan_is_the_run_times_plan) {
  constexpr const auto& fixed = detail::static_plan<Mlp, detail::TensorRole::parameter, Buckets<>>;
  static_assert(fixed.bucket_count == 1 && fixed.bytes == (401408 + 512 + 5120 + 256));
  static_assert(completes(fixed, 0) && !completes(fixed, 3));
  const std::vector<detail::TensorInfo> tensors(detail::parameter_table<Mlp>.infos.begin(),
                                                detail::parameter_table<Mlp>.infos.end());
  const auto computed = detail::make_bucket_plan<dynamic>(tensors, BucketLimits{});
  BOOST_TEST(fixed.bytes == computed.bytes);
  BOOST_TEST(fixed.bucket_count == computed.bucket_count);
  for (std::size_t i = 0; i < 4; ++i) {
    BOOST_TEST(fixed.placements[i].offset == computed.placements[i].offset);
  }
}

/// 12 GB, then 24 GB that are frozen, then 6 GB in 16 bits, and a little. There is no memory behind
/// it.
struct Huge {
  using Parameters =
      ParameterList<Parameter<"embed", float, 3'000, 1'000'000>,
                    Parameter<"still", double, 3'000'000'000>,
                    Parameter<"head", BFloat16, 1'000, 3'000'000>, Parameter<"bias", BFloat16, 7>>;
};

BOOST_AUTO_TEST_CASE(a_plan_beyond_four_gibibytes_is_counted_right) {
  using Layout =
      detail::Layout<Huge, detail::PlanRules<Buckets<BucketLimits{0, 0}>, Frozen<"still">>>;
  constexpr const auto& plan = Layout::plan();
  constexpr std::size_t billion = 1'000'000'000;
  static_assert(plan.bucket_count == 3);
  static_assert(plan.placements[3].offset == 0 && plan.placements[3].bytes == 14);
  static_assert(plan.placements[2].offset == 256 && plan.placements[2].bytes == 6 * billion);
  static_assert(plan.buckets()[1].count() == 3 * billion);
  static_assert(plan.placements[0].offset == 256 + detail::align_up(6 * billion));
  static_assert(plan.placements[0].bytes == 12 * billion);
  static_assert(plan.bytes == plan.placements[0].offset + 12 * billion);
  static_assert(plan.placements[1].offset == plan.bytes && !plan.is_trained(1));
  static_assert(plan.all_bytes == plan.bytes + 24 * billion);

  constexpr auto runs = plan.runs();
  static_assert(runs.size() == 2 && runs[0].count() == 3 * billion + 128);
  static_assert(runs[1].offset == plan.placements[0].offset && runs[1].count() == 3 * billion);

  // Views lie where the plan says, without a look at the memory.
  std::byte nothing{};
  const auto embed = Layout().view<HostMemory, true>(&nothing, "embed"_p);
  const auto distance = reinterpret_cast<std::uintptr_t>(embed.data_handle()) -
                        reinterpret_cast<std::uintptr_t>(&nothing);
  BOOST_TEST(distance == plan.placements[0].offset);
  BOOST_TEST(embed.size() == 3 * billion);
}

BOOST_AUTO_TEST_CASE(tensors_that_no_memory_can_hold_are_found_before_anything_overflows) {
  const auto beyond = [](std::vector<detail::TensorInfo> tensors) {
    return detail::first_beyond_arena(tensors);
  };
  constexpr std::size_t half = detail::most_arena_bytes / 2;
  BOOST_TEST(beyond({tensor(ElementKind::u8, half), tensor(ElementKind::u8, half)}) == 2u);
  BOOST_TEST(beyond({tensor(ElementKind::u8, half), tensor(ElementKind::u8, half),
                     tensor(ElementKind::u8, 1)}) == 2u);
  BOOST_TEST(beyond({tensor(ElementKind::f64, half)}) == 0u);
  BOOST_TEST(beyond({{ElementKind::f32, 3, {1ull << 40, 1ull << 40, 1ull << 40}}}) == 0u);
  BOOST_TEST(beyond({{ElementKind::f32, 1, {dynamic}}, tensor(ElementKind::f32, 3)}) == 2u);
}

BOOST_AUTO_TEST_SUITE_END()
