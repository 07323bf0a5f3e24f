// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Convolution by cuDNN: planned once for batches of one size, run often.

#include <cudnn.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "device_array.cuh"
#include "lockstep/lockstep.cuh"

inline void check_cudnn(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) [[likely]]
    return;
  throw lockstep::Error(call, cudnnGetErrorString(status),
                        "see cuDNN's documentation of this status", lockstep::rank_of_thread());
}

/// cuDNN for the current GPU.
class Cudnn {
 public:
  Cudnn() {
    cudnnHandle_t handle = nullptr;
    check_cudnn(cudnnCreate(&handle), "cudnnCreate");
    handle_.reset(handle);
  }
  cudnnHandle_t get() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(cudnnHandle_t handle) const { static_cast<void>(cudnnDestroy(handle)); }
  };
  std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, Destroy> handle_;
};

/// A descriptor of cuDNN, by the functions that make and end it.
template <class Descriptor, auto Create, auto End>
class CudnnDescriptor {
 public:
  CudnnDescriptor() {
    Descriptor descriptor = nullptr;
    check_cudnn(Create(&descriptor), "a descriptor of cuDNN");
    descriptor_.reset(descriptor);
  }
  operator Descriptor() const { return descriptor_.get(); }  // NOLINT

 private:
  struct Destroy {
    void operator()(Descriptor descriptor) const { static_cast<void>(End(descriptor)); }
  };
  std::unique_ptr<std::remove_pointer_t<Descriptor>, Destroy> descriptor_;
};
using CudnnTensor = CudnnDescriptor<cudnnTensorDescriptor_t, cudnnCreateTensorDescriptor,
                                    cudnnDestroyTensorDescriptor>;
using CudnnFilter = CudnnDescriptor<cudnnFilterDescriptor_t, cudnnCreateFilterDescriptor,
                                    cudnnDestroyFilterDescriptor>;
using CudnnProduct = CudnnDescriptor<cudnnConvolutionDescriptor_t, cudnnCreateConvolutionDescriptor,
                                     cudnnDestroyConvolutionDescriptor>;

/// The rows, channels and side of square images, and the channels that a convolution makes of them.
struct ConvolutionShape {
  std::size_t rows, in, out, side;
};

