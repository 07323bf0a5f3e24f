// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model's layout in an arena: its bucket plan, and the views that lie in it.

#include <array>
#include <cstddef>
#include <cuda/std/array>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/buckets.hpp"
#include "lockstep/bucket/element_types.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/model/lookup.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_table.hpp"

namespace lockstep {

namespace detail {
template <class Types, class Infos>
constexpr Infos in_types(Infos infos) {
  for (TensorInfo& info : infos) info.element = Types::of(info.element);
  return infos;
}
}  // namespace detail

/// The tensors in the types in which they are laid out.
template <class Model, TensorRole Role, class Types>
inline constexpr auto static_infos = detail::in_types<Types>(tensor_table<Model, Role>.infos);

/// The plan of static tensors. The limits come as the policy, a type: g++ 12 does not survive
/// values of class type passed on through alias templates.
template <class Model, TensorRole Role, class TheBuckets, class Types = DeclaredTypes>
inline constexpr auto static_plan = make_bucket_plan<tensor_table<Model, Role>.size()>(
    static_infos<Model, Role, Types>, TheBuckets::limits);

/// The plan's offsets alone: what every view reads.
template <class Model, TensorRole Role, class TheBuckets, class Types>
inline constexpr auto static_offsets = [] {
  constexpr std::size_t count = tensor_table<Model, Role>.size();
  std::array<std::size_t, count> offsets{};
  for (std::size_t i = 0; i != count; ++i) {
    offsets[i] = static_plan<Model, Role, TheBuckets, Types>.placements[i].offset;
  }
  return offsets;
}();

namespace detail {

/// Makes views from an element kind and numbers alone. nvcc writes types the way they were reached,
/// and cannot write a name into a kernel's host stub: here the tensor's name has been left behind.
/// It is also per shape, not per name, because constructing an mdspan is what costs a compiler
/// most.
template <class Memory, bool Const, ElementKind Kind, std::size_t... E>
constexpr auto make_view(std::byte* data, const Extents<E...>& extents = {}) {
  using T = ElementOf<Kind>;
  using Viewed = View<Memory, std::conditional_t<Const, const T, T>, E...>;
  return Viewed{reinterpret_cast<T*>(data), typename Viewed::mapping_type{extents}};
}

/// Everything is a constant: an empty type.
template <class Model, TensorRole Role, class TheBuckets, class Types>
struct StaticLayout {
  constexpr StaticLayout() = default;
  constexpr explicit StaticLayout(const Model&) {}

  static constexpr const auto& plan() { return static_plan<Model, Role, TheBuckets, Types>; }
  static constexpr const auto& infos() { return static_infos<Model, Role, Types>; }
};

/// The same, computed once from the shapes a model gives.
template <class Model, TensorRole Role, class TheBuckets, class Types>
class DynamicLayout {
 public:
  explicit DynamicLayout(const Model& model) {
    Shapes<Model> shapes;
    model.shapes(shapes);
    infos_ = in_types<Types>(shapes.template infos<Role>());
    plan_ = make_bucket_plan<count>(infos_, TheBuckets::limits);
  }

  const auto& plan() const { return plan_; }
  const auto& infos() const { return infos_; }

 private:
  static constexpr std::size_t count = tensor_table<Model, Role>.size();
  std::array<TensorInfo, count> infos_;
  BucketPlan<count> plan_;
};

template <class Model, TensorRole Role, class TheBuckets, class Types>
using LayoutBase = std::conditional_t<has_dynamic_shapes<Model, Role>,
                                      DynamicLayout<Model, Role, TheBuckets, Types>,
                                      StaticLayout<Model, Role, TheBuckets, Types>>;

}  // namespace detail

/// Where Model's tensors of one role lie. A layout of static shapes is empty and its answers are
/// constants; one of dynamic shapes is constructed from the model.
template <class Model, TensorRole Role, class TheBuckets, class Types>
class TensorLayout : public detail::LayoutBase<Model, Role, TheBuckets, Types> {
 public:
  using detail::LayoutBase<Model, Role, TheBuckets, Types>::LayoutBase;

  /// The tensor that Key names, as `T` or `const T` elements, in the arena that starts at `arena`.
  template <class Memory, bool Const, class Key>
  constexpr auto view(std::byte* arena, Key) const {
    using Tensor = NamedTensor<Model, Role, Key>;
    return view_of<Memory, Const, Tensor>(arena, std::make_index_sequence<Tensor::info.rank>{});
  }

 private:
  template <class Memory, bool Const, class Tensor, std::size_t... Axis>
  constexpr auto view_of(std::byte* arena, std::index_sequence<Axis...>) const {
    constexpr TensorInfo info = Tensor::info;
    constexpr ElementKind element = Types::of(info.element);
    if constexpr (has_dynamic_shapes<Model, Role>) {
      using Shape = Extents<info.extents[Axis]...>;
      return detail::make_view<Memory, Const, element, info.extents[Axis]...>(
          arena + this->plan().placements[Tensor::index].offset,
          Shape{cuda::std::array<std::size_t, info.rank>{
              this->infos()[Tensor::index].extents[Axis]...}});
    } else {
      constexpr std::size_t offset = static_offsets<Model, Role, TheBuckets, Types>[Tensor::index];
      return detail::make_view<Memory, Const, element, info.extents[Axis]...>(arena + offset);
    }
  }
};

/// Parameters, and gradients likewise, in buckets.
template <class Model, class TheBuckets = Buckets<>, class Types = DeclaredTypes>
using Layout = TensorLayout<Model, TensorRole::parameter, TheBuckets, Types>;

/// Buffers: everything of one element type together, to travel in one go.
template <class Model, class Types = DeclaredTypes>
using BufferLayout =
    TensorLayout<Model, TensorRole::buffer, Buckets<BucketLimits{too_large, too_large}>, Types>;

}  // namespace lockstep
