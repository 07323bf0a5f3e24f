// SPDX-License-Identifier: Apache-2.0
// The fused update against the rules in double, in every combination of types.
#include "lockstep/optim/update.cuh"

#include <boost/test/unit_test.hpp>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "gpu/device.cuh"
#include "lockstep/device/cuda/store.cuh"
#include "lockstep/optim/adam.hpp"
#include "lockstep/optim/sgd.hpp"

using namespace lockstep;
using namespace gpu_test;

namespace {

constexpr double lr = 0.01;
constexpr double scale = 0.75;
constexpr std::uint64_t step = 7;

/// Decay, and whatever else a rule has, is on.
template <class Rule>
typename Rule::Options options() {
  typename Rule::Options all;
  all.weight_decay = 0.125;
  if constexpr (requires { all.dampening; }) {
    if (!std::is_same_v<Rule, SGDNesterov>) all.dampening = 0.25;
  }
  return all;
}

/// Everything an update touches.
template <class Rule, class Master, class Gradient, class Param>
struct Arrays {
  using A = Accumulator<Master>;
  std::vector<Master> master;
  std::vector<Gradient> gradients;
  std::vector<std::vector<A>> states;
  std::vector<Param> copy;

  explicit Arrays(std::size_t count) {
    Numbers random(count);
    master = random.values<Master>(count);
    gradients = random.values<Gradient>(count);
    for (std::size_t s = 0; s != Rule::states; ++s) {
      states.push_back(random.values<A>(count, s == 1));  // Adam's squares are positive
    }
  }

  /// As the device leaves it. What must not be written is reported.
  template <std::size_t Count>
  Arrays updated(bool skip) const {
    const std::size_t count = master.size();
    CudaStream stream;
    StepNumbers<Rule> numbers = step_numbers<Rule>(options<Rule>(), lr, step, scale);
    numbers.skip = skip;
    DeviceArray<StepNumbers<Rule>> device_numbers(1);
    launch_store(stream, device_numbers.data(), numbers);
    DeviceArray<Master> device_master(master);
    DeviceArray<Gradient> device_gradients(gradients);
    DeviceArray<Param> device_copy(count);
    std::vector<DeviceArray<A>> device_states;
    StatesOf<Rule, Master> pointers{};
    for (const auto& state : states) device_states.emplace_back(state);
    for (std::size_t s = 0; s != states.size(); ++s) pointers[s] = device_states[s].data();
    launch_update<Rule, Master, Gradient, Param, Count>(
        stream, device_numbers.data(), device_master.data(), device_gradients.data(), pointers,
        device_copy.data(), count);
    Arrays result = *this;
    result.master = device_master.download();
    result.copy = device_copy.download();
    BOOST_TEST(same_bits(gradients, device_gradients.download()), "gradients were written");
    BOOST_TEST(device_master.stray_write() == "");
    BOOST_TEST(device_copy.stray_write() == "");
    for (std::size_t s = 0; s != states.size(); ++s) {
      result.states[s] = device_states[s].download();
      BOOST_TEST(device_states[s].stray_write() == "");
    }
    return result;
  }

