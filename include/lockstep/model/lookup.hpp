// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file From `"fc1.weight"_p` to what the compiler knows of the tensor.

#include <cstddef>

#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_table.hpp"

namespace lockstep {

/// The tensor that Key names among Model's parameters or buffers: one instantiation per name,
/// however often it is used.
template <class Model, TensorRole Role, class Key>
struct NamedTensor {
 private:
  static constexpr std::size_t found = name_index<Model, Role>.find(Key::name);
  static_assert(
      Role != TensorRole::parameter || found != not_found,
      "lockstep: the model declares no parameter of this name; compare the spelling with its "
      "ParameterList (the compiler prints the name beside this sentence)");
  static_assert(
      Role != TensorRole::buffer || found != not_found,
      "lockstep: the model declares no buffer of this name; compare the spelling with its "
      "BufferList (the compiler prints the name beside this sentence)");

 public:
  /// Its place in declaration order. After an error, any: one error is enough.
  static constexpr std::size_t index = found == not_found ? 0 : found;
  static constexpr TensorInfo info = tensor_table<Model, Role>.infos[index];
};

}  // namespace lockstep
