// SPDX-License-Identifier: Apache-2.0
// The numbers of optimizers and schedules, as ranks compare them.
#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "lockstep/optim/adam.hpp"
#include "lockstep/optim/schedule.hpp"
#include "lockstep/optim/sgd.hpp"

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

BOOST_AUTO_TEST_SUITE_END()
