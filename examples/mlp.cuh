// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The examples' main model on a GPU: three linear layers with ReLU between, softmax cross
/// entropy.

#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "device_array.cuh"
#include "elementwise.cuh"
#include "lockstep/lockstep.cuh"
#include "relu_layer.cuh"
#include "softmax.cuh"

using namespace lockstep;  // as every example has it

/// `Mlp` of mlp.hpp with its arithmetic on the GPU: the same parameters under the same names. It
/// computes in the type in which the step hands parameters out: `float`, and `BFloat16` or `Half`
/// under `Precision<Mixed<...>>`.
///
/// A batch has `size()` rows in device memory: `inputs`, row-major, `labels`, one integer below
/// Classes for each row, and `weights`, one number for each row (null: all rows weigh the same).
/// The loss is the weighted mean.
///
/// Batches of up to `FewRows` are multiplied by the kernel of few_rows.cuh if they are float,
/// others by cuBLASLt.
template <class T, std::size_t Inputs, std::size_t Hidden, std::size_t Classes,
          std::size_t FewRows = 128>
class GpuMlp {
 public:
  using Parameters =
      ParameterList<Parameter<"fc1.weight", T, Hidden, Inputs>, Parameter<"fc1.bias", T, Hidden>,
                    Parameter<"fc2.weight", T, Hidden, Hidden>, Parameter<"fc2.bias", T, Hidden>,
                    Parameter<"fc3.weight", T, Classes, Hidden>, Parameter<"fc3.bias", T, Classes>>;

  /// For another replica of `ParallelStrategy<DP>`, on another GPU perhaps: the same model, with
  /// memory of its own.
  GpuMlp replicate() const { return {}; }

  /// **Stream** puts the mean loss of the batch into `step.loss()`.
  void forward(auto& step, const auto& batch) { run(step, batch, step.loss()); }

  /// **Stream** overwrites all gradients, for the batch that `forward` has just seen.
  void backward(auto& step, const auto& batch) {
    auto& plan = plan_for(step, batch.size());
    const cudaStream_t stream = step.stream();
    plan.fc3.backward(stream, plan.hidden2, at(step.param("fc3.weight"_p)),
                      at(step.grad("fc3.weight"_p)), at(step.grad("fc3.bias"_p)), plan.errors2,
                      at(step.grad("fc2.bias"_p)));
    step.ready("fc3.bias"_p);
    step.ready("fc3.weight"_p);
    step.ready("fc2.bias"_p);

    // The second layer's two products do not fill the GPU and are independent of each other.
    plan.fork.record(stream);
    plan.fork.block(plan.side);
    plan.fc2.weight_gradient(plan.side, plan.errors2, plan.hidden1, at(step.grad("fc2.weight"_p)));
    plan.join.record(plan.side);
    plan.fc2.input_gradient(stream, plan.errors2, at(step.param("fc2.weight"_p)), plan.hidden1,
                            plan.errors1);
    plan.join.block(stream);
    step.ready("fc2.weight"_p);

    plan.fc1.weight_and_bias_gradient(stream, plan.errors1, inputs_of(plan, batch),
                                      at(step.grad("fc1.weight"_p)), at(step.grad("fc1.bias"_p)));
    step.ready("fc1.bias"_p);
    step.ready("fc1.weight"_p);  // the gradient of the inputs is not needed
  }

  /// **Host** waits for the batch's sums, and adds them to a tally: `add(name, sum, count)`.
  void evaluate(auto& step, const auto& batch, auto& tally) {
    run(step, batch, nullptr);
    const softmax::Score total = plan_for(step, batch.size()).fc3.score(step);
    const auto count = static_cast<std::size_t>(total.weight);
    tally.add("loss", total.loss, count);
    tally.add("accuracy", total.correct, count);
  }

 private:
  /// The memory and plans for batches of one size, made for the first such batch and kept, because
  /// captured steps refer to them.
  template <class C>
  struct Plan {
    Plan(std::size_t rows, const CublasLt* cublas)
        : fc1(rows, cublas),
          fc2(rows, cublas),
          fc3(rows),
          converted(std::is_same_v<C, float> ? 0 : rows * Inputs),
          hidden1(rows * Hidden),
          hidden2(rows * Hidden),
          errors1(rows * Hidden),
          errors2(rows * Hidden) {}

    ReluLayer<C, Inputs, Hidden> fc1;
    ReluLayer<C, Hidden, Hidden> fc2;
    softmax::Head<C, Hidden, Classes> fc3;
    DeviceArray<C> converted;         // the inputs, where they are not float
    DeviceArray<C> hidden1, hidden2;  // after ReLU
    DeviceArray<C> errors1, errors2;  // gradients of the hidden layers' outputs
    CudaStream side;
    CudaEvent fork, join;
  };
  template <class C>
  using Plans = std::map<std::size_t, Plan<C>>;

  template <class Step>
  using ComputeType = std::remove_const_t<typename decltype(std::declval<Step&>().param(
      "fc1.weight"_p))::element_type>;

  template <class Step>
  Plan<ComputeType<Step>>& plan_for(Step&, std::size_t rows) {
    using C = ComputeType<Step>;
    auto& plans = std::get<Plans<C>>(plans_);
    const auto found = plans.find(rows);
    if (found != plans.end()) return found->second;
    const bool few = rows <= FewRows && ReluLayer<C, Inputs, Hidden>::few_rows_can;
    if (!few && !cublas_) cublas_.emplace();
    return plans.try_emplace(rows, rows, few ? nullptr : &*cublas_).first->second;
  }

  static auto* at(auto view) { return view.data_handle(); }

  /// The batch's inputs in the type of the products, once `convert_inputs` has seen them.
  template <class C>
  static const C* inputs_of(const Plan<C>& plan, const auto& batch) {
    if constexpr (std::is_same_v<C, float>) return batch.inputs;
    return plan.converted;
  }

  template <class C>
  static void convert_inputs(cudaStream_t stream, const Plan<C>& plan, const auto& batch) {
    if constexpr (!std::is_same_v<C, float>) {
      elementwise::convert<C>(stream, batch.inputs, plan.converted, batch.size() * Inputs);
    }
  }

  /// Up to the loss and its gradient by the outputs.
  void run(auto& step, const auto& batch, double* mean_loss) {
    auto& plan = plan_for(step, batch.size());
    const cudaStream_t stream = step.stream();
    convert_inputs(stream, plan, batch);
    plan.fc1.forward(stream, inputs_of(plan, batch), at(step.param("fc1.weight"_p)),
                     at(step.param("fc1.bias"_p)), plan.hidden1);
    plan.fc2.forward(stream, plan.hidden1, at(step.param("fc2.weight"_p)),
                     at(step.param("fc2.bias"_p)), plan.hidden2);
    const float* scale = nullptr;
    if constexpr (requires { step.loss_scale(); }) scale = step.loss_scale();
    plan.fc3.forward(stream, plan.hidden2, at(step.param("fc3.weight"_p)),
                     at(step.param("fc3.bias"_p)), batch.labels, batch.weights, scale, mean_loss);
  }

  std::optional<CublasLt> cublas_;
  std::tuple<Plans<float>, Plans<BFloat16>, Plans<Half>> plans_;
};
