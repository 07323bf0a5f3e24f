// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shapes of models whose extents are known only at construction.

#include <tuple>

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/model/tensor.hpp"
#include "lockstep/detail/model/tensor_list.hpp"

namespace lockstep {

namespace detail {

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

}  // namespace detail

/// Collects the shapes that a model gives in `void shapes(auto& shape) const`:
///
///     shape("fc1.weight"_p, hidden, inputs);
///
/// Every tensor with a dynamic extent is given once, with all extents. Throws on contradictions.
template <class Model>
class Shapes {
 public:
  template <class Key, std::convertible_to<std::size_t>... Extent>
  void operator()(Key, Extent... extents) {
    const std::array<std::size_t, sizeof...(Extent)> values{static_cast<std::size_t>(extents)...};
    using enum detail::TensorRole;
    constexpr bool is_buffer =
        detail::name_index<Model, buffer>.find(Key::name) != detail::not_found;
    set<is_buffer ? buffer : parameter, Key>(values);
  }

  /// All tensors of a role. Throws if a shape is missing.
  template <detail::TensorRole Role>
  const auto& infos() const {
    const auto& infos = std::get<Of<Role>>(roles_).infos;
    for (std::size_t i = 0; i != infos.size(); ++i) {
      require<Role>(i, !infos[i].is_dynamic(), "has dynamic extents but no shape",
                    "give it in the model's shapes(auto& shape) const");
    }
    return infos;
  }

 private:
  template <detail::TensorRole Role>
  struct Of {
    static constexpr const auto& declared = detail::tensor_table<Model, Role>;
    std::array<detail::TensorInfo, declared.size()> infos = declared.infos;
    std::array<bool, declared.size()> is_given{};
  };

  template <detail::TensorRole Role, class Key, std::size_t Rank>
  void set(const std::array<std::size_t, Rank>& extents) {
    constexpr std::size_t tensor = NamedTensor<Model, Role, Key>::index;
    constexpr detail::TensorInfo declared = NamedTensor<Model, Role, Key>::info;
    static_assert(Rank == declared.rank,
                  "lockstep: a shape has another number of extents than its tensor declares");
    auto& [infos, is_given] = std::get<Of<Role>>(roles_);
    require<Role>(tensor, !is_given[tensor], "is given a shape twice", "give it once");
    for (std::size_t i = 0; i != Rank; ++i) {
      require<Role>(tensor, declared.extents[i] == dynamic || declared.extents[i] == extents[i],
                    "is given " + std::to_string(extents[i]) + " as extent " + std::to_string(i) +
                        " but declares " + std::to_string(declared.extents[i]),
                    "give the declared extent, or declare it dynamic");
      infos[tensor].extents[i] = extents[i];
    }
    require<Role>(tensor, infos[tensor].bytes() != detail::too_large,
                  "is larger than memory can be", "check its extents");
    is_given[tensor] = true;
  }
  template <detail::TensorRole Role>
  static void require(std::size_t tensor, bool ok, const std::string& problem, const char* advice) {
    if (ok) return;
    const std::string name(detail::tensor_table<Model, Role>.name(tensor));
    throw Error("shapes", "tensor " + name + " " + problem, advice);
  }

  std::tuple<Of<detail::TensorRole::parameter>, Of<detail::TensorRole::buffer>> roles_;
};

/// A model that gives its dynamic shapes.
template <class Model>
concept ShapeGiving = requires(const Model& model, Shapes<Model>& shape) { model.shapes(shape); };

}  // namespace lockstep
