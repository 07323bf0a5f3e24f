// SPDX-License-Identifier: Apache-2.0
// The GPU example's model against plain loops in double.
#include "mlp.cuh"

#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace {

namespace bt = boost::unit_test;

boost::test_tools::assertion_result gpu_is_there(bt::test_unit_id) {
  boost::test_tools::assertion_result result(detail::visible_gpus() > 0);
  result.message() << "there is no GPU here";
  return result;
}

template <class T>
std::vector<T> to_host(const T* from, std::size_t count) {
  std::vector<T> to(count);
  check_cuda(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return to;
}

template <class T>
void to_device(const std::vector<T>& from, T* to) {
  check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
             "cudaMemcpy");
  // Streams that do not wait for the default one must not begin before it has arrived.
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

/// A batch on both sides. Inputs are eighths, so that all that a layer adds up is exact in float.
struct Batch {
  Batch(std::size_t rows, std::size_t width, std::size_t classes, std::uint32_t seed)
      : x(rows * width), y(rows), w(rows, 1.f), width(width) {
    std::mt19937 random(seed);
    for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 17) - 8) / 8;
    for (auto& label : y) label = static_cast<std::int32_t>(random() % classes);
    upload();
  }
  void upload() {
    to_device(x, static_cast<float*>(x_there));
    to_device(y, static_cast<std::int32_t*>(y_there));
    to_device(w, static_cast<float*>(w_there));
  }
  std::size_t size() const { return y.size(); }

  std::vector<float> x;
  std::vector<std::int32_t> y;
  std::vector<float> w;
  std::size_t width;
  DeviceArray<float> x_there{x.size()};
  DeviceArray<std::int32_t> y_there{y.size()};
  DeviceArray<float> w_there{w.size()};
  const float* inputs = x_there;
  const std::int32_t* labels = y_there;
  const float* weights = w_there;
};

/// A step as a strategy hands it to a model, over memory of its own.
template <class Model>
struct Step : detail::BareStep<Model, Buckets<>, DeviceMemory> {
  static constexpr std::size_t bytes = detail::Layout<Model>::plan().bytes;

  explicit Step(const Model& model) : Step(model, DeviceArena(bytes), DeviceArena(bytes)) {}

  cudaStream_t stream() const { return stream_; }
  double* loss() const { return loss_; }
  void synchronize() const { stream_.synchronize(); }
  template <class Key>
  void ready(Key key) {
    detail::BareStep<Model, Buckets<>, DeviceMemory>::ready(key);
    ready_names.emplace_back(std::string_view(Key::name));
  }

  double mean_loss() const {
    synchronize();
    return to_host<double>(loss_, 1)[0];
  }

  std::vector<std::string> ready_names;

 private:
  Step(const Model& model, DeviceArena parameters, DeviceArena gradients)
      : detail::BareStep<Model, Buckets<>, DeviceMemory>(
            model, {parameters.data(), gradients.data(), nullptr}),
        parameters_(std::move(parameters)),
        gradients_(std::move(gradients)) {}

  DeviceArena parameters_, gradients_;
  CudaStream stream_;
  DeviceArray<double> loss_{1};
};

/// One with loss scaling.
template <class Model>
struct ScaledStep : Step<Model> {
  static constexpr double factor = 1024;
  explicit ScaledStep(const Model& model) : Step<Model>(model) {
    to_device<float>({static_cast<float>(factor)}, scale_);
  }
  const float* loss_scale() const { return scale_; }

 private:
  DeviceArray<float> scale_{1};
};

using Values = std::map<std::string, std::vector<double>>;

void for_each_name(auto&& f) {
  f("fc1.weight"_p);
  f("fc1.bias"_p);
  f("fc2.weight"_p);
  f("fc2.bias"_p);
  f("fc3.weight"_p);
  f("fc3.bias"_p);
}

std::string text_of(auto key) { return std::string(std::string_view(decltype(key)::name)); }

template <class Model>
Values gradients(const Step<Model>& step) {
  Values result;
  step.synchronize();
  for_each_name([&](auto key) {
    const auto view = step.grad(key);
    for (const auto value : to_host(view.data_handle(), view.size())) {
      result[text_of(key)].push_back(static_cast<double>(static_cast<float>(value)));
    }
  });
  return result;
}

