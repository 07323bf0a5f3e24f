// SPDX-License-Identifier: Apache-2.0
// One process, no communication: how a model is written, and where its tensors lie.
//
// The model declares its parameters; the compiler lays them out; the step hands out views. A job of
// more ranks uses the very same model, and adds strategy, backend and world as policies.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "lockstep/lockstep.hpp"

using namespace lockstep;

namespace {

constexpr std::size_t inputs = 8;

struct Batch {
  std::vector<float> x;  // row-major, `inputs` columns
  std::vector<float> y;
};

/// y = weight x + bias, squared error.
struct Plane {
  using Parameters = ParameterList<Parameter<"weight", float, inputs>, Parameter<"bias", float>>;

  std::vector<float> errors;  // kept from forward for backward

  float forward(auto& step, const Batch& batch) {
    const auto weight = step.param("weight"_p);
    const auto bias = step.param("bias"_p);
    errors.assign(batch.y.size(), 0.f);
    float loss = 0;
    for (std::size_t i = 0; i < batch.y.size(); ++i) {
      errors[i] = bias() - batch.y[i];
      for (std::size_t j = 0; j < inputs; ++j) errors[i] += weight(j) * batch.x[i * inputs + j];
      loss += errors[i] * errors[i];
    }
    return loss / static_cast<float>(batch.y.size());
  }

  void backward(auto& step, const Batch& batch) {
    const auto bias = step.grad("bias"_p);
    const auto weight = step.grad("weight"_p);
    const float scale = 2.f / static_cast<float>(batch.y.size());
    bias() = 0;
    for (float error : errors) bias() += scale * error;
    step.ready("bias"_p);  // last layer first: with more ranks, its average could begin now
    for (std::size_t j = 0; j < inputs; ++j) {
      weight(j) = 0;
      for (std::size_t i = 0; i < errors.size(); ++i) {
        weight(j) += scale * errors[i] * batch.x[i * inputs + j];
      }
    }
    step.ready("weight"_p);
  }
};

using Job = Trainer<Plane, World<1>>;
static_assert(Trainable<Plane, Job::bare_step, Batch>);

}  // namespace

int main() {
  constexpr const auto& plan = Job::layout::plan();
  std::printf("%zu parameters in %zu bucket, %zu bytes, fingerprint %016llx\n",
              Plane::Parameters::tensors, plan.bucket_count, plan.bytes,
              static_cast<unsigned long long>(Job::fingerprint()));

  Plane model;
  const HostArena parameters(plan.bytes);
  const HostArena gradients(plan.bytes);
  Job::bare_step step(model, {parameters.data(), gradients.data()});

  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  float loss = 0;
  for (int i = 0; i < 300; ++i) {
    Batch batch{std::vector<float>(64 * inputs), std::vector<float>(64, 0.5f)};
    for (std::size_t k = 0; k < batch.x.size(); ++k) {  // to be found: weight j is j, bias is 0.5
      batch.x[k] = normal(random);
      batch.y[k / inputs] += static_cast<float>(k % inputs) * batch.x[k];
    }
    loss = model.forward(step, batch);
    model.backward(step, batch);
    // One pass over everything: parameters and gradients have the same flat layout.
    auto* const p = reinterpret_cast<float*>(parameters.data());
    const auto* const g = reinterpret_cast<const float*>(gradients.data());
    for (std::size_t k = 0; k < plan.bytes / sizeof(float); ++k) p[k] -= 0.05f * g[k];
    if (i % 50 == 0) std::printf("step %3d  loss %.6f\n", i, loss);
  }
  const auto weight = step.param("weight"_p);
  std::printf("learned: %.3f x0 + ... + %.3f x%zu + %.3f, loss %.2e\n", weight(0),
              weight(inputs - 1), inputs - 1, step.param("bias"_p)(), loss);
  return loss < 1e-6f ? 0 : 1;
}
