// SPDX-License-Identifier: Apache-2.0
// The gradients' norm on the device, and the steps that it decides: clipping, loss scaling, and a
// graph that is replayed with new learning rates.
#include "lockstep/detail/optim/constants.cuh"

#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "gpu/device.cuh"
#include "lockstep/detail/bucket/pack.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "lockstep/detail/optim/adam.hpp"
#include "lockstep/detail/optim/sgd.hpp"
#include "lockstep/detail/optim/update.cuh"

using namespace lockstep;
using namespace gpu_test;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
std::vector<double> device_partials(const DeviceArray<T>& values, std::size_t count) {
  CudaStream stream;
  const DeviceArray<double> partials(detail::square_partials<T>(count));
  detail::launch_squares(stream, values.data(), partials.data(), count);
  const auto sums = partials.download();
  BOOST_TEST(partials.stray_write() == "");
  return sums;
}
template <class T>
std::vector<double> device_partials(const std::vector<T>& values) {
  return device_partials(DeviceArray<T>(values), values.size());
}

double total(const std::vector<double>& partials) {
  return std::accumulate(partials.begin(), partials.end(), 0.0);
}

/// Piece i's share of the sum of squares, one element after the other.
template <class T>
struct AddingSquares {
  static constexpr std::size_t piece = 64;
  const T* values;
  std::size_t count;
  double* sum;
  __device__ void operator()(std::size_t i) const {
    double mine = 0;
    for (std::size_t k = i * piece; k < count && k < (i + 1) * piece; ++k)
      mine += number(values[k]) * number(values[k]);
    atomicAdd(sum, mine);
  }
};

template <class T>
void check_squares() {
  if (!has_gpu()) return;
  for (const std::size_t count : sizes()) {
    BOOST_TEST_CONTEXT(detail::element_name(element_kind<T>()) << ", count " << count) {
      DeviceArray<T> values(count);
      values.write(RandomNumbers{count});
      const DeviceArray<double> sum(std::vector<double>{0});
      constexpr std::size_t piece = AddingSquares<T>::piece;
      for_each_on_device((count + piece - 1) / piece,
                         AddingSquares<T>{values.data(), count, sum.data()});
      const double want = sum.download()[0];
      const auto partials = device_partials(values, count);
      BOOST_TEST(std::abs(total(partials) / want - 1) < 1e-6);
      BOOST_TEST(same_bits(partials, device_partials(values, count)), "two runs differ");
    }
  }
}

/// A device's inputs, state and numbers.
template <class Rule>
struct Decision {
  CudaStream stream;
  DeviceArray<detail::StepInputs<Rule>> inputs{1};
  DeviceArray<detail::StepState> state{1};
  DeviceArray<detail::StepNumbers<Rule>> numbers{1};

  explicit Decision(const detail::StepState& first) {
    detail::launch_store(stream, state.data(), first);
  }

  void decide(const detail::StepInputs<Rule>& given, const DeviceArray<double>& partials,
              std::size_t count, const detail::StepLimits& limits) {
    detail::launch_store(stream, inputs.data(), given);
    detail::launch_decide(stream, inputs.data(), partials.data(), count, limits, state.data(),
                          numbers.data());
  }
  detail::StepState next() const { return bits_of(state); }
  detail::StepNumbers<Rule> made() const { return bits_of(numbers); }

 private:
  template <class T>
  T bits_of(const DeviceArray<T>& array) const {
    stream.synchronize();
    T value;
    check_cuda(cudaMemcpy(&value, array.data(), sizeof value, cudaMemcpyDefault), "cudaMemcpy");
    return value;
  }
};

bool near(double a, double b) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 1e-12 * std::abs(b);
}

/// One decision after the other, on the device and on the host.
void compare_decisions(const std::vector<std::vector<double>>& steps,
                       const detail::StepLimits& limits) {
  detail::StepState want;
  if (limits.scales_loss) want.loss_scale = detail::first_loss_scale(limits.loss_scale);
  Decision<AdamW> device(want);
  for (std::size_t s = 0; s != steps.size(); ++s) {
    BOOST_TEST_CONTEXT("step " << s) {
      const detail::StepInputs<AdamW> inputs{{}, 0.01 / static_cast<double>(s + 1), 0.25};
      const DeviceArray<double> partials(steps[s]);
      device.decide(inputs, partials, steps[s].size(), limits);
      const auto numbers = detail::decide_step(inputs, total(steps[s]), limits, want);
      const auto made = device.made();
      const auto state = device.next();
      BOOST_TEST(state.updates == want.updates);
      BOOST_TEST(state.skipped == want.skipped);
      BOOST_TEST(near(state.norm, want.norm), state.norm << " is not " << want.norm);
      BOOST_TEST(state.loss_scale.scale == want.loss_scale.scale);
      BOOST_TEST(state.loss_scale.good_steps == want.loss_scale.good_steps);
      BOOST_TEST(made.skip == numbers.skip);
      BOOST_TEST(near(made.in_double.scale, numbers.in_double.scale),
                 made.in_double.scale << " is not " << numbers.in_double.scale);
      BOOST_TEST(near(made.in_double.update.rate, numbers.in_double.update.rate));
      BOOST_TEST(near(made.in_double.update.unbias, numbers.in_double.update.unbias));
      BOOST_TEST(near(made.in_double.update.decay, numbers.in_double.update.decay));
      BOOST_TEST(std::abs(made.in_float.update.rate - numbers.in_float.update.rate) <= 1e-8);
    }
  }
}

