// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model's tensors in an arena: their element types, offsets and views.

#include "lockstep/detail/bucket/plan.hpp"
#include "lockstep/detail/core/utility.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/model/shapes.hpp"

namespace lockstep::detail {

/// The element types of Model's tensors of one role in a layout, each once.
template <class Model, TensorRole Role, class Types>
struct KindsOf {
  std::array<ElementKind, element_kinds> kinds{};
  std::size_t size = 0;

  constexpr KindsOf() {
    if constexpr (TensorListing<Model>) {
      for (const ElementKind kind : Model::Elements::kinds) {
        if (Role == TensorRole::buffer || is_floating(kind)) add(Types::of(kind));
      }
    } else {
      for (const TensorInfo& info : tensor_table<Model, Role>.infos) add(Types::of(info.element));
    }
  }

 private:
  constexpr void add(ElementKind element) {
    if (std::find(kinds.begin(), kinds.begin() + size, element) == kinds.begin() + size)
      kinds[size++] = element;
  }
};

template <class Model, TensorRole Role, class Types = DeclaredTypes>
inline constexpr KindsOf<Model, Role, Types> kinds_of{};

/// Calls `f(std::type_identity<T>{})` with the type of `kind`; no run-time choice if there is one.
template <class Model, TensorRole Role, class Types = DeclaredTypes, class F>
constexpr void with_element(ElementKind kind, F&& f) {
  constexpr const auto& all = kinds_of<Model, Role, Types>;
  if constexpr (all.size == 1) {
    f(std::type_identity<ElementOf<all.kinds[0]>>{});
  } else {
    [&]<std::size_t... K>(std::index_sequence<K...>) {
      static_cast<void>(
          ((kind == all.kinds[K] && (f(std::type_identity<ElementOf<all.kinds[K]>>{}), true)) ||
           ...));
    }(std::make_index_sequence<all.size>{});
  }
}

template <class T>
std::span<T> elements_at(std::byte* arena, std::size_t offset, std::size_t bytes) {
  return {reinterpret_cast<T*>(arena + offset), bytes / sizeof(T)};
}

template <class Model, TensorRole Role, class Types>
inline constexpr auto static_infos = [] {
  auto infos = tensor_table<Model, Role>.infos;
  for (TensorInfo& info : infos) info.element = Types::of(info.element);
  return infos;
}();

/// The limits are a type, because g++ 12 fails on class-type values passed through alias templates.
template <class Model, TensorRole Role, class Limits, class Types = DeclaredTypes>
inline constexpr auto static_plan = make_bucket_plan<tensor_table<Model, Role>.size()>(
    static_infos<Model, Role, Types>, Limits::limits,
    [](std::size_t tensor) {
      return Limits::frozen::match(tensor_table<Model, Role>.name(tensor));
    },
    Limits::room,
    [](std::size_t tensor) { return unit_in<Limits>(tensor_table<Model, Role>.name(tensor)); });

/// The plan's offsets, the only numbers that a view reads.
template <class Model, TensorRole Role, class Limits, class Types>
inline constexpr auto static_offsets = [] {
  constexpr std::size_t count = tensor_table<Model, Role>.size();
  std::array<std::size_t, count> offsets{};
  for (std::size_t i = 0; i != count; ++i) {
    offsets[i] = static_plan<Model, Role, Limits, Types>.placements[i].offset;
  }
  return offsets;
}();

/// Throws unless every pattern of `Still` matches a parameter.
template <class Still>
void require_frozen(std::size_t count, const auto& name_of) {
  for (const std::string_view pattern : Still::patterns) {
    bool found = false;
    for (std::size_t i = 0; i != count; ++i) found = found || matches(pattern, name_of(i));
    if (!found) {
      fail("Frozen", {"the model lists no parameter that matches ", pattern},
           "compare the pattern with the names that it lists");
    }
  }
}

/// `make_bucket_plan` at run time, compiled once.
BucketPlan<dynamic> plan_at_run_time(std::span<const TensorInfo> tensors, BucketLimits limits,
                                     FunctionRef<bool(std::size_t)> is_frozen, std::size_t room,
                                     FunctionRef<std::string_view(std::size_t)> unit_of);

/// The tables of a layout, constants unless the model gives shapes or lists tensors at run time.
template <class Model, TensorRole Role, class Limits, class Types,
          bool = has_dynamic_shapes<Model, Role>>
struct LayoutTables {
  static constexpr bool is_static = true;
  static constexpr std::size_t count = tensor_count<Model, Role>;

