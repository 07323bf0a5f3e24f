// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The reference network of `ddp.json` on a GPU: one thread for each number, plain loops.
/// Slow and easy to believe, like its twin in tests/train/plain_mlp.hpp.

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/macros.hpp"
#include "lockstep/detail/data/device_batch.cuh"
#include "lockstep/detail/device/cuda/memory.cuh"
#include "lockstep/detail/device/cuda/runtime.cuh"
#include "train/plain_mlp.hpp"

namespace train {

// P is the type of weights and gradients, A the one in which sums are kept.

template <class P, class X, class A>
LOCKSTEP_KERNEL plain_linear(const P* w, const P* bias, const X* x, A* y, std::size_t rows,
                             std::size_t n, std::size_t m, bool relu) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * n) return;
  const std::size_t b = at / n;
  const std::size_t j = at % n;
  A sum = static_cast<A>(bias[j]);
  for (std::size_t i = 0; i < m; ++i)
    sum += static_cast<A>(w[j * m + i]) * static_cast<A>(x[b * m + i]);
  y[at] = relu && sum < A{0} ? A{0} : sum;
}

/// One thread: outputs become the gradient of the mean loss.
template <class A>
LOCKSTEP_KERNEL plain_loss(A* y, const std::int32_t* labels, std::size_t rows, std::size_t n,
                           const float* scale, double* loss) {
  double total = 0;
  for (std::size_t b = 0; b < rows; ++b) {
    A* const row = y + b * n;
    A top = row[0];
    for (std::size_t j = 1; j < n; ++j) top = row[j] > top ? row[j] : top;
    A sum = 0;
    for (std::size_t j = 0; j < n; ++j) sum += exp(row[j] - top);
    total += static_cast<double>(log(sum) + top - row[labels[b]]);
    const A factor = (scale == nullptr ? A{1} : static_cast<A>(*scale)) / static_cast<A>(rows);
    for (std::size_t j = 0; j < n; ++j)
      row[j] = (exp(row[j] - top) / sum - (j == static_cast<std::size_t>(labels[b]))) * factor;
  }
  *loss = total / static_cast<double>(rows);
}

template <class P, class X, class A>
LOCKSTEP_KERNEL plain_layer_back(P* w, P* bias, const X* x, const A* d, std::size_t rows,
                                 std::size_t n, std::size_t m) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= n * (m + 1)) return;
  const std::size_t j = at / (m + 1);
  const std::size_t i = at % (m + 1);
  A sum = 0;
  for (std::size_t b = 0; b < rows; ++b)
    sum += d[b * n + j] * (i == m ? A{1} : static_cast<A>(x[b * m + (i == m ? 0 : i)]));
  P* const gradient = i == m ? bias : w;  // null where the parameter is frozen
  if (gradient != nullptr) gradient[i == m ? j : j * m + i] = static_cast<P>(sum);
}

template <class P, class A>
LOCKSTEP_KERNEL plain_input_gradient(const P* w, const A* d, const A* activation, A* out,
                                     std::size_t rows, std::size_t n, std::size_t m) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * m) return;
  const std::size_t b = at / m;
  const std::size_t i = at % m;
  A sum = 0;
  for (std::size_t j = 0; j < n; ++j) sum += static_cast<A>(w[j * m + i]) * d[b * n + j];
  out[at] = activation[at] <= A{0} ? A{0} : sum;
}

/// Kernels are launched from here with plain types: nvcc cannot write those that come from a job.
template <ElementKind Kind, class X>
struct PlainKernels {
  using P = ElementOf<Kind>;
  using A = detail::Accumulator<P>;
  cudaStream_t stream;
  std::size_t rows;

  static unsigned blocks(std::size_t count) { return static_cast<unsigned>((count + 127) / 128); }

  template <class In>
  void linear(const void* w, const void* bias, const In* x, A* y, std::size_t n, std::size_t m,
              bool relu) const {
    detail::launch_kernel<plain_linear<P, In, A>>(
        "linear", stream, blocks(rows * n), 128, static_cast<const P*>(w),
        static_cast<const P*>(bias), x, y, rows, n, m, relu);
  }
  void loss(A* y, const std::int32_t* labels, std::size_t n, const float* scale,
            double* loss) const {
    detail::launch_kernel<plain_loss<A>>("loss", stream, 1, 1, y, labels, rows, n, scale, loss);
  }
  template <class In>
  void layer_back(void* w, void* bias, const In* x, const A* d, std::size_t n,
                  std::size_t m) const {
    detail::launch_kernel<plain_layer_back<P, In, A>>("layer_back", stream, blocks(n * (m + 1)),
                                                      128, static_cast<P*>(w),
                                                      static_cast<P*>(bias), x, d, rows, n, m);
  }
  void input_gradient(const void* w, const A* d, const A* activation, A* out, std::size_t n,
                      std::size_t m) const {
    detail::launch_kernel<plain_input_gradient<P, A>>("input_gradient", stream, blocks(rows * m),
                                                      128, static_cast<const P*>(w), d, activation,
                                                      out, rows, n, m);
  }
};

