// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Row-major numbers as matrices of Eigen, for layers that are written by hand.

#include <Eigen/Core>
#include <cstddef>
#include <type_traits>
#include <vector>

// Eigen is told no extents at compile time: they gain nothing at these sizes and cost a second set
// of instantiations for each layer.
template <int Rows = Eigen::Dynamic, class U>
auto matrix(U* data, std::size_t rows, std::size_t columns) {
  using Plain = Eigen::Matrix<std::remove_const_t<U>, Rows, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<std::conditional_t<std::is_const_v<U>, const Plain, Plain>>(
      data, static_cast<Eigen::Index>(rows), static_cast<Eigen::Index>(columns));
}

/// A view of one axis as a row. One of more axes is a matrix with a row for each index of the
/// first: the weight of a convolution has a row for each channel that it puts out.
template <class View>
auto matrix(View view) {
  if constexpr (View::rank() == 1) {
    return matrix<1>(view.data_handle(), 1, view.extent(0));
  } else {
    std::size_t columns = 1;
    for (std::size_t axis = 1; axis < View::rank(); ++axis) columns *= view.extent(axis);
    return matrix(view.data_handle(), view.extent(0), columns);
  }
}

/// A buffer that grows to the largest batch and is kept from step to step.
template <class T>
auto resized(std::vector<T>& buffer, std::size_t rows, std::size_t columns) {
  buffer.resize(rows * columns);  // never gives memory back
  return matrix(buffer.data(), rows, columns);
}

/// outputs = inputs weight^T + bias. Products add to their destination, so that a bias laid there
/// first needs no pass of its own.
void linear(auto outputs, const auto& inputs, const auto& weight, const auto& bias) {
  outputs.rowwise() = bias;
  outputs.noalias() += inputs * weight.transpose();
}
