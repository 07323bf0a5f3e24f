// SPDX-License-Identifier: Apache-2.0
// The fused update against the rules in double, in every combination of types and for every size,
// judged on the device.
#include "lockstep/detail/optim/update.cuh"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "gpu/device.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/sgd.hpp"

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
class Arrays {
 public:
  using A = detail::Accumulator<Master>;
  static constexpr std::size_t bytes_each =
      sizeof(Master) + sizeof(Gradient) + Rule::states * sizeof(A) + sizeof(Param);

  Arrays(EnqueuedChecks& checks, std::size_t count)
      : checks_(checks),
        count_(count),
        all_{checks.array<Master>(count),
             checks.array<Gradient>(count),
             {},
             checks.array<Param>(count)} {
    checks_.write(all_.master, count, RandomNumbers{4 * count});
    checks_.write(all_.gradients, count, RandomNumbers{4 * count + 1});
    for (std::size_t s = 0; s != Rule::states; ++s) {
      const bool positive = s == 1;  // Adam's squares are
      all_.states[s] = checks.array<A>(count);
      checks_.write(all_.states[s], count, RandomNumbers{4 * count + 2 + s, 1, positive});
    }
  }

  const Addresses<Rule, Master, Gradient, Param>& addresses() const { return all_; }

  template <std::size_t Count>
  void update(bool skip = false) {
    detail::StepNumbers<Rule> numbers =
        detail::step_numbers<Rule>(options<Rule>(), lr, step, scale);
    numbers.skip = skip;
    auto* const device_numbers = checks_.array<detail::StepNumbers<Rule>>(1);
    detail::launch_store(checks_.stream(), device_numbers, numbers);
    detail::StatesOf<Rule, Master> pointers{};
    for (std::size_t s = 0; s != Rule::states; ++s) pointers[s] = all_.states[s];
    detail::launch_update<Rule, Master, Gradient, Param, Count>(
        checks_.stream(), device_numbers, all_.master, all_.gradients, pointers, all_.copy, count_);
  }

  void judge_equal(const std::string& what, const Arrays& other) const {
    checks_.judge_same(what + ": the master", count_, all_.master, other.all_.master);
    checks_.judge_same(what + ": gradients", count_, all_.gradients, other.all_.gradients);
    checks_.judge_same(what + ": the parameter", count_, all_.copy, other.all_.copy);
    for (std::size_t s = 0; s != Rule::states; ++s)
      checks_.judge_same(what + ": a state", count_, all_.states[s], other.all_.states[s]);
  }

 private:
  EnqueuedChecks& checks_;
  std::size_t count_;
  Addresses<Rule, Master, Gradient, Param> all_;
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

  __device__ CompositionCheck operator()(std::size_t i) const {
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

/// What a check of a size takes: three sets of arrays, two of step numbers, and some verdicts.
template <class Rule, class Master, class Gradient, class Param>
EnqueuedChecks checks_of(std::size_t largest, std::size_t how_many) {
  constexpr std::size_t each = 3 * Arrays<Rule, Master, Gradient, Param>::bytes_each;
  return {each * largest + 2 * sizeof(detail::StepNumbers<Rule>), how_many * (7 + Rule::states)};
}

template <class Rule, class Master, class Gradient, class Param, std::size_t Count = dynamic>
void enqueue_check(EnqueuedChecks& checks, std::size_t count) {
  using All = Arrays<Rule, Master, Gradient, Param>;
  std::ostringstream name;
  name << Rule::name << ", master " << detail::element_name(element_kind<Master>()) << ", gradient "
       << detail::element_name(element_kind<Gradient>()) << ", parameter "
       << detail::element_name(element_kind<Param>()) << ", count " << count;
  checks.begin(name.str());
  const All before(checks, count);
  All after(checks, count);
  after.template update<Count>();
  const UpdateJudge<Rule, Master, Gradient, Param> judge{
      before.addresses(), after.addresses(), Rule::template at<double>(options<Rule>(), lr, step)};
  checks.judge("the rule", count, judge);
  checks.judge_same("gradients were written", count, before.addresses().gradients,
                    after.addresses().gradients);
  if constexpr (std::is_same_v<Param, Master>)
    checks.judge_unwritten("a copy was written", count, after.addresses().copy);
  All again(checks, count);
  again.template update<Count>();
  again.judge_equal("a second run", after);
  checks.judge_fences();
}

template <class Rule, class Master, class Gradient, class Param>
void check_sizes() {
  const std::vector<std::size_t> all = sizes();
  EnqueuedChecks checks = checks_of<Rule, Master, Gradient, Param>(
      *std::max_element(all.begin(), all.end()), all.size());
  for (const std::size_t count : all) enqueue_check<Rule, Master, Gradient, Param>(checks, count);
  checks.report();
}

template <class Rule, class Master, class Gradient, class Param, std::size_t Count>
void check_known() {
  EnqueuedChecks checks = checks_of<Rule, Master, Gradient, Param>(Count, 1);
  enqueue_check<Rule, Master, Gradient, Param, Count>(checks, Count);
  checks.report();
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
  check_known<AdamW, float, float, float, 3>();
  check_known<AdamW, float, float, float, 4096>();
  check_known<AdamW, float, float, float, 100001>();
  check_known<SGD, float, BFloat16, BFloat16, 6464>();
}

BOOST_AUTO_TEST_CASE(a_step_that_is_skipped_leaves_everything_as_it_is) {
  if (!has_gpu()) return;
  using All = Arrays<AdamW, float, Half, Half>;
  for (const std::size_t count : {std::size_t{5}, std::size_t{100001}}) {
    EnqueuedChecks checks = checks_of<AdamW, float, Half, Half>(count, 1);
    checks.begin("a skipped step of " + std::to_string(count));
    const All before(checks, count);
    All after(checks, count);
    after.update<dynamic>(true);
    after.judge_equal("it changed something", before);
    checks.judge_unwritten("the parameter", count, after.addresses().copy);
    checks.judge_fences();
    checks.report();
  }
}

BOOST_AUTO_TEST_CASE(arrays_that_begin_inside_a_packet_are_rejected) {
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