  constexpr LayoutTables() = default;
  constexpr explicit LayoutTables(const Model&) {}

  static constexpr const auto& plan() { return static_plan<Model, Role, Limits, Types>; }
  static constexpr const auto& infos() { return static_infos<Model, Role, Types>; }
  static constexpr std::string_view name(std::size_t tensor) {
    return tensor_table<Model, Role>.name(tensor);
  }
};

/// Copies share the tables that are known at run time.
template <class Model, TensorRole Role, class Limits, class Types>
class LayoutTables<Model, Role, Limits, Types, true> {
 public:
  static constexpr bool is_static = false;
  static constexpr std::size_t count = tensor_count<Model, Role>;

  explicit LayoutTables(const Model& model) : computed_(std::make_shared<const Computed>(model)) {}

  const auto& plan() const { return computed_->plan; }
  const auto& infos() const { return computed_->tensors.infos; }
  std::string_view name(std::size_t tensor) const { return computed_->tensors.name(tensor); }

 private:
  static auto tensors_of(const Model& model) {
    if constexpr (TensorListing<Model>) {
      return std::move(list_tensors(model).of(Role));
    } else {
      Shapes<Model> shapes;
      model.shapes(shapes);
      return shapes.template tensors<Role>();
    }
  }

  struct Computed {
    explicit Computed(const Model& model) : tensors(tensors_of(model)) {
      for (TensorInfo& info : tensors.infos) info.element = Types::of(info.element);
      if (const std::size_t i = first_beyond_arena(tensors.infos); i != tensors.infos.size()) {
        fail("shapes",
             {"with ", tensors.name(i), " the model's tensors are larger than memory can be"},
             "check their extents");
      }
      const auto name = [&](std::size_t tensor) { return tensors.name(tensor); };
      if constexpr (TensorListing<Model> && freezes_some<Limits>)
        require_frozen<typename Limits::frozen>(tensors.infos.size(), name);
      const auto is_frozen = [&](std::size_t tensor) {
        return tensors.infos[tensor].is_frozen || Limits::frozen::match(name(tensor));
      };
      const auto unit = [&](std::size_t tensor) { return unit_in<Limits>(name(tensor)); };
      if constexpr (count == dynamic) {
        plan = plan_at_run_time(tensors.infos, Limits::limits, is_frozen, Limits::room, unit);
      } else {
        plan =
            make_bucket_plan<count>(tensors.infos, Limits::limits, is_frozen, Limits::room, unit);
      }
      if (Role == TensorRole::parameter && plan.trained == 0) {
        throw Error("tensors", "all parameters are frozen", "leave one to train");
      }
    }
    decltype(tensors_of(std::declval<const Model&>())) tensors;
    BucketPlan<count> plan;
  };