  bool equals(const Arrays& other) const {
    bool same = same_bits(master, other.master) && same_bits(copy, other.copy);
    for (std::size_t s = 0; s != states.size(); ++s) {
      same = same && same_bits(states[s], other.states[s]);
    }
    return same;
  }
};

/// Half a unit in the last place of T, with room for the arithmetic before it. Float's states have
/// less: 1 - beta2 of a float has lost digits before the kernel sees it.
template <class T>
constexpr double rounding = std::is_same_v<T, double>  ? 1e-13
                            : std::is_same_v<T, float> ? 1e-4
                            : std::is_same_v<T, Half>  ? 0x1p-10
                                                       : 0x1p-7;

template <class Rule, class Master, class Gradient, class Param, std::size_t Count = dynamic>
void check(std::size_t count) {
  using All = Arrays<Rule, Master, Gradient, Param>;
  using A = Accumulator<Master>;
  BOOST_TEST_CONTEXT(Rule::name << ", master " << element_name(element_kind<Master>())
                                << ", gradient " << element_name(element_kind<Gradient>())
                                << ", parameter " << element_name(element_kind<Param>())
                                << ", count " << count) {
    const All before(count);
    std::vector<double> master(count);
    std::vector<double> magnitude(count);
    std::vector<std::vector<double>> states(Rule::states, std::vector<double>(count));
    const auto update = Rule::template at<double>(options<Rule>(), lr, step);
    for (std::size_t i = 0; i != count; ++i) {
      double state[2] = {};
      for (std::size_t s = 0; s != states.size(); ++s) state[s] = number(before.states[s][i]);
      master[i] = number(before.master[i]);
      update(master[i], scale * number(before.gradients[i]), state);
      // A change is as exact as the states it comes from.
      const double change = std::abs(master[i] - number(before.master[i]));
      magnitude[i] = std::abs(master[i]) + (std::is_same_v<Master, float> ? 100 * change : 0);
      for (std::size_t s = 0; s != states.size(); ++s) states[s][i] = state[s];
    }
    const All after = before.template updated<Count>(false);
    constexpr double absolute = std::is_same_v<A, double> ? 1e-14 : 3e-6;
    constexpr double relative = std::is_same_v<Master, float> ? 1e-6 : rounding<Master>;
    BOOST_TEST(difference(master, after.master, relative, absolute, magnitude) == "");
    for (std::size_t s = 0; s != states.size(); ++s) {
      BOOST_TEST(difference(states[s], after.states[s], rounding<A>, absolute) == "");
    }
    if constexpr (!std::is_same_v<Param, Master>) {
      std::vector<Param> copy(count);
      for (std::size_t i = 0; i != count; ++i) copy[i] = rounded<Param>(number(after.master[i]));
      BOOST_TEST(same_bits(copy, after.copy), "the parameters are not the master's");
    } else {
      for (const Param& value : after.copy) BOOST_REQUIRE(std::isnan(number(value)));
    }
    BOOST_TEST(after.equals(before.template updated<Count>(false)), "two runs differ");
  }
}

template <class Rule, class Master, class Gradient, class Param>
void check_sizes() {
  for (const std::size_t count : sizes()) {
    // The reference takes the time: few types see the largest arrays.
    if (count > 300000 && !std::is_same_v<Gradient, float>) continue;
    check<Rule, Master, Gradient, Param>(count);
  }
}

template <class Rule>
void check_types() {
  if (!has_gpu()) return;
  check_sizes<Rule, double, double, double>();
  check_sizes<Rule, float, float, float>();
  check_sizes<Rule, float, BFloat16, float>();
  check_sizes<Rule, float, Half, float>();
  check_sizes<Rule, BFloat16, BFloat16, BFloat16>();
  check_sizes<Rule, float, BFloat16, BFloat16>();
  check_sizes<Rule, float, Half, Half>();
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_update)

BOOST_AUTO_TEST_CASE(sgd) { check_types<SGD>(); }
BOOST_AUTO_TEST_CASE(sgd_with_momentum) { check_types<SGDMomentum>(); }
BOOST_AUTO_TEST_CASE(sgd_with_nesterov_momentum) { check_types<SGDNesterov>(); }
BOOST_AUTO_TEST_CASE(adam) { check_types<Adam>(); }
BOOST_AUTO_TEST_CASE(adamw) { check_types<AdamW>(); }

BOOST_AUTO_TEST_CASE(a_count_that_the_compiler_knows) {
  if (!has_gpu()) return;
  check<AdamW, float, float, float, 3>(3);
  check<AdamW, float, float, float, 4096>(4096);
  check<AdamW, float, float, float, 100001>(100001);
  check<SGD, float, BFloat16, BFloat16, 6464>(6464);
}

BOOST_AUTO_TEST_CASE(a_step_that_is_skipped_leaves_everything_as_it_is) {
  if (!has_gpu()) return;
  using All = Arrays<AdamW, float, Half, Half>;
  for (const std::size_t count : {std::size_t{5}, std::size_t{100001}}) {
    All before(count);
    const All after = before.updated<dynamic>(true);
    before.copy = after.copy;
    BOOST_TEST(before.equals(after));
    for (const Half value : after.copy) BOOST_REQUIRE(std::isnan(number(value)));
  }
}

BOOST_AUTO_TEST_CASE(arrays_that_begin_inside_a_packet_are_refused) {
  if (!has_gpu()) return;
  DeviceArray<float> array(64);
  DeviceArray<StepNumbers<SGD>> numbers(1);
  BOOST_CHECK_THROW(
      launch_update<SGD>(nullptr, numbers.data(), array.data() + 1, array.data(), {}, nullptr, 8),
      Error);
}

BOOST_AUTO_TEST_CASE(nothing_to_update_is_no_error) {
  if (!has_gpu()) return;
  DeviceArray<StepNumbers<SGD>> numbers(1);
  DeviceArray<float> array(1);
  launch_update<SGD>(nullptr, numbers.data(), array.data(), array.data(), {}, nullptr, 0);
}

BOOST_AUTO_TEST_SUITE_END()
