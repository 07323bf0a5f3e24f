// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The networks of `syncbn.json` and `syncbn_train.json` on a GPU: batch norms of the library
/// between plain layers.

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "device_array.cuh"
#include "gpu/plain_mlp.cuh"
#include "lockstep/lockstep.cuh"

namespace train {

/// What a batch norm alone is given, and where its results go, all in device memory.
template <class T>
struct NormPass {
  const T* x = nullptr;
  const T* dy = nullptr;
  T* y = nullptr;
  T* dx = nullptr;
  std::size_t rows = 0;
  std::size_t positions = 0;

  friend bool operator==(const NormPass&, const NormPass&) = default;
};

/// A batch norm and nothing else. Its loss is zero, its outputs' gradient is the pass's.
template <class T>
struct NormAlone {
  using Norm = BatchNorm<"bn", dynamic, T>;
  using Parameters = ParameterList<Norm>;
  using Buffers = BufferList<Norm>;

  std::size_t channels = 0;
  Norm norm;

  void shapes(auto& shape) const { Norm::shapes(shape, channels); }

  void initialize(auto& initial) {
    for (std::size_t c = 0; c < channels; ++c) {
      initial.param("bn.weight"_p)(c) = static_cast<T>(wave(c, 3, 1));
      initial.param("bn.bias"_p)(c) = static_cast<T>(wave(c, 4, 1));
    }
  }

  void forward(auto& step, const NormPass<T>& pass) {
    norm.forward(step, view(pass, pass.x), view(pass, pass.y));
    check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
  }
  void backward(auto& step, const NormPass<T>& pass) {
    norm.backward(step, view(pass, pass.x), view(pass, pass.dy), view(pass, pass.dx));
  }

 private:
  template <class Value>
  auto view(const NormPass<T>& pass, Value* data) const {
    return DeviceView<Value, dynamic, dynamic, dynamic>(data, pass.rows, channels, pass.positions);
  }
};

/// fc1, batch norm, ReLU, fc2, cross entropy. A rank may have no rows.
template <class T>
struct NormMlp {
  using Norm = BatchNorm<"bn1", dynamic, T>;
  using Parameters =
      ParameterList<Parameter<"fc1.weight", T, dynamic, dynamic>, Parameter<"fc1.bias", T, dynamic>,
                    Norm, Parameter<"fc2.weight", T, dynamic, dynamic>,
                    Parameter<"fc2.bias", T, dynamic>>;
  using Buffers = BufferList<Norm>;
  using Output = OutputOf<T, dynamic>;

  std::size_t in = 0, hidden = 0, out = 0;
  Norm norm;

  void shapes(auto& shape) const {
    shape("fc1.weight"_p, hidden, in);
    shape("fc1.bias"_p, hidden);
    Norm::shapes(shape, hidden);
    shape("fc2.weight"_p, out, hidden);
    shape("fc2.bias"_p, out);
  }
  std::array<std::size_t, 1> output_extents() const { return {out}; }

  static void for_each_parameter(const auto& step, auto&& f) {
    f("fc1.weight", step.param("fc1.weight"_p));
    f("fc1.bias", step.param("fc1.bias"_p));
    f("bn1.weight", step.param("bn1.weight"_p));
    f("bn1.bias", step.param("bn1.bias"_p));
    f("fc2.weight", step.param("fc2.weight"_p));
    f("fc2.bias", step.param("fc2.bias"_p));
  }

  void forward(auto& step, const auto& batch) {
    Numbers& numbers = numbers_for(batch.size());
    predict_to(step, batch, static_cast<T*>(numbers.outputs));
    if (batch.size() == 0) {
      check_cuda(cudaMemsetAsync(step.loss(), 0, sizeof(double), step.stream()), "cudaMemsetAsync");
    } else {
      kernels(step, batch)
          .loss(static_cast<T*>(numbers.outputs), batch.labels, out, nullptr, step.loss());
    }
  }

  void predict(auto& step, const auto& batch, auto outputs) {
    predict_to(step, batch, outputs.data_handle());
  }

  void backward(auto& step, const auto& batch) {
    Numbers& numbers = numbers_for(batch.size());
    const auto run = kernels(step, batch);
    T* const d = numbers.outputs;
    T* const active = numbers.active;
    T* const errors = numbers.errors;
    run.layer_back(step.grad("fc2.weight"_p).data_handle(), step.grad("fc2.bias"_p).data_handle(),
                   active, static_cast<const T*>(d), out, hidden);
    step.ready("fc2.bias"_p);
    step.ready("fc2.weight"_p);
    if (batch.size() != 0)
      run.input_gradient(step.param("fc2.weight"_p).data_handle(), d, active, errors, out, hidden);
    norm.backward_relu(step, view(batch, static_cast<T*>(numbers.linear)), view(batch, errors),
                       view(batch, errors));
    run.layer_back(step.grad("fc1.weight"_p).data_handle(), step.grad("fc1.bias"_p).data_handle(),
                   batch.inputs, static_cast<const T*>(errors), hidden, in);
    step.ready("fc1.bias"_p);
    step.ready("fc1.weight"_p);
  }

 private:
  /// The activations of batches of one size, which captured steps refer to.
  struct Numbers {
    Numbers(std::size_t rows, std::size_t hidden, std::size_t out)
        : linear(rows * hidden),
          active(rows * hidden),
          errors(rows * hidden),
          outputs(rows * out) {}
    DeviceArray<T> linear, active, errors, outputs;
  };

  Numbers& numbers_for(std::size_t rows) {
    const auto found = numbers_.find(rows);
    if (found != numbers_.end()) return found->second;
    return numbers_.try_emplace(rows, rows, hidden, out).first->second;
  }

  void predict_to(auto& step, const auto& batch, T* outputs) {
    Numbers& numbers = numbers_for(batch.size());
    const auto run = kernels(step, batch);
    T* const linear = numbers.linear;
    T* const active = numbers.active;
    if (batch.size() != 0)
      run.linear(step.param("fc1.weight"_p).data_handle(), step.param("fc1.bias"_p).data_handle(),
                 batch.inputs, linear, hidden, in, false);
    norm.forward_relu(step, view(batch, linear), view(batch, active));
    if (batch.size() != 0)
      run.linear(step.param("fc2.weight"_p).data_handle(), step.param("fc2.bias"_p).data_handle(),
                 active, outputs, out, hidden, false);
  }

  auto view(const auto& batch, T* data) const {
    return DeviceView<T, dynamic, dynamic>(data, batch.size(), hidden);
  }
  static auto kernels(auto& step, const auto& batch) {
    return PlainKernels<element_kind<T>(), T>{step.stream(), batch.size()};
  }

  std::map<std::size_t, Numbers> numbers_;
};

}  // namespace train
