// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The layers of a `GpuConvNet` that are not its own, with convolutions by cuDNN.

#include <cstddef>

#include "cudnn_convolution.cuh"
#include "softmax.cuh"

struct CudnnLayers {
  using Library = Cudnn;

  template <class T>
  using Convolution = CudnnConvolution<T>;

  /// The linear layer and the loss. Its gradient by an input that is zero is zero, which changes
  /// nothing here: all of the pixels that such an input is the largest of are what ReLU made zero.
  template <class T, std::size_t Features, std::size_t Classes>
  struct Head : softmax::Head<T, Features, Classes> {
    Head(std::size_t rows, std::size_t, std::size_t) : softmax::Head<T, Features, Classes>(rows) {}
  };
};
