// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A declared model as one that lists its tensors at run time: the same arithmetic, so that
/// the two must train to the same bits.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/detail/bucket/layout.hpp"
#include "lockstep/detail/model/tensor_list.hpp"

namespace train {

using namespace lockstep;

/// Hands out a declared model's tensors by name, from a step that has them by number. On a GPU the
/// rest of the step too.
template <class Declared, class Step, class Memory = HostMemory>
class ByName {
 public:
  explicit ByName(const Step& step) : step_(step) {}

  auto param(auto key) const {
    return shaped<lockstep::detail::TensorRole::parameter>(
        key, [&](auto number) { return step_.param(number); });
  }
  auto grad(auto key) const {
    return shaped<lockstep::detail::TensorRole::parameter>(
        key, [&](auto number) { return step_.grad(number); });
  }
  auto buffer(auto key) const {
    return shaped<lockstep::detail::TensorRole::buffer>(
        key, [&](auto number) { return step_.buffer(number); });
  }
  template <class Key>
  void ready(Key) const {
    step_.ready(NamedTensor<Declared, lockstep::detail::TensorRole::parameter, Key>::index);
  }
  template <class Key>
  bool trains(Key) const {
    return step_.trains(NamedTensor<Declared, lockstep::detail::TensorRole::parameter, Key>::index);
  }
  template <class S = Step>
  auto stream() const -> decltype(std::declval<const S&>().stream()) {
    return step_.stream();
  }
  template <class S = Step>
  auto loss() const -> decltype(std::declval<const S&>().loss()) {
    return step_.loss();
  }

 private:
  template <lockstep::detail::TensorRole Role, class Key>
  static auto shaped(Key, const auto& find) {
    using Tensor = NamedTensor<Declared, Role, Key>;
    const auto row = find(Listed<ElementOf<Tensor::info.element>>{Tensor::index});
    return [&]<std::size_t... Axis>(std::index_sequence<Axis...>) {
      using T = typename decltype(row)::element_type;
      return lockstep::detail::View<Memory, T, Tensor::info.extents[Axis]...>(row.data_handle());
    }(std::make_index_sequence<Tensor::info.rank>{});
  }

  const Step& step_;
};

template <class Memory, class Declared, class... Ts>
struct ListedIn {
  using Elements = ElementList<Ts...>;
  Declared model;

  void tensors(TensorList& list) const {
    const auto& parameters = lockstep::detail::parameter_table<Declared>;
    for (std::size_t i = 0; i != parameters.size(); ++i)
      list.parameter(std::string(parameters.name(i)), parameters.infos[i].element,
                     extents_of(parameters.infos[i]));
    const auto& buffers = lockstep::detail::buffer_table<Declared>;
    for (std::size_t i = 0; i != buffers.size(); ++i)
      list.buffer(std::string(buffers.name(i)), buffers.infos[i].element,
                  extents_of(buffers.infos[i]));
  }

  void initialize(auto& initial) {
    ByName<Declared, std::decay_t<decltype(initial)>> named(initial);
    model.initialize(named);
  }
  auto forward(auto& step, const auto& batch) {
    ByName<Declared, std::decay_t<decltype(step)>, Memory> named(step);
    return model.forward(named, batch);
  }
  void backward(auto& step, const auto& batch) {
    ByName<Declared, std::decay_t<decltype(step)>, Memory> named(step);
    model.backward(named, batch);
  }

 private:
  static std::vector<std::size_t> extents_of(const lockstep::detail::TensorInfo& info) {
    return {info.extents.begin(), info.extents.begin() + static_cast<std::ptrdiff_t>(info.rank)};
  }
};

template <class Declared, class... Ts>
using ListedModel = ListedIn<HostMemory, Declared, Ts...>;

}  // namespace train