  std::shared_ptr<const Computed> computed_;
};

/// The distinct shapes of a model's tensors, on which the types of views depend.
template <std::size_t Count>
struct ShapeTable {
  std::array<std::uint32_t, Count> shapes{};  // shape of each tensor
  std::array<std::uint32_t, Count> firsts{};  // a tensor of each shape
  std::size_t size = 0;
};

template <class Model, TensorRole Role>
inline constexpr auto shape_table = [] {
  constexpr std::size_t count = tensor_table<Model, Role>.size();
  const auto& infos = tensor_table<Model, Role>.infos;
  std::array<std::pair<std::uint64_t, std::uint32_t>, count> entries{};  // hash and tensor
  for (std::size_t i = 0; i != count; ++i) {
    Hash hash;
    hash.number(static_cast<std::size_t>(infos[i].element));
    for (std::size_t axis = 0; axis != infos[i].rank; ++axis) hash.number(infos[i].extents[axis]);
    entries[i] = {hash.value(), static_cast<std::uint32_t>(i)};
  }
  std::sort(entries.begin(), entries.end());
  ShapeTable<count> table;
  for (std::size_t i = 0; i != count; ++i) {
    const std::uint32_t tensor = entries[i].second;
    if (i == 0 || infos[tensor] != infos[entries[i - 1].second])
      table.firsts[table.size++] = tensor;
    table.shapes[tensor] = static_cast<std::uint32_t>(table.size - 1);
  }
  return table;
}();

/// Makes a view from an element kind and numbers alone: nvcc cannot write a tensor's name into a
/// kernel's host stub. `extents` are all extents if some are dynamic.
template <class Memory, bool Const, ElementKind Kind, std::size_t... E, class... Sizes>
constexpr auto make_view(std::byte* data, Sizes... extents) {
  using T = ElementOf<Kind>;
  using Viewed = View<Memory, std::conditional_t<Const, const T, T>, E...>;
  return Viewed(reinterpret_cast<T*>(data), extents...);
}

/// The layout of Model's tensors of one role. With static shapes it is empty and its results are
/// constants; with dynamic shapes it is constructed from the model.
template <class Model, TensorRole Role, class Limits, class Types>
class TensorLayout : public LayoutTables<Model, Role, Limits, Types> {
 public:
  using LayoutTables<Model, Role, Limits, Types>::LayoutTables;

  /// May some tensors be frozen? A model that lists its tensors decides at run time.
  static constexpr bool freezes =
      freezes_some<Limits> || (TensorListing<Model> && Role == TensorRole::parameter);

  /// Is a parameter trained? A constant for a declared parameter.
  template <class Key>
  static constexpr bool trains(Key)
    requires(!TensorListing<Model>)
  {
    return !Limits::frozen::match(
        tensor_table<Model, Role>.name(NamedTensor<Model, Role, Key>::index));
  }
  bool trains(auto key) const
    requires TensorListing<Model>
  {
    const std::size_t tensor = tensor_index<Model, Role>(key);
    return tensor >= this->infos().size() || this->plan().is_trained(tensor);
  }

  /// Rejects a frozen parameter: at compile time if declared, by an exception if listed.
  template <class Key>
  constexpr void require_trained([[maybe_unused]] Key key) const {
    if constexpr (freezes && TensorListing<Model>) {
      if (trains(key)) [[likely]]
        return;
      fail("step", {this->name(tensor_index<Model, Role>(key)), " is frozen and has no gradient"},
           "leave it out of backward: if (step.trains(number))");
    } else if constexpr (freezes) {
      static_assert(
          trains(Key{}),
          "lockstep: this parameter is frozen and has no gradient; leave it out of backward, "
          "by if constexpr (trains<decltype(step)>(\"name\"_p)) where Frozen differs between "
          "jobs (the compiler prints the name beside this message)");
    }
  }

  /// The tensor of a key in the arena at `arena`. The view of a listed tensor has one dimension.
  template <class Memory, bool Const, class Key>
  constexpr auto view(std::byte* arena, Key key) const {
    if constexpr (TensorListing<Model>) {
      constexpr ElementKind element = Types::of(kind_of_listed<Model, Key>());
      const std::size_t tensor = tensor_index<Model, Role>(key);
      require_element(tensor, element);
      return named(make_view<Memory, Const, element, dynamic>(
                       arena + this->plan().placements[tensor].offset,
                       Extents<dynamic>{this->infos()[tensor].count()}),
                   tensor);
    } else {
      using Tensor = NamedTensor<Model, Role, Key>;
      if constexpr (!Tensor::is_declared) {
        return AnyView<Memory, std::conditional_t<Const, const float, float>>();
      } else if constexpr (!has_dynamic_shapes<Model, Role> && Tensor::info.rank == 1) {
        return named(
            make_view<Memory, Const, Types::of(Tensor::info.element), Tensor::info.extents[0]>(
                arena + offset_of<Tensor>),
            Tensor::index);
      } else if constexpr (!has_dynamic_shapes<Model, Role> && Tensor::info.rank == 2) {
        // Most tensors have rank 1 or 2: their views need no further instantiation per tensor.
        return named(
            make_view<Memory, Const, Types::of(Tensor::info.element), Tensor::info.extents[0],
                      Tensor::info.extents[1]>(arena + offset_of<Tensor>),
            Tensor::index);
      } else {
        return view_like<Memory, Const, Tensor::index>(
            arena + this->plan().placements[Tensor::index].offset, Tensor::index,
            std::make_index_sequence<Tensor::info.rank>{});
      }
    }
  }

