// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shapes of models whose extents are known at construction only.

#include <array>
#include <concepts>
#include <cstddef>
#include <string>

#include "lockstep/core/error.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"

namespace lockstep {

namespace detail {

/// Is any extent of this role's tensors known at run time only?
template <class Model, TensorRole Role>
inline constexpr bool has_dynamic_shapes = [] {
  if constexpr (!TensorListing<Model>) {
    for (const TensorInfo& info : tensor_table<Model, Role>.infos) {
      if (info.is_dynamic()) return true;
    }
  }
  return TensorListing<Model>;
}();

template <class Model>
inline constexpr bool is_dynamic_model = has_dynamic_shapes<Model, TensorRole::parameter> ||
                                         has_dynamic_shapes<Model, TensorRole::buffer>;

/// The shapes of all tensors of one role, filled in one by one.
template <class Model, TensorRole Role>
class RoleShapes {
 public:
  template <class Key, std::size_t Rank>
  void set(const std::array<std::size_t, Rank>& extents) {
    constexpr std::size_t tensor = NamedTensor<Model, Role, Key>::index;
    constexpr TensorInfo declared = NamedTensor<Model, Role, Key>::info;
    static_assert(Rank == declared.rank,
                  "lockstep: a shape has another number of extents than its tensor declares");
    require(tensor, !given_[tensor], "is given a shape twice", "give it once");
    for (std::size_t i = 0; i != Rank; ++i) {
      require(tensor, declared.extents[i] == dynamic || declared.extents[i] == extents[i],
              "is given " + std::to_string(extents[i]) + " as extent " + std::to_string(i) +
                  " but declares " + std::to_string(declared.extents[i]),
              "give the declared extent, or declare it dynamic");
      infos_[tensor].extents[i] = extents[i];
    }
    require(tensor, infos_[tensor].bytes() != too_large, "is larger than memory can be",
            "check its extents");
    given_[tensor] = true;
  }

  /// All tensors, every extent known.
  const auto& infos() const {
    for (std::size_t i = 0; i != infos_.size(); ++i) {
      require(i, !infos_[i].is_dynamic(), "has dynamic extents but no shape",
              "give it in the model's shapes(auto& shape) const");
    }
    return infos_;
  }

 private:
  static void require(std::size_t tensor, bool ok, const std::string& problem, const char* advice) {
    if (ok) return;
    const std::string name(tensor_table<Model, Role>.name(tensor));
    throw Error("shapes", "tensor " + name + " " + problem, advice);
  }

  static constexpr std::size_t count = tensor_table<Model, Role>.size();
  std::array<TensorInfo, count> infos_ = tensor_table<Model, Role>.infos;
  std::array<bool, count> given_{};
};

}  // namespace detail

/// Collects the shapes that a model gives in `void shapes(auto& shape) const`:
///
///     shape("fc1.weight"_p, hidden, inputs);
///
/// Every parameter and buffer with a dynamic extent is given once, with all its extents; static
/// ones must agree with the declaration.
template <class Model>
class Shapes {
 public:
  template <class Key, std::convertible_to<std::size_t>... Extent>
  void operator()(Key, Extent... extents) {
    const std::array<std::size_t, sizeof...(Extent)> values{static_cast<std::size_t>(extents)...};
    if constexpr (detail::name_index<Model, detail::TensorRole::buffer>.find(Key::name) !=
                  detail::not_found) {
      buffers_.template set<Key>(values);
    } else {
      parameters_.template set<Key>(values);
    }
  }

  template <detail::TensorRole Role>
  const auto& infos() const {
    if constexpr (Role == detail::TensorRole::parameter) {
      return parameters_.infos();
    } else {
      return buffers_.infos();
    }
  }

 private:
  detail::RoleShapes<Model, detail::TensorRole::parameter> parameters_;
  detail::RoleShapes<Model, detail::TensorRole::buffer> buffers_;
};

/// A model that can say its shapes.
template <class Model>
concept ShapeGiving = requires(const Model& model, Shapes<Model>& shape) { model.shapes(shape); };

}  // namespace lockstep