/// `T` is the declared type. Extents may be `dynamic`: then they are the constructor's.
template <class T, std::size_t In, std::size_t Hidden, std::size_t Out>
struct GpuPlainMlp {
  using Parameters =
      ParameterList<Parameter<"fc1.weight", T, Hidden, In>, Parameter<"fc1.bias", T, Hidden>,
                    Parameter<"fc2.weight", T, Hidden, Hidden>, Parameter<"fc2.bias", T, Hidden>,
                    Parameter<"fc3.weight", T, Out, Hidden>, Parameter<"fc3.bias", T, Out>>;

  std::size_t in = In;
  std::size_t hidden = Hidden;
  std::size_t out = Out;
  bool waits = false;           // for the stream, in forward: such a step cannot be captured
  bool leaves_out_fc2 = false;  // then fc3 follows fc1, and the gradient of fc2 is zero
  bool gives_zeros = true;      // where fc2 is left out; else it has no gradient

  void shapes(auto& shape) const {
    shape("fc1.weight"_p, hidden, in);
    shape("fc1.bias"_p, hidden);
    shape("fc2.weight"_p, hidden, hidden);
    shape("fc2.bias"_p, hidden);
    shape("fc3.weight"_p, out, hidden);
    shape("fc3.bias"_p, out);
  }

  void initialize(auto& initial) {
    double k = 1;
    PlainMlp<In, Hidden, Out>::for_each_parameter(initial, [&](const auto& view) {
      using Value = typename std::remove_cvref_t<decltype(view)>::value_type;
      for (std::size_t i = 0; i < view.size(); ++i)
        view.data_handle()[i] = static_cast<Value>(wave(i, k, 0.2));
      ++k;
    });
  }

  /// For another replica: memory and all cannot be copied.
  GpuPlainMlp replicate() const {
    GpuPlainMlp other;
    copy_settings(other);
    return other;
  }

  void forward(auto& step, const auto& batch) {
    const auto run = kernels(step, batch);
    using A = typename decltype(run)::A;
    predict_to(step, batch, [&] { return outputs<A>(batch); });
    const float* scale = nullptr;
    if constexpr (requires { step.loss_scale(); }) scale = step.loss_scale();
    run.loss(outputs<A>(batch), batch.labels, out, scale, step.loss());
  }

  void backward(auto& step, const auto& batch) {
    using A = typename decltype(kernels(step, batch))::A;
    go_back(step, batch, outputs<A>(batch));
  }

 protected:
  void copy_settings(GpuPlainMlp& other) const {
    other.in = in;
    other.hidden = hidden;
    other.out = out;
    other.waits = waits;
    other.leaves_out_fc2 = leaves_out_fc2;
    other.gives_zeros = gives_zeros;
  }

  /// Up to the outputs, which go to `outputs_at()`: there may have to be room first.
  void predict_to(auto& step, const auto& batch, const auto& outputs_at) {
    const auto run = kernels(step, batch);
    using A = typename decltype(run)::A;
    const std::size_t numbers = batch.size() * (4 * hidden + out) * sizeof(A);
    if (!memory_ || memory_->bytes() < numbers) {
      check_cuda(cudaStreamSynchronize(step.stream()), "cudaStreamSynchronize");
      memory_.emplace(numbers);
    }
    if (waits) check_cuda(cudaStreamSynchronize(step.stream()), "cudaStreamSynchronize");
    run.linear(data(step.param("fc1.weight"_p)), data(step.param("fc1.bias"_p)), batch.inputs,
               a1<A>(), hidden, in, true);
    if (!leaves_out_fc2) {
      run.linear(data(step.param("fc2.weight"_p)), data(step.param("fc2.bias"_p)), a1<A>(),
                 a2<A>(batch), hidden, hidden, true);
    }
    run.linear(data(step.param("fc3.weight"_p)), data(step.param("fc3.bias"_p)), top<A>(batch),
               outputs_at(), out, hidden, false);
  }

  /// Back from the outputs' gradient.
  template <class A>
  void go_back(auto& step, const auto& batch, const A* d3) {
    const auto run = kernels(step, batch);
    run.layer_back(slopes(step, "fc3.weight"_p), slopes(step, "fc3.bias"_p), top<A>(batch), d3, out,
                   hidden);
    mark(step, "fc3.bias"_p);
    mark(step, "fc3.weight"_p);
    run.input_gradient(data(step.param("fc3.weight"_p)), d3, top<A>(batch),
                       leaves_out_fc2 ? d1<A>(batch) : d2<A>(batch), out, hidden);
    if (leaves_out_fc2 && gives_zeros) {
      clear(step, "fc2.bias"_p);
      clear(step, "fc2.weight"_p);
    } else if (!leaves_out_fc2) {
      run.layer_back(slopes(step, "fc2.weight"_p), slopes(step, "fc2.bias"_p), a1<A>(),
                     d2<A>(batch), hidden, hidden);
    }
    if (!leaves_out_fc2 || gives_zeros) {
      mark(step, "fc2.bias"_p);
      mark(step, "fc2.weight"_p);
    }
    if (!leaves_out_fc2) {
      run.input_gradient(data(step.param("fc2.weight"_p)), d2<A>(batch), a1<A>(), d1<A>(batch),
                         hidden, hidden);
    }
    run.layer_back(slopes(step, "fc1.weight"_p), slopes(step, "fc1.bias"_p), batch.inputs,
                   d1<A>(batch), hidden, in);
    mark(step, "fc1.bias"_p);
    mark(step, "fc1.weight"_p);
  }

