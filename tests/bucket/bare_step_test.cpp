// SPDX-License-Identifier: Apache-2.0
#include "lockstep/bucket/bare_step.hpp"

#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <type_traits>

#include "lockstep/device/host_arena.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(bare_step)

namespace {

struct Mixed {
  using Parameters =
      ParameterList<Parameter<"a", float, 2, 3>, Parameter<"b", double, 5>,
                    Repeat<"c", 3, ParameterList<Parameter<"d", Half, 7>>>, Parameter<"e", float>>;
  using Buffers = BufferList<Buffer<"mean", float, 4>, Buffer<"steps", std::int64_t>>;
};

struct Shaped {
  std::size_t rows;
  using Parameters = ParameterList<Parameter<"w", float, dynamic, 3>, Parameter<"b", float, 2>>;
  void shapes(auto& shape) const { shape("w"_p, rows, 3); }
};

}  // namespace

BOOST_AUTO_TEST_CASE(views_lie_where_the_plan_says_and_do_not_overlap) {
  constexpr const auto& plan = detail::Layout<Mixed>::plan();
  HostArena parameters(plan.bytes), gradients(plan.bytes),
      buffers(detail::BufferLayout<Mixed>::plan().bytes);
  const detail::BareStep<Mixed> step(Mixed{},
                                     {parameters.data(), gradients.data(), buffers.data()});
  BOOST_TEST(reinterpret_cast<std::uintptr_t>(parameters.data()) % arena_alignment == 0u);

  // Fill every gradient with its own number; the sanitizer sees writes outside, this sees overlaps.
  const auto fill = [&](auto key, float value) {
    auto view = step.grad(key);
    using T = typename decltype(view)::value_type;
    for (std::size_t i = 0; i < view.size(); ++i) view.data_handle()[i] = static_cast<T>(value);
  };
  const auto holds = [&](auto key, float value) {
    const auto view = step.grad(key);
    for (std::size_t i = 0; i < view.size(); ++i) {
      BOOST_TEST_REQUIRE(static_cast<float>(view.data_handle()[i]) == value);
    }
  };
  fill("a"_p, 1);
  fill("b"_p, 2);
  fill("c.0.d"_p, 3);
  fill("c.1.d"_p, 4);
  fill("c"_p / at<2> / "d"_p, 5);
  fill("e"_p, 6);
  holds("a"_p, 1);
  holds("b"_p, 2);
  holds("c.0.d"_p, 3);
  holds("c.1.d"_p, 4);
  holds("c.2.d"_p, 5);
  holds("e"_p, 6);
  step.ready("e"_p);

  const auto offset =
      reinterpret_cast<const std::byte*>(step.param("b"_p).data_handle()) - parameters.data();
  BOOST_TEST(static_cast<std::size_t>(offset) == plan.placements[1].offset);
  step.buffer("steps"_p)() = 41;
  step.buffer("mean"_p)(3) = 1;
  BOOST_TEST(step.buffer("steps"_p)() == 41);
}

BOOST_AUTO_TEST_CASE(parameters_are_read_gradients_are_written_and_extents_are_types) {
  using Step = detail::BareStep<Mixed>;
  using Param = decltype(std::declval<Step>().param("a"_p));
  using Grad = decltype(std::declval<Step>().grad("a"_p));
  static_assert(std::is_same_v<Param, HostView<const float, 2, 3>>);
  static_assert(std::is_same_v<Grad, HostView<float, 2, 3>>);
  static_assert(
      std::is_same_v<decltype(std::declval<detail::BareStep<Mixed, Buckets<>, DeviceMemory>>().grad(
                         "c.1.d"_p)),
                     DeviceView<Half, 7>>);
  static_assert(sizeof(Step) == 3 * sizeof(void*));  // static layouts take no room
}

BOOST_AUTO_TEST_CASE(a_dynamic_model_gets_views_of_its_own_shapes) {
  const Shaped model{4};
  const detail::Layout<Shaped> layout{model};
  HostArena arena(layout.plan().bytes);
  const detail::BareStep<Shaped> step(model, {arena.data(), arena.data()});
  static_assert(std::is_same_v<decltype(step.grad("w"_p)), HostView<float, dynamic, 3>>);
  BOOST_TEST(step.grad("w"_p).extent(0) == 4u);
  step.grad("w"_p)(3, 2) = 1;
  BOOST_TEST(step.param("w"_p)(3, 2) == 1.f);
  static_assert(std::is_same_v<decltype(step.grad("b"_p)), HostView<float, 2>>);
}

BOOST_AUTO_TEST_SUITE_END()
