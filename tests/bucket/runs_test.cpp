// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/bucket/layout.hpp"

#include <boost/test/unit_test.hpp>

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(bucket_runs)

namespace {

struct Mixed {
  using Parameters = ParameterList<Parameter<"a", float, 100>, Parameter<"b", float, 7>,
                                   Parameter<"c", double, 9>, Parameter<"d", float, 3>>;
};
struct Uniform {
  using Parameters = ParameterList<Parameter<"a", float, 100>, Parameter<"b", float, 7>>;
};
using Pieces = Buckets<BucketLimits{0, 0}>;

/// Runs follow one another, cover the arena, and neighbours differ.
template <class Model, class TheBuckets>
constexpr bool covers() {
  constexpr const auto& plan = detail::Layout<Model, TheBuckets>::plan();
  std::size_t at = 0;
  ElementKind last = ElementKind::unsupported;
  for (const detail::Run& run : plan.runs()) {
    if (run.offset != at || run.element == last || run.bytes % arena_alignment != 0) return false;
    at += run.bytes;
    last = run.element;
  }
  return at == plan.bytes;
}

}  // namespace

BOOST_AUTO_TEST_CASE(one_element_type_is_one_run_whatever_the_buckets) {
  static_assert(detail::Layout<Uniform, Pieces>::plan().bucket_count == 2);
  constexpr auto runs = detail::Layout<Uniform, Pieces>::plan().runs();
  static_assert(runs.size() == 1 && runs[0].offset == 0);
  static_assert(runs[0].count() == detail::Layout<Uniform, Pieces>::plan().bytes / sizeof(float));
  static_assert(covers<Uniform, Pieces>() && covers<Uniform, Buckets<>>());
}

BOOST_AUTO_TEST_CASE(runs_end_where_the_element_type_changes) {
  constexpr auto runs = detail::Layout<Mixed, Pieces>::plan().runs();  // d, c, b, a
  static_assert(runs.size() == 3);
  static_assert(runs[0].element == ElementKind::f32 && runs[0].bytes == 256);
  static_assert(runs[1].element == ElementKind::f64 && runs[1].count() == 32);
  static_assert(runs[2].element == ElementKind::f32 && runs[2].bytes == 256 + 512);
  static_assert(covers<Mixed, Pieces>() && covers<Mixed, Buckets<>>());
}

BOOST_AUTO_TEST_CASE(a_kind_becomes_its_type_again) {
  static_assert(detail::kinds_of<Mixed, detail::TensorRole::parameter>.size == 2);
  static_assert(detail::kinds_of<Uniform, detail::TensorRole::parameter>.size == 1);
  std::size_t size = 0;
  const auto note = [&]<class T>(std::type_identity<T>) { size = sizeof(T); };
  detail::with_element<Mixed, detail::TensorRole::parameter>(ElementKind::f64, note);
  BOOST_TEST(size == 8u);
  detail::with_element<Mixed, detail::TensorRole::parameter>(ElementKind::f32, note);
  BOOST_TEST(size == 4u);
}

BOOST_AUTO_TEST_SUITE_END()
