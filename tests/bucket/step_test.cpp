// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/bucket/step.hpp"

#include <array>
#include <boost/test/unit_test.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/device/device.hpp"

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

BOOST_AUTO_TEST_CASE(a_gradient_is_set_from_numbers_in_any_form) {
  const Shaped model{2};
  const detail::Layout<Shaped> layout{model};
  const HostArena arena(layout.plan().bytes);
  const detail::BareStep<Shaped> step(model, {arena.data(), arena.data()});
  const auto is = [&](std::vector<float> want) {
    const auto view = step.grad("w"_p);
    BOOST_TEST(std::vector<float>(view.data_handle(), view.data_handle() + view.size()) == want,
               boost::test_tools::per_element());
  };
  const std::vector<double> numbers{1, 2, 3, 4, 5, 6};
  step.set_grad("w"_p, numbers);
  is({1, 2, 3, 4, 5, 6});
  step.set_grad("w"_p, {6, 5, 4, 3, 2, 1});
  is({6, 5, 4, 3, 2, 1});
  step.set_grad("w"_p, std::array<int, 6>{1, 1, 2, 3, 5, 8});
  is({1, 1, 2, 3, 5, 8});
  const Half halves[] = {Half(0.5f), Half(1), Half(2), Half(3), Half(4), Half(5)};
  step.set_grad("w"_p, std::span(halves));
  is({0.5f, 1, 2, 3, 4, 5});
  step.set_grad("w"_p, HostView<const double, dynamic, 3>(numbers.data(), 2));
  is({1, 2, 3, 4, 5, 6});

  // A wrong number of elements, or rows of another length, would train something else.
  const auto words = [&](const auto& value) -> std::string {
    try {
      step.set_grad("w"_p, value);
    } catch (const Error& error) {
      return error.what();
    }
    return "nothing failed";
  };
  const std::string few = words(std::vector<float>{1, 2});
  BOOST_TEST(few.find("the gradient of w has 6 elements, and was given 2") != std::string::npos,
             few);
  BOOST_TEST(words(1).find("was given 1") != std::string::npos);
  BOOST_TEST(words(HostView<const double, 3, 2>(numbers.data())) != "nothing failed");
}

BOOST_AUTO_TEST_CASE(numbers_of_16_bits_are_rounded_once_and_the_step_says_that_it_trains) {
  constexpr const auto& plan = detail::Layout<Mixed>::plan();
  const HostArena arena(plan.bytes);
  const detail::BareStep<Mixed> step(Mixed{}, {arena.data(), arena.data()});
  const std::vector<double> third(7, 1. / 3);
  step.set_grad("c.1.d"_p, third);
  BOOST_TEST(step.grad("c.1.d"_p)(6).bits() == Half(static_cast<float>(1. / 3)).bits());
  static_assert(detail::BareStep<Mixed>::is_training());
  static_assert(!detail::EvaluationStep<detail::BareStep<Mixed>>::is_training());
}

/// More tensors than `for_each` writes out one by one, of three shapes.
struct Many {
  using Parameters = ParameterList<
      Parameter<"first", float, 3, 2>,
      Repeat<"l", 40, ParameterList<Parameter<"w", float, 2, 3>, Parameter<"b", double, 3>>>>;
};
struct ManyShaped : Many {
  using Parameters = ParameterList<
      Parameter<"first", float, dynamic, 2>,
      Repeat<"l", 40, ParameterList<Parameter<"w", float, 2, 3>, Parameter<"b", double, 3>>>>;
  static void shapes(auto& shape) { shape("first"_p, 3, 2); }
};

template <class Model>
void visit_many() {
  const detail::Layout<Model> layout(Model{});
  const HostArena arena(layout.plan().bytes);
  const detail::BareStep<Model> step(Model{}, {arena.data(), arena.data()});
  std::size_t tensor = 0;
  step.for_each_parameter([&](std::string_view name, const auto& view) {
    const auto& placement = layout.plan().placements[tensor];
    BOOST_TEST_REQUIRE(name == layout.name(tensor));
    BOOST_TEST_REQUIRE(reinterpret_cast<const std::byte*>(view.data_handle()) ==
                       arena.data() + placement.offset);
    BOOST_TEST_REQUIRE(view.size() * sizeof(*view.data_handle()) == placement.bytes);
    BOOST_TEST_REQUIRE(view.rank() == layout.infos()[tensor].rank);
    BOOST_TEST_REQUIRE(view.extent(0) == layout.infos()[tensor].extents[0]);
    ++tensor;
  });
  BOOST_TEST(tensor == 81u);
  const auto last = step.param("l"_p / at<39> / "w"_p);
  BOOST_TEST(reinterpret_cast<const std::byte*>(last.data_handle()) ==
             arena.data() + layout.plan().placements[79].offset);
}

BOOST_AUTO_TEST_CASE(all_of_many_tensors_are_visited_in_order_with_their_shapes) {
  visit_many<Many>();
  visit_many<ManyShaped>();
}

BOOST_AUTO_TEST_SUITE_END()