  /// Calls `f(name, view)` for every tensor, or every trained one, in declaration order. `arena` is
  /// the arena's start, or a function of the tensor if tensors lie in different arenas.
  template <class Memory, bool Const, bool OnlyTrained = false, class F>
  constexpr void for_each(const auto& arena, F&& f) const {
    if constexpr (TensorListing<Model>) {
      for (std::size_t tensor = 0; tensor != this->infos().size(); ++tensor) {
        if (OnlyTrained && !this->plan().is_trained(tensor)) continue;
        const TensorInfo& info = this->infos()[tensor];
        with_element<Model, Role, Types>(info.element, [&]<class T>(std::type_identity<T>) {
          f(this->name(tensor),
            named(make_view<Memory, Const, element_kind<T>(), dynamic>(
                      address_of(arena, tensor), Extents<dynamic>{info.count()}),
                  tensor));
        });
      }
    } else if constexpr (shape_table<Model, Role>.size != 0) {
      constexpr const auto& table = shape_table<Model, Role>;
      for (std::size_t tensor = 0; tensor != table.shapes.size(); ++tensor) {
        if (OnlyTrained && !this->plan().is_trained(tensor)) continue;
        with_index<table.size>(table.shapes[tensor], [&](auto shape) {
          constexpr std::size_t first = table.firsts[shape];
          f(this->name(tensor),
            view_like<Memory, Const, first>(
                address_of(arena, tensor), tensor,
                std::make_index_sequence<tensor_table<Model, Role>.infos[first].rank>{}));
        });
      }
    }
  }

 private:
  template <class Tensor>
  static constexpr std::size_t offset_of =
      static_offsets<Model, Role, Limits, Types>[Tensor::index];

  constexpr std::byte* address_of(const auto& arena, std::size_t tensor) const {
    const std::size_t offset = this->plan().placements[tensor].offset;
    if constexpr (requires { arena(tensor); }) {
      return arena(tensor) + offset;
    } else {
      return arena + offset;
    }
  }

  template <class Viewed>
  constexpr Viewed named(Viewed view, [[maybe_unused]] std::size_t tensor) const {
    if constexpr (is_checked) view.set_name(this->name(tensor));
    return view;
  }

  /// The view at `data` with the declared shape of tensor `First`.
  template <class Memory, bool Const, std::size_t First, std::size_t... Axis>
  constexpr auto view_like(std::byte* data, std::size_t tensor,
                           std::index_sequence<Axis...>) const {
    constexpr TensorInfo info = tensor_table<Model, Role>.infos[First];
    constexpr ElementKind element = Types::of(info.element);
    if constexpr (has_dynamic_shapes<Model, Role>) {
      return named(make_view<Memory, Const, element, info.extents[Axis]...>(
                       data, this->infos()[tensor].extents[Axis]...),
                   tensor);
    } else {
      return named(make_view<Memory, Const, element, info.extents[Axis]...>(data), tensor);
    }
  }

  void require_element(std::size_t tensor, ElementKind element) const {
    const auto& infos = this->infos();
    if (tensor < infos.size() && infos[tensor].element == element) [[likely]]
      return;
    fail("step",
         {tensor < infos.size()
              ? text({this->name(tensor), " has elements of ", element_name(infos[tensor].element)})
              : text({"tensor ", tensor, " of ", infos.size()})},
         "ask for a tensor that the model lists, with the element type that it has");
  }
};

/// Parameters and their gradients, in buckets.
template <class Model, class Limits = Buckets<>, class Types = DeclaredTypes>
using Layout = TensorLayout<Model, TensorRole::parameter, Limits, Types>;

/// Buffers: all buffers of one element type are contiguous, so that one call broadcasts them.
template <class Model, class Types = DeclaredTypes>
using BufferLayout =
    TensorLayout<Model, TensorRole::buffer, Buckets<BucketLimits{too_large, too_large}>, Types>;

}  // namespace lockstep::detail