/// Random parameters that all types hold exactly: 64ths. Gradients are NaN until they are written.
template <class Model>
Values prepare(const Step<Model>& step) {
  Values result;
  std::mt19937 random(7);
  for_each_name([&](auto key) {
    const auto view = step.param(key);
    using T = std::remove_cvref_t<decltype(*view.data_handle())>;
    std::vector<T> values(view.size());
    std::vector<double>& kept = result[text_of(key)];
    for (T& value : values) {
      kept.push_back(static_cast<double>(static_cast<int>(random() % 9) - 4) / 64);
      value = static_cast<T>(static_cast<float>(kept.back()));
    }
    to_device(values, const_cast<T*>(view.data_handle()));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    to_device(std::vector<T>(view.size(), static_cast<T>(nan)), step.grad(key).data_handle());
  });
  return result;
}

struct Expected {
  double loss = 0;
  double correct = 0;
  Values gradients;
};

/// The model as it is defined.
Expected expect(const Values& parameters, const Batch& batch, std::size_t hidden,
                std::size_t classes) {
  const std::size_t rows = batch.size();
  using Matrix = std::vector<double>;
  const auto linear = [&](const Matrix& x, const std::string& layer, std::size_t in,
                          std::size_t out) {
    const Matrix& weight = parameters.at(layer + ".weight");
    Matrix y(rows * out);
    for (std::size_t b = 0; b < rows; ++b) {
      for (std::size_t o = 0; o < out; ++o) {
        double sum = parameters.at(layer + ".bias")[o];
        for (std::size_t i = 0; i < in; ++i) sum += weight[o * in + i] * x[b * in + i];
        y[b * out + o] = sum;
      }
    }
    return y;
  };
  const auto relu = [](Matrix y) {
    for (double& value : y) value = std::max(value, 0.0);
    return y;
  };
  const Matrix x0(batch.x.begin(), batch.x.end());
  const Matrix x1 = relu(linear(x0, "fc1", batch.width, hidden));
  const Matrix x2 = relu(linear(x1, "fc2", hidden, hidden));
  Matrix errors = linear(x2, "fc3", hidden, classes);

  Expected result;
  double total = 0;
  for (const float weight : batch.w) total += weight;
  for (std::size_t b = 0; b < rows; ++b) {
    double* const row = &errors[b * classes];
    const double* const best = std::max_element(row, row + classes);
    const double top = *best;
    result.correct += best - row == batch.y[b] ? batch.w[b] : 0;
    double sum = 0;
    for (std::size_t c = 0; c < classes; ++c) sum += std::exp(row[c] - top);
    result.loss += batch.w[b] * (std::log(sum) + top - row[batch.y[b]]) / total;
    for (std::size_t c = 0; c < classes; ++c) {
      const double own = c == static_cast<std::size_t>(batch.y[b]) ? 1 : 0;
      row[c] = (std::exp(row[c] - top) / sum - own) * batch.w[b] / total;
    }
  }
  // Back through one layer; `errors` become those of the layer below.
  const auto back = [&](const Matrix& x, const std::string& layer, std::size_t in,
                        std::size_t out) {
    Matrix& weight = result.gradients[layer + ".weight"];
    Matrix& bias = result.gradients[layer + ".bias"];
    weight.assign(out * in, 0);
    bias.assign(out, 0);
    Matrix below(rows * in);
    const Matrix& w = parameters.at(layer + ".weight");
    for (std::size_t b = 0; b < rows; ++b) {
      for (std::size_t o = 0; o < out; ++o) {
        const double error = errors[b * out + o];
        bias[o] += error;
        if (error == 0) continue;
        for (std::size_t i = 0; i < in; ++i) weight[o * in + i] += error * x[b * in + i];
        for (std::size_t i = 0; i < in; ++i) below[b * in + i] += error * w[o * in + i];
      }
    }
    for (std::size_t i = 0; i < below.size(); ++i) {
      if (x[i] <= 0) below[i] = 0;
    }
    errors = below;
  };
  back(x2, "fc3", hidden, classes);
  back(x1, "fc2", hidden, hidden);
  back(x0, "fc1", batch.width, hidden);
  return result;
}

