// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Cuts the arguments of a forward pass into shares, and puts outputs together.

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// An argument for each of several replicas: a tensor is cut along its first axis as PyTorch's
/// `chunk` does, everything else is given to all.
template <class T>
class ArgumentShares {
 public:
  ArgumentShares(const T& value, std::size_t) : value_(value) {}
  static constexpr std::size_t count() { return 0; }
  const T& share(std::size_t, at::Device) const { return value_; }

 private:
  const T& value_;
};

template <>
class ArgumentShares<at::Tensor> {
 public:
  ArgumentShares(const at::Tensor& value, std::size_t most) {
    if (value.dim() == 0) {
      all_ = value;
    } else {
      shares_ = value.chunk(static_cast<std::int64_t>(most));
    }
  }
  /// Nothing where the tensor is one number, which all get.
  std::size_t count() const { return shares_.size(); }
  at::Tensor share(std::size_t i, at::Device device) const {
    const at::Tensor& mine = shares_.empty() ? all_ : shares_[i];
    return mine.device() == device ? mine : mine.to(device);
  }

 private:
  std::vector<at::Tensor> shares_;
  at::Tensor all_;
};

/// The shares of an argument. (nvcc writes a constructor's call in a pack in a way that g++ does
/// not take.)
template <class T>
ArgumentShares<T> shares_of(const T& argument, std::size_t most) {
  return {argument, most};
}

/// How many shares there are of all arguments.
inline std::size_t count_shares(std::initializer_list<std::size_t> counts) {
  std::size_t common = 0;
  for (const std::size_t count : counts) {
    if (count == 0 || count == common) continue;
    if (common != 0) {
      throw Error("DataParallel",
                  "one argument is cut into " + std::to_string(common) +
                      " shares and another one into " + std::to_string(count),
                  "give all tensors as many rows");
    }
    common = count;
  }
  return common == 0 ? 1 : common;
}

/// Outputs of replicas as those of one module, on a device: rows behind each other, and numbers as
/// a row. Tuples, pairs and vectors of tensors are put together one by one.
template <class Output>
struct GatheredTensors {
  static_assert(std::is_same_v<Output, at::Tensor>,
                "lockstep: outputs of replicas are gathered if the module's forward returns a "
                "tensor, or a tuple, pair or vector of tensors");
  static Output gather(const std::vector<Output>& outputs, at::Device device);
};

template <>
struct GatheredTensors<at::Tensor> {
  static at::Tensor gather(const std::vector<at::Tensor>& outputs, at::Device device) {
    std::vector<at::Tensor> near;
    near.reserve(outputs.size());
    for (const at::Tensor& output : outputs) near.push_back(output.to(device));
    return near[0].dim() == 0 ? at::stack(near) : at::cat(near);
  }
};

template <>
struct GatheredTensors<std::vector<at::Tensor>> {
  static std::vector<at::Tensor> gather(const std::vector<std::vector<at::Tensor>>& outputs,
                                        at::Device device) {
    std::vector<at::Tensor> gathered;
    for (std::size_t i = 0; i != outputs[0].size(); ++i) {
      std::vector<at::Tensor> parts;
      parts.reserve(outputs.size());
      for (const auto& output : outputs) parts.push_back(output.at(i));
      gathered.push_back(GatheredTensors<at::Tensor>::gather(parts, device));
    }
    return gathered;
  }
};

template <class... Parts>
struct GatheredTensors<std::tuple<Parts...>> {
  using Outputs = std::tuple<Parts...>;
  static Outputs gather(const std::vector<Outputs>& outputs, at::Device device) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return Outputs(gather_one<I>(outputs, device)...);
    }(std::index_sequence_for<Parts...>{});
  }

 private:
  template <std::size_t I>
  static auto gather_one(const std::vector<Outputs>& outputs, at::Device device) {
    using Part = std::tuple_element_t<I, Outputs>;
    std::vector<Part> parts;
    for (const Outputs& output : outputs) parts.push_back(std::get<I>(output));
    return GatheredTensors<Part>::gather(parts, device);
  }
};

template <class First, class Second>
struct GatheredTensors<std::pair<First, Second>> {
  using Outputs = std::pair<First, Second>;
  static Outputs gather(const std::vector<Outputs>& outputs, at::Device device) {
    std::vector<std::tuple<First, Second>> tuples(outputs.begin(), outputs.end());
    auto [first, second] = GatheredTensors<std::tuple<First, Second>>::gather(tuples, device);
    return {std::move(first), std::move(second)};
  }
};

}  // namespace lockstep::detail
