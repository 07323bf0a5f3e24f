// SPDX-License-Identifier: Apache-2.0
// The fused update against the rules in double, in every combination of types and for every size,
// judged on the device.
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

/// Addresses, in device memory, of everything that an update touches.
template <class Rule, class Master, class Gradient, class Param>
struct Addresses {
  using A = detail::Accumulator<Master>;
  Master* master;
  Gradient* gradients;
  A* states[Rule::states + 1];  // one more: without states there were none
  Param* copy;
};

/// All of it, with the same numbers every time.
template <class Rule, class Master, class Gradient, class Param>
struct Arrays {
  using A = detail::Accumulator<Master>;
  DeviceArray<Master> master;
  DeviceArray<Gradient> gradients;
  std::vector<DeviceArray<A>> states;
  DeviceArray<Param> copy;
  std::size_t count;

  explicit Arrays(std::size_t size) : master(size), gradients(size), copy(size), count(size) {
    master.write(RandomNumbers{4 * count});
    gradients.write(RandomNumbers{4 * count + 1});
    for (std::size_t s = 0; s != Rule::states; ++s) {
      const bool positive = s == 1;  // Adam's squares are
      states.emplace_back(count).write(RandomNumbers{4 * count + 2 + s, 1, positive});
    }
  }

  Addresses<Rule, Master, Gradient, Param> addresses() const {
    Addresses<Rule, Master, Gradient, Param> all{master.data(), gradients.data(), {}, copy.data()};
    for (std::size_t s = 0; s != Rule::states; ++s) all.states[s] = states[s].data();
    return all;
  }

  /// What must not be written is reported.
  template <std::size_t Count>
  void update(bool skip = false) {
    CudaStream stream;
    detail::StepNumbers<Rule> numbers =
        detail::step_numbers<Rule>(options<Rule>(), lr, step, scale);
    numbers.skip = skip;
    const DeviceArray<detail::StepNumbers<Rule>> device_numbers(1);
    detail::launch_store(stream, device_numbers.data(), numbers);
    detail::StatesOf<Rule, Master> pointers{};
    for (std::size_t s = 0; s != Rule::states; ++s) pointers[s] = states[s].data();
    detail::launch_update<Rule, Master, Gradient, Param, Count>(stream, device_numbers.data(),
                                                                master.data(), gradients.data(),
                                                                pointers, copy.data(), count);
    stream.synchronize();
    BOOST_TEST(master.stray_write() == "");
    BOOST_TEST(gradients.stray_write() == "");
    BOOST_TEST(copy.stray_write() == "");
    for (const auto& state : states) BOOST_TEST(state.stray_write() == "");
  }

  void require_equal(const Arrays& other) const {
    BOOST_TEST(differing_byte(master, other.master) == "");
    BOOST_TEST(differing_byte(gradients, other.gradients) == "");
    BOOST_TEST(differing_byte(copy, other.copy) == "");
    for (std::size_t s = 0; s != states.size(); ++s)
      BOOST_TEST(differing_byte(states[s], other.states[s]) == "");
  }
};

/// Half a unit in the last place of T, with room for the arithmetic before it. Float's states have
/// less: 1 - beta2 of a float has lost digits before the kernel sees it.
template <class T>
constexpr double rounding = std::is_same_v<T, double>  ? 1e-13
                            : std::is_same_v<T, float> ? 1e-4
                            : std::is_same_v<T, Half>  ? 0x1p-10
                                                       : 0x1p-7;

LOCKSTEP_HOST_DEVICE inline bool is_near(double have, double want, double tolerance) {
  return have - want <= tolerance && want - have <= tolerance;  // and so neither is NaN
}

/// Judges one element after an update by what the rule makes of it in double.
template <class Rule, class Master, class Gradient, class Param>
struct UpdateJudge {
  using A = detail::Accumulator<Master>;
  Addresses<Rule, Master, Gradient, Param> before;
  Addresses<Rule, Master, Gradient, Param> after;
  decltype(Rule::template at<double>({}, 0.0, 1)) update;

