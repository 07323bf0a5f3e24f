// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The layers that a `GpuConvNet` of the examples takes from elsewhere, in plain loops: one
/// thread for each number. Slow and easy to believe, and without cuDNN.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "device_array.cuh"
#include "gpu/plain_mlp.cuh"

namespace train {

/// What one pixel and one of nine weights of a filter have to do with each other.
struct Window {
  std::size_t side;

  /// Is the pixel at (y + dy - 1, x + dx - 1) one of the image's?
  __host__ __device__ bool has(std::size_t y, std::size_t x, std::size_t dy, std::size_t dx) const {
    return y + dy >= 1 && y + dy <= side && x + dx >= 1 && x + dx <= side;
  }
};

/// y(n, o, p) = bias(o) + the sum of w(o, c, d) x(n, c, p + d).
template <class T>
LOCKSTEP_KERNEL plain_convolution(const T* w, const T* bias, const T* x, T* y, std::size_t rows,
                                  std::size_t in, std::size_t out, std::size_t side) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * out * side * side) return;
  const std::size_t px = at % side;
  const std::size_t py = at / side % side;
  const std::size_t o = at / (side * side) % out;
  const std::size_t n = at / (side * side * out);
  T sum = bias[o];
  for (std::size_t c = 0; c < in; ++c)
    for (std::size_t dy = 0; dy < 3; ++dy)
      for (std::size_t dx = 0; dx < 3; ++dx)
        if (Window{side}.has(py, px, dy, dx))
          sum += w[((o * in + c) * 3 + dy) * 3 + dx] *
                 x[((n * in + c) * side + py + dy - 1) * side + px + dx - 1];
  y[at] = sum;
}

/// A thread for each weight, then one for each bias.
template <class T>
LOCKSTEP_KERNEL plain_filter_gradient(T* w, T* bias, const T* x, const T* d, std::size_t rows,
                                      std::size_t in, std::size_t out, std::size_t side) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const std::size_t weights = out * in * 9;
  if (at >= weights + out) return;
  const bool is_bias = at >= weights;
  const std::size_t o = is_bias ? at - weights : at / (in * 9);
  const std::size_t c = at / 9 % in;
  const std::size_t dy = at / 3 % 3;
  const std::size_t dx = at % 3;
  T sum = 0;
  for (std::size_t n = 0; n < rows; ++n)
    for (std::size_t py = 0; py < side; ++py)
      for (std::size_t px = 0; px < side; ++px) {
        const T error = d[((n * out + o) * side + py) * side + px];
        if (is_bias) {
          sum += error;
        } else if (Window{side}.has(py, px, dy, dx)) {
          sum += error * x[((n * in + c) * side + py + dy - 1) * side + px + dx - 1];
        }
      }
  (is_bias ? bias[o] : w[at]) = sum;
}

/// A thread for each input.
template <class T>
LOCKSTEP_KERNEL plain_image_gradient(const T* w, const T* d, T* x, std::size_t rows, std::size_t in,
                                     std::size_t out, std::size_t side) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= rows * in * side * side) return;
  const std::size_t px = at % side;
  const std::size_t py = at / side % side;
  const std::size_t c = at / (side * side) % in;
  const std::size_t n = at / (side * side * in);
  T sum = 0;
  for (std::size_t o = 0; o < out; ++o)
    for (std::size_t dy = 0; dy < 3; ++dy)
      for (std::size_t dx = 0; dx < 3; ++dx)
        if (Window{side}.has(py, px, 2 - dy, 2 - dx))  // the output at (py + 1 - dy, px + 1 - dx)
          sum += w[((o * in + c) * 3 + dy) * 3 + dx] *
                 d[((n * out + o) * side + py + 1 - dy) * side + px + 1 - dx];
  x[at] = sum;
}

struct KernelLayers {
  struct Library {};

  struct Shape {
    std::size_t rows, in, out, side;
  };

  template <class T>
  class Convolution {
   public:
    Convolution(const Library&, const Shape& shape) : s_(shape) {}

    void forward(cudaStream_t stream, const T* x, const T* w, const T* bias, T* y) const {
      run<plain_convolution<T>>(stream, s_.rows * s_.out * pixels(), w, bias, x, y);
    }
    void parameter_gradients(cudaStream_t stream, const T* x, const T* d, T* w, T* bias) const {
      run<plain_filter_gradient<T>>(stream, s_.out * (s_.in * 9 + 1), w, bias, x, d);
    }
    void input_gradient(cudaStream_t stream, const T* d, const T* w, T* x) const {
      run<plain_image_gradient<T>>(stream, s_.rows * s_.in * pixels(), w, d, x);
    }

   private:
    std::size_t pixels() const { return s_.side * s_.side; }

    template <auto Kernel>
    void run(cudaStream_t stream, std::size_t threads, auto*... data) const {
      if (threads == 0) return;
      detail::launch_kernel<Kernel>("a plain convolution", stream,
                                    static_cast<unsigned>((threads + 127) / 128), 128, data...,
                                    s_.rows, s_.in, s_.out, s_.side);
    }

    Shape s_;
  };

  /// A linear layer and the mean cross entropy of all rows, whatever they weigh.
  template <class T, std::size_t, std::size_t>
  class Head {
   public:
    Head(std::size_t rows, std::size_t features, std::size_t classes)
        : rows_(rows), features_(features), classes_(classes), errors_(rows * classes) {}

    void forward(cudaStream_t stream, const T* hidden, const T* w, const T* bias,
                 const std::int32_t* labels, const float*, const float* scale, double* loss) {
      if (rows_ == 0) {
        check_cuda(cudaMemsetAsync(loss, 0, sizeof *loss, stream), "cudaMemsetAsync");
        return;
      }
      kernels(stream).linear(w, bias, hidden, static_cast<T*>(errors_), classes_, features_, false);
      kernels(stream).loss(errors_, labels, classes_, scale, loss);
    }
    void backward(cudaStream_t stream, const T* hidden, const T* w, T* weight_gradient,
                  T* bias_gradient, T* hidden_errors, T*) {
      const T* const errors = errors_;
      kernels(stream).layer_back(weight_gradient, bias_gradient, hidden, errors, classes_,
                                 features_);
      if (rows_ == 0) return;
      kernels(stream).input_gradient(w, errors, hidden, hidden_errors, classes_, features_);
    }

   private:
    auto kernels(cudaStream_t stream) const {
      return PlainKernels<element_kind<T>(), T>{stream, rows_};
    }

    std::size_t rows_, features_, classes_;
    DeviceArray<T> errors_;
  };
};

}  // namespace train