  /// Where a gradient goes: nowhere for a frozen parameter.
  static void* slopes(auto& step, auto key) {
    void* address = nullptr;
    if_trained(step, key, [&](auto& trained) { address = data(trained.grad(key)); });
    return address;
  }
  static void clear(auto& step, auto key) {
    if_trained(step, key, [&](auto& trained) {
      const auto view = trained.grad(key);
      check_cuda(
          cudaMemsetAsync(view.data_handle(), 0,
                          view.size() * sizeof(typename decltype(view)::value_type), step.stream()),
          "cudaMemsetAsync");
    });
  }
  static void mark(auto& step, auto key) {
    if_trained(step, key, [&](auto& trained) { trained.ready(key); });
  }

  static auto kernels(auto& step, const auto& batch) {
    using View = decltype(step.param("fc1.weight"_p));
    constexpr ElementKind kind = element_kind<typename View::value_type>();
    return PlainKernels<kind, T>{step.stream(), batch.size()};
  }

 private:
  template <class View>
  static auto data(const View& view) {
    using Address =
        std::conditional_t<std::is_const_v<typename View::element_type>, const void*, void*>;
    return static_cast<Address>(view.data_handle());
  }

  template <class A>
  A* a1() const {
    return reinterpret_cast<A*>(memory_->data());
  }
  template <class A>
  A* a2(const auto& batch) const {
    return a1<A>() + batch.size() * hidden;
  }
  /// What fc3 is given.
  template <class A>
  A* top(const auto& batch) const {
    return leaves_out_fc2 ? a1<A>() : a2<A>(batch);
  }
  template <class A>
  A* d1(const auto& batch) const {
    return a2<A>(batch) + batch.size() * hidden;
  }
  template <class A>
  A* d2(const auto& batch) const {
    return d1<A>(batch) + batch.size() * hidden;
  }
  template <class A>
  A* outputs(const auto& batch) const {
    return d2<A>(batch) + batch.size() * hidden;
  }

  std::optional<DeviceArena> memory_;
};

/// The same in two parts: outputs, and the loss of all of them.
template <class T, std::size_t In, std::size_t Hidden, std::size_t Out>
struct GpuSplitMlp : GpuPlainMlp<T, In, Hidden, Out> {
  using Output = OutputOf<T, Out>;
  auto output_extents() const { return std::array<std::size_t, 1>{this->out}; }
  GpuSplitMlp replicate() const {
    GpuSplitMlp other;
    this->copy_settings(other);
    return other;
  }

  void predict(auto& step, const auto& batch, auto outputs) {
    this->predict_to(step, batch, [&] { return outputs.data_handle(); });
  }
  void loss(auto& step, const auto& batch, auto outputs, auto gradients) {
    check_cuda(cudaMemcpyAsync(gradients.data_handle(), outputs.data_handle(),
                               outputs.size() * sizeof(T), cudaMemcpyDefault, step.stream()),
               "cudaMemcpyAsync");
    const float* scale = nullptr;
    if constexpr (requires { step.loss_scale(); }) scale = step.loss_scale();
    this->kernels(step, batch)
        .loss(gradients.data_handle(), batch.labels, this->out, scale, step.loss());
  }
  using GpuPlainMlp<T, In, Hidden, Out>::backward;
  void backward(auto& step, const auto& batch, auto gradients) {
    this->go_back(step, batch, static_cast<const T*>(gradients.data_handle()));
  }
};

/// The same, which leaves out fc2 where the step's sub-graph does.
template <class T, std::size_t In, std::size_t Hidden, std::size_t Out>
struct GpuSubgraphMlp : GpuPlainMlp<T, In, Hidden, Out> {
  void forward(auto& step, const auto& batch) {
    this->leaves_out_fc2 = !step.uses("fc2.weight"_p);
    this->gives_zeros = false;
    GpuPlainMlp<T, In, Hidden, Out>::forward(step, batch);
  }
};

/// The batch of rank r in micro-step s, as `ddp.json` has it.
template <class T>
LabelledBatch<T, std::int32_t> labelled(const Samples& samples) {
  LabelledBatch<T, std::int32_t> batch;
  batch.resize(samples.size(), samples.inputs);
  for (std::size_t i = 0; i < samples.x.size(); ++i) batch.inputs[i] = static_cast<T>(samples.x[i]);
  for (std::size_t i = 0; i < samples.size(); ++i)
    batch.labels[i] = static_cast<std::int32_t>(samples.y[i]);
  return batch;
}

}  // namespace train
