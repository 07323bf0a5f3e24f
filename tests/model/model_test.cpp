// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/model/model.hpp"
#include "lockstep/detail/model/shapes.hpp"

#include <boost/test/unit_test.hpp>
#include <string>

#include "lockstep/detail/bucket/step.hpp"
#include "lockstep/detail/model/tensor.hpp"
#include "lockstep/detail/model/tensor_list.hpp"
#include "lockstep/detail/policy/pack.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(model)

namespace {

struct Batch {};

/// Nesting of every kind.
struct Transformer {
  using Linear = ParameterList<Parameter<"weight", BFloat16, 8, 4>, Parameter<"bias", float, 8>>;
  using Block = ParameterList<Scope<"attn", Linear>, Scope<"mlp", Linear>>;
  using Parameters = ParameterList<Parameter<"embed", float, 10, 4>, Repeat<"blocks", 12, Block>,
                                   Scope<"head", ParameterList<Scope<"out", Linear>>>,
                                   Parameter<"temperature", double>>;
  using Buffers = BufferList<Repeat<"norms", 2, BufferList<Buffer<"mean", float, 4>>>,
                             Buffer<"steps", std::int64_t>>;
};

struct Flat {
  using Parameters = ParameterList<Parameter<"w", float, 3, 2>, Parameter<"b", float, 3>>;
  float forward(auto&, const Batch&) { return 0; }
  void backward(auto&, const Batch&) {}
};
struct Reordered {
  using Parameters = ParameterList<Parameter<"b", float, 3>, Parameter<"w", float, 3, 2>>;
};
struct Retyped {
  using Parameters = ParameterList<Parameter<"w", double, 3, 2>, Parameter<"b", float, 3>>;
};
struct Reshaped {
  using Parameters = ParameterList<Parameter<"w", float, 2, 3>, Parameter<"b", float, 3>>;
};
struct Renamed {
  using Parameters = ParameterList<Parameter<"v", float, 3, 2>, Parameter<"b", float, 3>>;
};
struct Scoped {
  using Parameters = ParameterList<Scope<"s", Flat::Parameters>>;
};
struct Buffered : Flat {
  using Buffers = BufferList<Buffer<"mean", float, 3>>;
};

struct Dynamic {
  std::size_t inputs, hidden;
  using Parameters =
      ParameterList<Parameter<"w", float, dynamic, dynamic>, Parameter<"b", float, 3>>;
  using Buffers = BufferList<Buffer<"mean", float, dynamic>>;
  void shapes(auto& shape) const {
    shape("w"_p, hidden, inputs);
    shape("mean"_p, hidden);
  }
};

template <class M>
constexpr std::uint64_t fingerprint() {
  return detail::fingerprint_of<PolicyPack<>>(detail::Layout<M>{}, detail::BufferLayout<M>{});
}

/// A model around one shapes function, to provoke its errors.
template <class Say>
struct Saying {
  Say say;
  using Parameters =
      ParameterList<Parameter<"w", float, dynamic, 3>, Parameter<"v", float, dynamic>>;
  void shapes(auto& shape) const { say(shape); }
};

void expect_shape_error(auto say, const std::string& problem) {
  const Saying<decltype(say)> model{say};
  BOOST_CHECK_EXCEPTION(detail::Layout<Saying<decltype(say)>>{model}, Error,
                        [&](const Error& error) {
                          BOOST_TEST(error.problem() == problem);
                          return true;
                        });
}

// One clause missing each.
struct NoForward {
  using Parameters = Flat::Parameters;
  void backward(auto&, const Batch&) {}
};
struct NoLoss : NoForward {
  void forward(auto&, const Batch&) {}
};
struct NoBackward {
  using Parameters = Flat::Parameters;
  double forward(auto&, const Batch&) { return 0; }
};
struct NoParameters {
  using Parameters = ParameterList<>;
};

}  // namespace

