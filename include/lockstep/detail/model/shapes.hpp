// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Shapes of models whose extents are known only at construction.

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

  /// The table of a role's tensors. Throws if a shape is missing.
  template <detail::TensorRole Role>
  const auto& tensors() const {
    const auto& table = std::get<static_cast<std::size_t>(Role)>(tables_);
    for (std::size_t i = 0; i != table.size(); ++i) {
      require<Role>(i, !table.infos[i].is_dynamic(), "has dynamic extents but no shape",
                    "give it in the model's shapes(auto& shape) const");
    }
    return table;
  }

 private:
  template <detail::TensorRole Role, class Key, std::size_t Rank>
  void set(const std::array<std::size_t, Rank>& extents) {
    constexpr std::size_t tensor = NamedTensor<Model, Role, Key>::index;
    constexpr detail::TensorInfo declared = NamedTensor<Model, Role, Key>::info;
    static_assert(Rank == declared.rank,
                  "lockstep: a shape has another number of extents than its tensor declares");
    detail::TensorInfo& info = std::get<static_cast<std::size_t>(Role)>(tables_).infos[tensor];
    require<Role>(tensor, !declared.is_dynamic() || info.is_dynamic(), "is given a shape twice",
                  "give it once");
    for (std::size_t i = 0; i != Rank; ++i) {
      require<Role>(tensor, declared.extents[i] == dynamic || declared.extents[i] == extents[i],
                    detail::text({"is given ", extents[i], " as extent ", i, " but declares ",
                                  declared.extents[i]}),
                    "give the declared extent, or declare it dynamic");
      info.extents[i] = extents[i];
    }
    require<Role>(tensor, info.bytes() != detail::too_large, "is larger than memory can be",
                  "check its extents");
  }
  template <detail::TensorRole Role>
  static void require(std::size_t tensor, bool ok, const std::string& problem, const char* advice) {
    if (ok) return;
    detail::fail("shapes",
                 {"tensor ", detail::tensor_table<Model, Role>.name(tensor), " ", problem}, advice);
  }

  decltype(std::pair(detail::parameter_table<Model>, detail::buffer_table<Model>)) tables_{
      detail::parameter_table<Model>, detail::buffer_table<Model>};
};

/// A model that gives its dynamic shapes.
template <class Model>
concept ShapeGiving = requires(const Model& model, Shapes<Model>& shape) { model.shapes(shape); };

}  // namespace lockstep