/// In float all that decides a gate is exact, so every element is compared; 16 bits close some
/// gates that are open in double, so there it is the norm.
template <class T>
constexpr double tolerance = std::is_same_v<T, float>  ? 1e-5
                             : std::is_same_v<T, Half> ? 5e-3
                                                       : 4e-2;

template <class T>
void compare(const Values& got, const Values& expected, double factor = 1) {
  for (const auto& [name, wanted] : expected) {
    const auto& values = got.at(name);
    BOOST_TEST_REQUIRE(values.size() == wanted.size());
    double distance = 0;
    double norm = 0;
    double largest = 0;
    std::size_t worst = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double difference = values[i] - factor * wanted[i];
      distance += difference * difference;
      norm += factor * wanted[i] * factor * wanted[i];
      largest = std::max(largest, std::abs(factor * wanted[i]));
      if (!(std::abs(difference) <= std::abs(values[worst] - factor * wanted[worst]))) worst = i;
    }
    BOOST_TEST_CONTEXT(name << ": relative distance " << std::sqrt(distance / norm) << ", worst at "
                            << worst << ": expected " << factor * wanted[worst] << ", got "
                            << values[worst] << "; largest " << largest) {
      BOOST_TEST(std::sqrt(distance) <= tolerance<T> * std::sqrt(norm));
      if (std::is_same_v<T, float>) {
        BOOST_TEST(std::abs(values[worst] - factor * wanted[worst]) <= tolerance<T> * largest);
      }
    }
  }
}

template <class T, std::size_t Inputs, std::size_t Hidden, std::size_t Classes,
          std::size_t FewRows = 128>
void check_model(std::size_t rows) {
  BOOST_TEST_CONTEXT(Inputs << "-" << Hidden << "-" << Hidden << "-" << Classes << ", " << rows
                            << " rows, products in few_rows.cuh up to " << FewRows) {
    using Model = GpuMlp<T, Inputs, Hidden, Classes, FewRows>;
    Model model;
    // Errors of a batch of 500 are too small for Half without.
    constexpr bool scales = std::is_same_v<T, Half>;
    std::conditional_t<scales, ScaledStep<Model>, Step<Model>> step(model);
    const Values parameters = prepare(step);
    const Batch batch(rows, Inputs, Classes, 1);
    const Expected expected = expect(parameters, batch, Hidden, Classes);
    model.forward(step, batch);
    BOOST_TEST(std::abs(step.mean_loss() - expected.loss) <= tolerance<T> * expected.loss,
               "loss: expected " << expected.loss << ", got " << step.mean_loss());
    model.backward(step, batch);
    const Values got = gradients(step);
    compare<T>(got, expected.gradients, scales ? ScaledStep<Model>::factor : 1);
    const std::vector<std::string> order{"fc3.bias",   "fc3.weight", "fc2.bias",
                                         "fc2.weight", "fc1.bias",   "fc1.weight"};
    BOOST_TEST(step.ready_names == order, boost::test_tools::per_element());

    prepare(step);  // the same again
    const double loss = step.mean_loss();
    model.forward(step, batch);
    model.backward(step, batch);
    BOOST_TEST(step.mean_loss() == loss);
    BOOST_TEST((gradients(step) == got), "a second run gives other bits");
  }
}

template <class T>
void check_sizes() {
  for (const std::size_t rows : {1, 7, 64, 500}) {
    check_model<T, 20, 12, 5>(rows);
    check_model<T, 784, 512, 10>(rows);
  }
}

}  // namespace

BOOST_AUTO_TEST_SUITE(gpu_mlp, *bt::precondition(gpu_is_there))

BOOST_AUTO_TEST_CASE(float_gives_the_loss_and_gradients_of_plain_loops) { check_sizes<float>(); }

BOOST_AUTO_TEST_CASE(bfloat16_stays_close_to_plain_loops) { check_sizes<BFloat16>(); }

BOOST_AUTO_TEST_CASE(half_stays_close_to_plain_loops) { check_sizes<Half>(); }

