// SPDX-License-Identifier: Apache-2.0
// The numbers of optimizers and schedules, as ranks compare them.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/progress.hpp"
#include "lockstep/detail/optim/schedule.hpp"
#include "lockstep/detail/optim/sgd.hpp"

using namespace lockstep;

BOOST_AUTO_TEST_SUITE(option_numbers)

namespace {

std::map<std::string, double> numbers_of(const auto& options) {
  std::map<std::string, double> numbers;
  options.for_each([&](std::string_view name, double number) {
    BOOST_TEST(numbers.emplace(name, number).second, "two numbers are called " << name);
  });
  return numbers;
}

/// Every member is eight bytes long: one that is forgotten shows.
template <class Choice>
void check_all_are_said() {
  const std::size_t members =
      std::is_empty_v<typename Choice::Options> ? 0 : sizeof(typename Choice::Options) / 8;
  BOOST_TEST(numbers_of(typename Choice::Options{}).size() == members, Choice::name);
}

/// Options of every kind, and a number that is computed from another.
struct Mixture {
  double lr = 0.1;
  float scale = 1;
  std::uint64_t most = 0;
  std::int64_t least = 0;
  std::uint8_t small = 0;
  bool flag = false;
  constexpr void for_each(const auto& f) const {
    f("lr", lr);
    f("scale", scale);
    f("most", most);
    f("least", least);
    f("small", small);
    f("flag", flag);
    f("twice", 2 * lr);
  }
};

bool rejects(const auto& f, const std::string& words) {
  try {
    f();
  } catch (const Error& error) {
    return error.problem().find(words) != std::string::npos;
  }
  return false;
}

}  // namespace

BOOST_AUTO_TEST_CASE(options_say_all_their_numbers) {
  check_all_are_said<SGD>();
  check_all_are_said<SGDMomentum>();
  check_all_are_said<SGDNesterov>();
  check_all_are_said<Adam>();
  check_all_are_said<AdamW>();
  check_all_are_said<Constant>();
  check_all_are_said<StepDecay>();
  check_all_are_said<Cosine>();
}

BOOST_AUTO_TEST_CASE(numbers_have_the_names_of_their_members) {
  const AdamW::Options adam{.lr = 1, .beta1 = 2, .beta2 = 3, .eps = 4, .weight_decay = 5};
  BOOST_TEST((numbers_of(adam) ==
              std::map<std::string, double>{
                  {"lr", 1}, {"beta1", 2}, {"beta2", 3}, {"eps", 4}, {"weight_decay", 5}}));
  const SGDMomentum::Options sgd{.lr = 1, .momentum = 2, .dampening = 3, .weight_decay = 4};
  BOOST_TEST(
      (numbers_of(sgd) == std::map<std::string, double>{
                              {"lr", 1}, {"momentum", 2}, {"dampening", 3}, {"weight_decay", 4}}));
  const Cosine::Options cosine{.warmup = 7, .steps = 8, .last = 9};
  BOOST_TEST((numbers_of(cosine) ==
              std::map<std::string, double>{{"warmup", 7}, {"steps", 8}, {"last", 9}}));
}

BOOST_AUTO_TEST_CASE(numbers_are_set_again_to_the_last_bit) {
  using detail::NamedNumber;
  Mixture kept{.lr = 0.1,
               .scale = 1.1f,
               .most = std::numeric_limits<std::uint64_t>::max(),
               .least = std::numeric_limits<std::int64_t>::min() + 1,
               .small = 255,
               .flag = true};
  std::vector<NamedNumber> numbers;
  detail::list_numbers("a/", kept, numbers);
  detail::list_numbers("b/", Cosine::Options{.warmup = (1ull << 60) + 1}, numbers);
  BOOST_TEST(numbers.size() == 10);
  Mixture other;
  detail::set_numbers("a/", other, numbers);
  BOOST_TEST((other.lr == kept.lr && other.scale == kept.scale && other.most == kept.most &&
              other.least == kept.least && other.small == kept.small && other.flag));
  Cosine::Options cosine;
  detail::set_numbers("b/", cosine, numbers);
  BOOST_TEST(cosine.warmup == (1ull << 60) + 1);
  // Those that are not named stay as they are, and whole numbers may have come as others do.
  AdamW::Options adam{.beta1 = 0.5};
  detail::set_numbers("a/", adam, numbers);
  BOOST_TEST((adam.lr == 0.1 && adam.beta1 == 0.5));
  detail::set_numbers("c/", cosine,
                      std::vector<NamedNumber>{{"c/warmup", 5.0}, {"c/last", std::int64_t{1}}});
  BOOST_TEST((cosine.warmup == 5 && cosine.last == 1));
}

BOOST_AUTO_TEST_CASE(numbers_that_do_not_fit_are_rejected_by_name) {
  using Numbers = std::vector<detail::NamedNumber>;
  Mixture options;
  const auto set = [&](const Numbers& numbers) {
    return [&options, numbers] { detail::set_numbers("", options, numbers); };
  };
  BOOST_TEST(rejects(set({{"small", std::int64_t{256}}}), "small is too large"));
  BOOST_TEST(rejects(set({{"most", std::int64_t{-1}}}), "most is too large"));
  BOOST_TEST(rejects(set({{"most", 0.5}}), "most is no integer"));
  BOOST_TEST(rejects(set({{"least", 1e300}}), "least is no integer"));
  BOOST_TEST(rejects(set({{"least", std::numeric_limits<double>::quiet_NaN()}}), "no integer"));
  BOOST_TEST(rejects(set({{"twice", 0.3}}), "twice is computed"));
  BOOST_CHECK_NO_THROW(set({{"twice", 2 * 0.1}})());
}

BOOST_AUTO_TEST_SUITE_END()