  __device__ Verdict operator()(std::size_t i) const {
    constexpr double absolute = std::is_same_v<A, double> ? 1e-14 : 3e-6;
    constexpr double relative = std::is_same_v<Master, float> ? 1e-6 : rounding<Master>;
    constexpr double of_change = std::is_same_v<A, double> ? 0 : rounding<A>;
    constexpr double of_state = rounding<A>;
    double states[Rule::states + 1] = {};
    for (std::size_t s = 0; s != Rule::states; ++s) states[s] = number(before.states[s][i]);
    const double old = number(before.master[i]);
    double master = old;
    update(master, scale * number(before.gradients[i]), states);
    // A change is as exact as the states it comes from.
    const double tolerance = relative * fabs(master) + of_change * fabs(master - old) + absolute;
    if (!is_near(number(after.master[i]), master, tolerance))
      return {true, "the master", number(after.master[i]), master};
    for (std::size_t s = 0; s != Rule::states; ++s) {
      const double have = number(after.states[s][i]);
      if (!is_near(have, states[s], of_state * fabs(states[s]) + absolute))
        return {true, "a state", have, states[s]};
    }
    if constexpr (!std::is_same_v<Param, Master>) {
      const auto want = rounded<Param>(number(after.master[i]));
      if (after.copy[i].bits() != want.bits())
        return {true, "the parameter", number(after.copy[i]), number(want)};
    }
    return {};
  }
};

template <class Rule, class Master, class Gradient, class Param, std::size_t Count = dynamic>
void check(std::size_t count) {
  using All = Arrays<Rule, Master, Gradient, Param>;
  BOOST_TEST_CONTEXT(Rule::name << ", master " << detail::element_name(element_kind<Master>())
                                << ", gradient " << detail::element_name(element_kind<Gradient>())
                                << ", parameter " << detail::element_name(element_kind<Param>())
                                << ", count " << count) {
    const All before(count);
    All after(count);
    after.template update<Count>();
    const UpdateJudge<Rule, Master, Gradient, Param> judge{
        before.addresses(), after.addresses(),
        Rule::template at<double>(options<Rule>(), lr, step)};
    BOOST_TEST(first_wrong(count, judge) == "");
    BOOST_TEST(differing_byte(before.gradients, after.gradients) == "", "gradients were written");
    if constexpr (std::is_same_v<Param, Master>) BOOST_TEST(written_byte(after.copy) == "");
    All again(count);
    again.template update<Count>();
    BOOST_TEST_CONTEXT("a second run") { again.require_equal(after); }
  }
}

template <class Rule, class Master, class Gradient, class Param>
void check_sizes() {
  for (const std::size_t count : sizes()) check<Rule, Master, Gradient, Param>(count);
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
    const All before(count);
    All after(count);
    after.update<dynamic>(true);
    after.require_equal(before);
    BOOST_TEST(written_byte(after.copy) == "");
  }
}

BOOST_AUTO_TEST_CASE(arrays_that_begin_inside_a_packet_are_refused) {
  if (!has_gpu()) return;
  DeviceArray<float> array(64);
  DeviceArray<detail::StepNumbers<SGD>> numbers(1);
  BOOST_CHECK_THROW(detail::launch_update<SGD>(nullptr, numbers.data(), array.data() + 1,
                                               array.data(), {}, nullptr, 8),
                    Error);
}

BOOST_AUTO_TEST_CASE(nothing_to_update_is_no_error) {
  if (!has_gpu()) return;
  DeviceArray<detail::StepNumbers<SGD>> numbers(1);
  DeviceArray<float> array(1);
  detail::launch_update<SGD>(nullptr, numbers.data(), array.data(), array.data(), {}, nullptr, 0);
}

BOOST_AUTO_TEST_SUITE_END()