std::vector<double> random_partials(std::size_t count) {
  auto partials = Numbers(count).values<double>(count, true);
  for (double& partial : partials) partial *= 10;
  return partials;
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_norm)

BOOST_AUTO_TEST_CASE(squares_of_doubles) { check_squares<double>(); }
BOOST_AUTO_TEST_CASE(squares_of_floats) { check_squares<float>(); }
BOOST_AUTO_TEST_CASE(squares_of_halves) { check_squares<Half>(); }
BOOST_AUTO_TEST_CASE(squares_of_bfloat16) { check_squares<BFloat16>(); }

BOOST_AUTO_TEST_CASE(one_broken_gradient_breaks_the_sum_wherever_it_is) {
  if (!has_gpu()) return;
  for (const std::size_t at : {std::size_t{0}, std::size_t{4096}, std::size_t{10002}}) {
    for (const float broken : {std::numeric_limits<float>::infinity(), -1 / 0.0F, std::nanf("")}) {
      std::vector<float> values(10003, 0.5F);
      values[at] = broken;
      BOOST_TEST(!detail::is_finite(total(device_partials(values))));
      std::vector<Half> halves(10003, Half(0.5F));
      halves[at] = Half(broken);
      BOOST_TEST(!detail::is_finite(total(device_partials(halves))));
    }
  }
  BOOST_TEST(detail::is_finite(total(device_partials(std::vector<Half>(10003, Half(65504.0F))))));
}

BOOST_AUTO_TEST_CASE(clipped_steps_are_decided_as_on_the_host) {
  if (!has_gpu()) return;
  detail::StepLimits limits;
  limits.max_norm = 2;
  compare_decisions({random_partials(1),
                     random_partials(511),
                     random_partials(5000),
                     {0},
                     {1e-9, 1e-9},
                     {infinity},
                     {1, std::nan("")}},
                    limits);
}

BOOST_AUTO_TEST_CASE(the_loss_scale_grows_and_backs_off_as_on_the_host) {
  if (!has_gpu()) return;
  detail::StepLimits limits;
  limits.scales_loss = true;
  limits.loss_scale.interval = 3;
  std::vector<std::vector<double>> steps;
  for (int s = 0; s != 24; ++s) {
    steps.push_back(random_partials(700));
    if (s == 4 || s == 5 || s == 13) steps.back()[static_cast<std::size_t>(40 * s)] = infinity;
    if (s == 16) steps.back()[699] = std::nan("");
  }
  compare_decisions(steps, limits);
  limits.max_norm = 0.001;
  compare_decisions(steps, limits);
}

/// Norm, decision and update, captured once and replayed with other rates, gradients and scales.
BOOST_AUTO_TEST_CASE(a_graph_of_norm_decision_and_update_takes_new_learning_rates) {
  if (!has_gpu()) return;
  constexpr std::size_t count = 70001;
  const std::size_t parts = detail::square_partials<Half>(count);
  detail::StepLimits limits;
  limits.max_norm = 1;
  limits.scales_loss = true;
  limits.loss_scale.interval = 2;

  struct Replica {
    Decision<AdamW> decision;
    DeviceArray<double> partials;
    DeviceArray<float> master{Numbers(1).values<float>(count)};
    DeviceArray<Half> copy{count};
    DeviceArray<Half> gradients{count};
    DeviceArray<float> mean{std::vector<float>(count)};
    DeviceArray<float> square{std::vector<float>(count)};

    Replica(std::size_t parts, const detail::StepLimits& limits)
        : decision(detail::StepState{0, 0, detail::first_loss_scale(limits.loss_scale), false}),
          partials(parts) {}
    void step(std::size_t parts, const detail::StepLimits& limits) {
      const auto& stream = decision.stream;
      detail::launch_squares<Half, count>(stream, gradients.data(), partials.data());
      detail::launch_decide(stream, decision.inputs.data(), partials.data(), parts, limits,
                            decision.state.data(), decision.numbers.data());
      detail::launch_update<AdamW, float, Half, Half, count>(
          stream, decision.numbers.data(), master.data(), gradients.data(),
          {mean.data(), square.data()}, copy.data());
    }
  };
  Replica eager(parts, limits);
  Replica captured(parts, limits);

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const auto& stream = captured.decision.stream;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  captured.step(parts, limits);
  check_cuda(cudaStreamEndCapture(stream, &graph), "end capture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");

  for (int s = 0; s != 6; ++s) {
    auto gradients = Numbers(static_cast<std::uint64_t>(s) + 50).values<Half>(count);
    if (s == 3) gradients[777] = Half(std::numeric_limits<float>::infinity());
    const detail::StepInputs<AdamW> inputs{{}, 0.01 * (s + 1), 1};
    for (Replica* replica : {&eager, &captured}) {
      replica->gradients.upload(gradients);
      detail::launch_store(replica->decision.stream, replica->decision.inputs.data(), inputs);
    }
    eager.step(parts, limits);
    check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    BOOST_TEST_CONTEXT("step " << s) {
      BOOST_TEST(same_bits(eager.master.download(), captured.master.download()));
      BOOST_TEST(same_bits(eager.copy.download(), captured.copy.download()));
      BOOST_TEST(same_bits(eager.square.download(), captured.square.download()));
      BOOST_TEST(captured.decision.next().skipped == (s == 3));
    }
  }
  const detail::StepState last = captured.decision.next();
  BOOST_TEST(last.updates == 5u);
  BOOST_TEST(last.loss_scale.scale == 65536 * 2 / 2 * 2);  // grew, backed off, grew
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

BOOST_AUTO_TEST_SUITE_END()
