// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/bucket/layout.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <type_traits>

#include "lockstep/detail/bucket/step.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(element_types)

namespace {

struct Net {
  using Parameters = ParameterList<Parameter<"w", float, 40, 3>, Parameter<"b", float, 3>>;
  using Buffers = BufferList<Buffer<"mean", float, 3>, Buffer<"count", std::int64_t>>;
};

using Narrow = detail::Layout<Net, Buckets<>, detail::FloatingAs<BFloat16>>;

}  // namespace

BOOST_AUTO_TEST_CASE(a_layout_in_other_types_has_their_sizes) {
  static_assert(Narrow::plan().placements[0].bytes == 40 * 3 * sizeof(BFloat16));
  static_assert(Narrow::plan().bucket_table[0].element == ElementKind::bf16);
  static_assert(Narrow::infos()[1].element == ElementKind::bf16);
  static_assert(detail::Layout<Net>::plan().bucket_table[0].element == ElementKind::f32);
  static_assert(
      detail::kinds_of<Net, detail::TensorRole::parameter, detail::FloatingAs<Half>>.kinds[0] ==
      ElementKind::f16);
  static_assert(Narrow::plan().runs().size() == 1);
}

BOOST_AUTO_TEST_CASE(integers_stay_as_declared) {
  using Used = detail::BufferLayout<Net, detail::FloatingAs<Half>>;
  static_assert(Used::infos()[0].element == ElementKind::f16);
  static_assert(Used::infos()[1].element == ElementKind::i64);
}

BOOST_AUTO_TEST_CASE(a_step_sees_the_types_that_are_used) {
  using Step = detail::BareStep<Net, Buckets<>, HostMemory, detail::FloatingAs<BFloat16>,
                                detail::FloatingAs<Half>>;
  alignas(arena_alignment) static std::byte arena[4096];
  const Step step(Net{}, {arena, arena, arena});
  static_assert(std::is_same_v<decltype(step.param("w"_p)), HostView<const BFloat16, 40, 3>>);
  static_assert(std::is_same_v<decltype(step.grad("b"_p)), HostView<BFloat16, 3>>);
  static_assert(std::is_same_v<decltype(step.buffer("mean"_p)), HostView<Half, 3>>);
  static_assert(std::is_same_v<decltype(step.buffer("count"_p)), HostView<std::int64_t>>);
  BOOST_TEST(reinterpret_cast<std::byte*>(step.grad("b"_p).data_handle()) - arena ==
             static_cast<std::ptrdiff_t>(Narrow::plan().placements[1].offset));
}

BOOST_AUTO_TEST_CASE(an_element_reached_through_its_kind_is_itself) {
  static_assert(std::is_same_v<detail::SameElement<BFloat16>, BFloat16>);
  static_assert(std::is_same_v<detail::SameElement<std::int16_t>, std::int16_t>);
  static_assert(detail::FloatingAs<float>::of(ElementKind::f64) == ElementKind::f32);
  static_assert(detail::FloatingAs<Half>::of(ElementKind::i32) == ElementKind::i32);
  static_assert(detail::DeclaredTypes::of(ElementKind::f64) == ElementKind::f64);
}

BOOST_AUTO_TEST_SUITE_END()