BOOST_AUTO_TEST_CASE(nested_declarations_flatten_in_order_with_dotted_names) {
  const auto& table = detail::parameter_table<Transformer>;
  BOOST_TEST(table.size() == 1 + 12 * 4 + 2 + 1);
  BOOST_TEST(table.name(0) == "embed");
  BOOST_TEST(table.name(1) == "blocks.0.attn.weight");
  BOOST_TEST(table.name(1 + 4 * 11 + 3) == "blocks.11.mlp.bias");
  BOOST_TEST(table.name(49) == "head.out.weight");
  BOOST_TEST(table.name(51) == "temperature");
  BOOST_TEST((table.infos[1] == detail::TensorInfo{ElementKind::bf16, 2, {8, 4}}));
  BOOST_TEST(table.infos[51].count() == 1u);  // no extents: a scalar
  BOOST_TEST(detail::buffer_table<Transformer>.size() == 3u);
  BOOST_TEST(detail::buffer_table<Transformer>.name(1) == "norms.1.mean");
  BOOST_TEST(detail::buffer_table<Flat>.size() == 0u);
}

BOOST_AUTO_TEST_CASE(every_declared_name_is_found_and_no_other) {
  const auto& table = detail::parameter_table<Transformer>;
  for (std::size_t i = 0; i < table.size(); ++i) {
    BOOST_TEST(
        (detail::name_index<Transformer, detail::TensorRole::parameter>.find(table.name(i)) == i));
  }
  for (const char* name :
       {"", "embe", "embedd", "blocks.12.attn.weight", "blocks", "norms.0.mean"}) {
    BOOST_TEST((detail::name_index<Transformer, detail::TensorRole::parameter>.find(name) ==
                detail::not_found));
  }
  using Found = NamedTensor<Transformer, detail::TensorRole::parameter,
                            decltype("blocks"_p / at<3> / "attn.weight"_p)>;
  BOOST_TEST(Found::index == 13u);
  BOOST_TEST(Found::info.extents[1] == 4u);
}

BOOST_AUTO_TEST_CASE(a_fingerprint_sees_names_types_extents_order_and_buffers) {
  const std::uint64_t all[] = {fingerprint<Flat>(),     fingerprint<Reordered>(),
                               fingerprint<Retyped>(),  fingerprint<Reshaped>(),
                               fingerprint<Renamed>(),  fingerprint<Scoped>(),
                               fingerprint<Buffered>(), fingerprint<Transformer>()};
  for (const std::uint64_t& a : all) {
    for (const std::uint64_t& b : all) BOOST_TEST((&a == &b || a != b));
  }
  static_assert(fingerprint<Flat>() == fingerprint<Flat>());  // a constant
}

BOOST_AUTO_TEST_CASE(dynamic_shapes_are_collected_from_the_model) {
  const Dynamic model{5, 7};
  const detail::Layout<Dynamic> layout{model};
  BOOST_TEST((layout.infos()[0] == detail::TensorInfo{ElementKind::f32, 2, {7, 5}}));
  BOOST_TEST((layout.infos()[1] == detail::TensorInfo{ElementKind::f32, 1, {3}}));
  BOOST_TEST((detail::BufferLayout<Dynamic>{model}.infos()[0] ==
              detail::TensorInfo{ElementKind::f32, 1, {7}}));
  static_assert(detail::is_dynamic_model<Dynamic> && !detail::is_dynamic_model<Flat>);
}

BOOST_AUTO_TEST_CASE(wrong_shapes_are_errors_with_the_tensors_name) {
  expect_shape_error([](auto& shape) { shape("w"_p, 2, 3); },
                     "tensor v has dynamic extents but no shape");
  expect_shape_error([](auto& shape) { shape("w"_p, 2, 4); },
                     "tensor w is given 4 as extent 1 but declares 3");
  expect_shape_error(
      [](auto& shape) {
        shape("v"_p, 2);
        shape("v"_p, 2);
      },
      "tensor v is given a shape twice");
  expect_shape_error([](auto& shape) { shape("v"_p, 1ull << 62); },
                     "tensor v is larger than memory can be");
}

BOOST_AUTO_TEST_CASE(the_model_concept_names_each_clause) {
  using Step = detail::BareStep<Flat>;
  static_assert(Trainable<Flat, Step, Batch> && detail::require_model<Flat, Step, Batch>());
  static_assert(!ForwardRunning<NoForward, Step, Batch> && !Trainable<NoForward, Step, Batch>);
  static_assert(ForwardRunning<NoLoss, Step, Batch> && !LossGiving<NoLoss, Step, Batch>);
  static_assert(!BackwardRunning<NoBackward, Step, Batch> && LossGiving<NoBackward, Step, Batch>);
  static_assert(!ParameterDeclaring<NoParameters> && !ParameterDeclaring<Batch>);
}

BOOST_AUTO_TEST_SUITE_END()