/// outputs = inputs * weight + bias with filters of 3 x 3 and a border of one zero, so that images
/// keep their side; and back. Images are (N, C, H, W). Everything is enqueued on the stream that is
/// given; a batch of no rows needs no kernel.
///
/// The algorithm is the first that cuDNN's heuristics name among those whose results never change.
/// It is not chosen by measuring, which could make two runs differ. `Tf32` rounds the factors of
/// products of floats to 11 bits where the GPU's tensor cores do so; PyTorch's convolutions do it
/// unless told otherwise.
template <class T, bool Tf32 = true>
class CudnnConvolution {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>,
                "lockstep: this convolution computes in float or double");

 public:
  CudnnConvolution(const Cudnn& cudnn, ConvolutionShape shape)
      : cudnn_(cudnn.get()), shape_(shape) {
    if (shape.rows == 0) return;
    const int side = whole(shape.side);
    describe(inputs_, shape.rows, shape.in, side);
    describe(outputs_, shape.rows, shape.out, side);
    describe(bias_, 1, shape.out, 1);
    check_cudnn(cudnnSetFilter4dDescriptor(weight_, type, CUDNN_TENSOR_NCHW, whole(shape.out),
                                           whole(shape.in), 3, 3),
                "cudnnSetFilter4dDescriptor");
    forward_.choose(cudnn_, cudnnGetConvolutionForwardAlgorithm_v7, inputs_, weight_, outputs_);
    weight_back_.choose(cudnn_, cudnnGetConvolutionBackwardFilterAlgorithm_v7, inputs_, outputs_,
                        weight_);
    input_back_.choose(cudnn_, cudnnGetConvolutionBackwardDataAlgorithm_v7, weight_, outputs_,
                       inputs_);
  }

  void forward(cudaStream_t stream, const T* inputs, const T* weight, const T* bias, T* outputs) {
    if (shape_.rows == 0) return;
    const cudnnHandle_t handle = cudnn_on(stream);
    check_cudnn(cudnnConvolutionForward(handle, &one, inputs_, inputs, weight_, weight,
                                        forward_.product, forward_.algorithm, forward_.workspace(),
                                        forward_.bytes, &zero, outputs_, outputs),
                "cudnnConvolutionForward");
    check_cudnn(cudnnAddTensor(handle, &one, bias_, bias, &one, outputs_, outputs),
                "cudnnAddTensor");
  }

  /// From `errors`, the loss's gradient by the outputs.
  void parameter_gradients(cudaStream_t stream, const T* inputs, const T* errors, T* weight,
                           T* bias) {
    if (shape_.rows == 0) {
      clear(stream, weight, shape_.out * shape_.in * 9);
      clear(stream, bias, shape_.out);
      return;
    }
    const cudnnHandle_t handle = cudnn_on(stream);
    check_cudnn(cudnnConvolutionBackwardFilter(handle, &one, inputs_, inputs, outputs_, errors,
                                               weight_back_.product, weight_back_.algorithm,
                                               weight_back_.workspace(), weight_back_.bytes, &zero,
                                               weight_, weight),
                "cudnnConvolutionBackwardFilter");
    check_cudnn(cudnnConvolutionBackwardBias(handle, &one, outputs_, errors, &zero, bias_, bias),
                "cudnnConvolutionBackwardBias");
  }

  void input_gradient(cudaStream_t stream, const T* errors, const T* weight, T* result) {
    if (shape_.rows == 0) return;
    check_cudnn(cudnnConvolutionBackwardData(cudnn_on(stream), &one, weight_, weight, outputs_,
                                             errors, input_back_.product, input_back_.algorithm,
                                             input_back_.workspace(), input_back_.bytes, &zero,
                                             inputs_, result),
                "cudnnConvolutionBackwardData");
  }

 private:
  static constexpr cudnnDataType_t type =
      std::is_same_v<T, double> ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT;
  static constexpr T one = 1;
  static constexpr T zero = 0;

  /// How one of the three products is computed.
  template <class Algorithm, class Candidate>
  struct Product {
    CudnnProduct product;
    Algorithm algorithm{};
    std::size_t bytes = 0;
    std::unique_ptr<DeviceArray<std::byte>> memory;

    void* workspace() const { return memory ? static_cast<std::byte*>(*memory) : nullptr; }

    /// `find` is cuDNN's function; its operands are those of the product, the result last.
    void choose(cudnnHandle_t handle, auto find, const auto& first, const auto& second,
                const auto& result) {
      check_cudnn(
          cudnnSetConvolution2dDescriptor(product, 1, 1, 1, 1, 1, 1, CUDNN_CROSS_CORRELATION, type),
          "cudnnSetConvolution2dDescriptor");
      constexpr bool exact = std::is_same_v<T, float> && !Tf32;
      set_math(exact ? CUDNN_FMA_MATH : CUDNN_DEFAULT_MATH);
      std::array<Candidate, 16> found{};
      int count = 0;
      check_cudnn(find(handle, first, second, product, result, static_cast<int>(found.size()),
                       &count, found.data()),
                  "cudnnGetConvolution...Algorithm_v7");
      for (int i = 0; i < count; ++i) {
        const Candidate& candidate = found[static_cast<std::size_t>(i)];
        if (candidate.status != CUDNN_STATUS_SUCCESS ||
            candidate.determinism != CUDNN_DETERMINISTIC) {
          continue;
        }
        algorithm = candidate.algo;
        bytes = candidate.memory;
        set_math(candidate.mathType);
        if (bytes != 0) memory = std::make_unique<DeviceArray<std::byte>>(bytes);
        return;
      }
      throw lockstep::Error("CudnnConvolution",
                            "cuDNN knows no algorithm for this convolution whose results are "
                            "always the same",
                            "give it images of another size", lockstep::rank_of_thread());
    }

    void set_math(cudnnMathType_t math) {
      check_cudnn(cudnnSetConvolutionMathType(product, math), "cudnnSetConvolutionMathType");
    }
  };

  cudnnHandle_t cudnn_on(cudaStream_t stream) const {
    check_cudnn(cudnnSetStream(cudnn_, stream), "cudnnSetStream");
    return cudnn_;
  }

  static int whole(std::size_t number) { return static_cast<int>(number); }

  static void describe(const CudnnTensor& tensor, std::size_t rows, std::size_t channels,
                       int side) {
    check_cudnn(cudnnSetTensor4dDescriptor(tensor, CUDNN_TENSOR_NCHW, type, whole(rows),
                                           whole(channels), side, side),
                "cudnnSetTensor4dDescriptor");
  }

  static void clear(cudaStream_t stream, T* values, std::size_t count) {
    lockstep::check_cuda(cudaMemsetAsync(values, 0, count * sizeof(T), stream), "cudaMemsetAsync");
  }

  cudnnHandle_t cudnn_;
  ConvolutionShape shape_;
  CudnnTensor inputs_, outputs_, bias_;
  CudnnFilter weight_;
  Product<cudnnConvolutionFwdAlgo_t, cudnnConvolutionFwdAlgoPerf_t> forward_;
  Product<cudnnConvolutionBwdFilterAlgo_t, cudnnConvolutionBwdFilterAlgoPerf_t> weight_back_;
  Product<cudnnConvolutionBwdDataAlgo_t, cudnnConvolutionBwdDataAlgoPerf_t> input_back_;
};