BOOST_AUTO_TEST_CASE(either_kind_of_product_does_for_any_number_of_rows) {
  for (const std::size_t rows : {1, 7, 64, 129}) check_model<float, 784, 512, 10, 0>(rows);
  for (const std::size_t rows : {16, 17, 129, 500}) check_model<float, 100, 36, 3, 1000>(rows);
  for (const std::size_t rows : {5, 64}) check_model<float, 7, 5, 3>(rows);  // no multiples of four
}

BOOST_AUTO_TEST_CASE(a_row_of_weight_0_counts_nothing) {
  using Model = GpuMlp<float, 20, 12, 5>;
  Model model;
  Step<Model> step(model);
  const Values parameters = prepare(step);
  Batch batch(9, 20, 5, 3);
  for (const std::size_t row : {2, 3, 8}) batch.w[row] = 0;
  batch.upload();
  const Expected expected = expect(parameters, batch, 12, 5);
  model.forward(step, batch);
  model.backward(step, batch);
  BOOST_TEST(step.mean_loss() == expected.loss, boost::test_tools::tolerance(1e-5));
  compare<float>(gradients(step), expected.gradients);
}

BOOST_AUTO_TEST_CASE(the_loss_scale_multiplies_the_gradient_alone) {
  using Model = GpuMlp<float, 20, 12, 5>;
  Model model;
  ScaledStep<Model> step(model);
  const Values parameters = prepare(step);
  const Batch batch(9, 20, 5, 3);
  const Expected expected = expect(parameters, batch, 12, 5);
  model.forward(step, batch);
  model.backward(step, batch);
  BOOST_TEST(step.mean_loss() == expected.loss, boost::test_tools::tolerance(1e-5));
  compare<float>(gradients(step), expected.gradients, ScaledStep<Model>::factor);
}

BOOST_AUTO_TEST_CASE(evaluation_adds_up_losses_and_right_answers) {
  using Model = GpuMlp<float, 20, 12, 5>;
  struct Tally {
    std::map<std::string, std::pair<double, std::size_t>> sums;
    void add(const std::string& name, double sum, std::size_t count) { sums[name] = {sum, count}; }
  } tally;
  Model model;
  Step<Model> step(model);
  const Values parameters = prepare(step);
  const Batch batch(300, 20, 5, 3);
  const Expected expected = expect(parameters, batch, 12, 5);
  model.evaluate(step, batch, tally);
  BOOST_TEST(tally.sums["loss"].first == 300 * expected.loss, boost::test_tools::tolerance(1e-5));
  BOOST_TEST(tally.sums["accuracy"].first == expected.correct);
  BOOST_TEST(tally.sums["loss"].second == 300u);
  BOOST_TEST(tally.sums["accuracy"].second == 300u);
}

BOOST_AUTO_TEST_CASE(a_label_that_is_no_class_shows_in_the_loss) {
  using Model = GpuMlp<float, 20, 12, 5>;
  Model model;
  Step<Model> step(model);
  prepare(step);
  for (const std::int32_t label : {-1, 5, 32}) {
    Batch batch(4, 20, 5, 3);
    batch.y[1] = label;
    batch.upload();
    model.forward(step, batch);
    BOOST_TEST(std::isnan(step.mean_loss()));
  }
}

BOOST_AUTO_TEST_CASE_TEMPLATE(a_captured_step_gives_the_same_bits, T,
                              decltype(std::tuple<float, BFloat16>{})) {
  using Model = GpuMlp<T, 784, 512, 10>;
  Model model;
  Step<Model> step(model);
  prepare(step);
  const Batch batch(64, 784, 10, 1);
  const auto once = [&] {
    model.forward(step, batch);
    model.backward(step, batch);
  };
  once();
  const Values eager = gradients(step);
  const double loss = step.mean_loss();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(step.stream(), cudaStreamCaptureModeThreadLocal),
             "cudaStreamBeginCapture");
  once();
  check_cuda(cudaStreamEndCapture(step.stream(), &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (int replay = 0; replay < 3; ++replay) {
    prepare(step);
    check_cuda(cudaGraphLaunch(executable, step.stream()), "cudaGraphLaunch");
    BOOST_TEST(step.mean_loss() == loss);
    BOOST_TEST((gradients(step) == eager), "a replay gives other bits");
  }
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

BOOST_AUTO_TEST_SUITE_END()
