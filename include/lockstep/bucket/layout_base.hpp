// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The bucket plan of a model's tensors: a constant, or computed when the model is there.

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "lockstep/bucket/element_types.hpp"
#include "lockstep/bucket/frozen.hpp"
#include "lockstep/bucket/plan.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/error.hpp"
#include "lockstep/model/shapes.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_list.hpp"

namespace lockstep::detail {

template <class Types, class Infos>
constexpr Infos in_types(Infos infos) {
  for (TensorInfo& info : infos) info.element = Types::of(info.element);
  return infos;
}

/// The tensors in the types in which they are laid out.
template <class Model, TensorRole Role, class Types>
inline constexpr auto static_infos = in_types<Types>(tensor_table<Model, Role>.infos);

/// The plan of static tensors. The limits come as the policy, a type: g++ 12 does not survive
/// values of class type passed on through alias templates.
template <class Model, TensorRole Role, class Limits, class Types = DeclaredTypes>
inline constexpr auto static_plan = make_bucket_plan<tensor_table<Model, Role>.size()>(
    static_infos<Model, Role, Types>, Limits::limits,
    [](std::size_t tensor) {
      if constexpr (freezes_some<Limits>) {
        return is_frozen_name<Limits>(tensor_table<Model, Role>.name(tensor));
      } else {
        return tensor == no_bucket;  // none
      }
    },
    room_behind_buckets<Limits>());

/// The plan's offsets alone: what every view reads.
template <class Model, TensorRole Role, class Limits, class Types>
inline constexpr auto static_offsets = [] {
  constexpr std::size_t count = tensor_table<Model, Role>.size();
  std::array<std::size_t, count> offsets{};
  for (std::size_t i = 0; i != count; ++i) {
    offsets[i] = static_plan<Model, Role, Limits, Types>.placements[i].offset;
  }
  return offsets;
}();

/// Throws unless the patterns of `Still` freeze some of a model's listed parameters and not all.
template <class Still>
void require_frozen(std::size_t count, const auto& name_of) {
  std::size_t frozen = 0;
  for (std::size_t i = 0; i != count; ++i) frozen += Still::match(name_of(i)) ? 1 : 0;
  for (const std::string_view pattern : Still::patterns) {
    bool found = false;
    for (std::size_t i = 0; i != count; ++i) found = found || matches(pattern, name_of(i));
    if (!found) {
      throw Error("Frozen", "the model lists no parameter that matches " + std::string(pattern),
                  "compare the pattern with the names that it lists");
    }
  }
  if (frozen == count) throw Error("Frozen", "all parameters are frozen", "leave one to train");
}

/// The layout of static shapes: an empty type whose members are constants.
template <class Model, TensorRole Role, class Limits, class Types>
struct StaticLayout {
  static constexpr bool is_static = true;
  static constexpr std::size_t count = tensor_count<Model, Role>;

  constexpr StaticLayout() = default;
  constexpr explicit StaticLayout(const Model&) {}

  static constexpr const auto& plan() { return static_plan<Model, Role, Limits, Types>; }
  static constexpr const auto& infos() { return static_infos<Model, Role, Types>; }
  static constexpr std::string_view name(std::size_t tensor) {
    return tensor_table<Model, Role>.name(tensor);
  }
};

/// The layout of shapes that a model gives, or of tensors that it lists, at run time. It is
/// computed once and shared by copies.
template <class Model, TensorRole Role, class Limits, class Types>
class RunTimeLayout {
 public:
  static constexpr bool is_static = false;
  static constexpr std::size_t count = tensor_count<Model, Role>;

  explicit RunTimeLayout(const Model& model) : computed_(std::make_shared<const Computed>(model)) {}

  const auto& plan() const { return computed_->plan; }
  const auto& infos() const { return computed_->tensors.infos; }
  std::string_view name(std::size_t tensor) const { return computed_->tensors.name(tensor); }

 private:
  /// A declared model's tensors, in the shapes that it gives them.
  struct Shaped {
    std::array<TensorInfo, count == dynamic ? 0 : count> infos;
    static constexpr std::string_view name(std::size_t tensor) {
      return tensor_table<Model, Role>.name(tensor);
    }
  };

  static auto tensors_of(const Model& model) {
    if constexpr (TensorListing<Model>) {
      return listed_tensors(model, Role);
    } else {
      Shapes<Model> shapes;
      model.shapes(shapes);
      return Shaped{shapes.template infos<Role>()};
    }
  }

  struct Computed {
    explicit Computed(const Model& model) : tensors(tensors_of(model)) {
      for (TensorInfo& info : tensors.infos) info.element = Types::of(info.element);
      if (const std::size_t i = first_beyond_arena(tensors.infos); i != tensors.infos.size()) {
        throw Error("shapes",
                    "with " + std::string(tensors.name(i)) +
                        " the model's tensors are larger than memory can be",
                    "check their extents");
      }
      const auto name = [&](std::size_t tensor) { return tensors.name(tensor); };
      if constexpr (TensorListing<Model> && freezes_some<Limits>)
        require_frozen<typename Limits::frozen>(tensors.infos.size(), name);
      plan = make_bucket_plan<count>(
          tensors.infos, Limits::limits,
          [&](std::size_t tensor) {
            return tensors.infos[tensor].is_frozen || is_frozen_name<Limits>(name(tensor));
          },
          room_behind_buckets<Limits>());
      if (Role == TensorRole::parameter && plan.trained == 0) {
        throw Error("tensors", "all parameters are frozen", "leave one to train");
      }
    }
    decltype(tensors_of(std::declval<const Model&>())) tensors;
    BucketPlan<count> plan;
  };

  std::shared_ptr<const Computed> computed_;
};

template <class Model, TensorRole Role, class Limits, class Types>
using LayoutBase =
    std::conditional_t<has_dynamic_shapes<Model, Role>, RunTimeLayout<Model, Role, Limits, Types>,
                       StaticLayout<Model, Role, Limits, Types>>;

}  // namespace lockstep::detail
