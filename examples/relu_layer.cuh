// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A linear layer with ReLU on a GPU: its three products, bias and gate.

#include <cstddef>
#include <optional>
#include <type_traits>

#include "elementwise.cuh"
#include "few_rows.cuh"
#include "lockstep/lockstep.cuh"
#include "matmul.cuh"

/// outputs = relu(inputs weight^T + bias), and back, for batches of one size. Everything is
/// enqueued on the stream that is given. With `cublas`, cuBLASLt multiplies; without, the kernel of
/// few_rows.cuh, which is for float and for features that are multiples of four.
template <class T, std::size_t In, std::size_t Out>
class ReluLayer {
 public:
  ReluLayer(std::size_t rows, const CublasLt* cublas) : rows_(rows) {
    if (cublas != nullptr) products_.emplace(*cublas, rows);
  }

  void forward(cudaStream_t stream, const T* inputs, const T* weight, const T* bias, T* outputs) {
    if (products_) return products_->forward(stream, inputs, weight, outputs, {bias});
    if constexpr (few_rows_can) {
      few_rows::forward(stream, rows_, In, Out, inputs, weight, bias, outputs);
    }
  }

  /// `errors`, the loss's gradient by the outputs, has been gated already.
  void weight_gradient(cudaStream_t stream, const T* errors, const T* inputs, T* weight) {
    if (products_) return products_->weight(stream, errors, inputs, weight);
    if constexpr (few_rows_can) {
      few_rows::weight_gradient(stream, rows_, In, Out, errors, inputs, weight, nullptr);
    }
  }

  void weight_and_bias_gradient(cudaStream_t stream, const T* errors, const T* inputs, T* weight,
                                T* bias) {
    if (products_) {
      products_->weight(stream, errors, inputs, weight);
      elementwise::column_sums(stream, errors, rows_, Out, bias);
    } else if constexpr (few_rows_can) {
      few_rows::weight_gradient(stream, rows_, In, Out, errors, inputs, weight, bias);
    }
  }

  /// The errors of the layer below, gated: `inputs` were its outputs.
  void input_gradient(cudaStream_t stream, const T* errors, const T* weight, const T* inputs,
                      T* result) {
    if (products_) {
      products_->inputs(stream, errors, weight, result);
      elementwise::gate(stream, inputs, result, rows_ * In);
    } else if constexpr (few_rows_can) {
      few_rows::input_gradient(stream, rows_, In, Out, errors, weight, inputs, result);
    }
  }

  static constexpr bool few_rows_can = std::is_same_v<T, float> && In % 4 == 0 && Out % 4 == 0;

 private:
  struct Products {
    Products(const CublasLt& cublas, std::size_t rows)
        : forward(cublas, rows, Out, In, Stored::plain, Stored::transposed,
                  CUBLASLT_EPILOGUE_RELU_BIAS),
          weight(cublas, Out, In, rows, Stored::transposed, Stored::plain),
          inputs(cublas, rows, In, Out, Stored::plain, Stored::plain) {}
    Matmul<T> forward, weight, inputs;
  };

  std::size_t rows_;
  std::optional<Products> products_;
};
