// SPDX-License-Identifier: Apache-2.0
#include "lockstep/detail/policy/pack.hpp"

#include <boost/test/unit_test.hpp>
#include <type_traits>

#include "lockstep/detail/policy/policy.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(policy_pack)

namespace {

namespace questions {
struct Color {
  static constexpr std::string_view name = "Color";
};
struct Shade {
  static constexpr std::string_view name = "Shade";
};
}  // namespace questions

struct Red : Choice<questions::Color> {
  static constexpr std::string_view name = "Red";
};
struct Blue : Choice<questions::Color> {
  static constexpr std::string_view name = "Blue";
};
template <class C>
struct Color : detail::ChoicePolicy<questions::Color, C> {};
struct Dark : detail::ValuePolicy<questions::Shade> {
  static constexpr void fingerprint(detail::Hash& hash) { hash.text("Dark"); }
};

using Defaults = PolicyPack<Color<Red>, Dark>;

/// A job's policies are named by those that are not defaults.
template <class... Chosen>
struct Spelled {
  using pack = detail::Canonical<Defaults, Chosen...>;
};

}  // namespace

BOOST_AUTO_TEST_CASE(a_policy_is_told_from_a_choice_and_from_anything_else) {
  static_assert(detail::Policy<Color<Red>> && detail::Policy<Dark> && detail::Policy<Color<int>>);
  static_assert(!detail::Policy<Red> && detail::BareChoice<Red> && !detail::BareChoice<Dark>);
  static_assert(!detail::Policy<int> && !detail::BareChoice<int>);
  static_assert(Color<Red>::well_formed && !Color<int>::well_formed && !Color<Dark>::well_formed);
}

BOOST_AUTO_TEST_CASE(packs_are_counted_picked_and_brought_into_one_order) {
  static_assert(detail::policies_for<questions::Color, Color<Red>, Dark, Color<Blue>> == 2);
  static_assert(detail::policies_for<questions::Shade> == 0);
  static_assert(std::is_same_v<detail::Pick<questions::Shade, PolicyPack<Color<Red>, Dark>>, Dark>);
  static_assert(std::is_same_v<detail::PickOr<Color<Red>, Dark>, Color<Red>>);
  static_assert(std::is_same_v<detail::PickOr<Color<Red>, Dark, Color<Blue>>, Color<Blue>>);
  static_assert(std::is_same_v<detail::Canonical<Defaults>, Defaults>);
  static_assert(std::is_same_v<detail::Canonical<Defaults, Dark, Color<Blue>>,
                               PolicyPack<Color<Blue>, Dark>>);
  static_assert(std::is_same_v<detail::ChosenFrom<Spelled, Defaults, Defaults>, Spelled<>>);
  static_assert(std::is_same_v<detail::ChosenFrom<Spelled, Defaults, PolicyPack<Color<Blue>, Dark>>,
                               Spelled<Color<Blue>>>);
  static_assert(std::is_same_v<detail::Pick<questions::Shade, Spelled<Color<Blue>>>, Dark>);
  static_assert(detail::answers<questions::Color>(Defaults{}) && !detail::answers<int>(Defaults{}));
}

BOOST_AUTO_TEST_CASE(a_fingerprint_covers_every_policy_of_the_pack) {
  const auto of = [](auto pack) {
    detail::Hash hash;
    detail::fingerprint(hash, pack);
    return hash.value();
  };
  BOOST_TEST(of(Defaults{}) != of(PolicyPack<Color<Red>>{}));
  BOOST_TEST(of(Defaults{}) != of(PolicyPack<Color<Blue>, Dark>{}));
}

BOOST_AUTO_TEST_SUITE_END()
