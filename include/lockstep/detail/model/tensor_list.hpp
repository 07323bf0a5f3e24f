// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model's tensors, as constant tables or listed at run time, and how a key finds one.

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/model/declaration.hpp"

namespace lockstep {

/// The possible element types of a model's listed tensors; one type needs no run-time choice.
template <Element... Ts>
struct ElementList {
  static constexpr std::array<ElementKind, sizeof...(Ts)> kinds{element_kind<Ts>()...};
};

/// Collects the tensors that a model lists in `void tensors(TensorList& list) const`:
///
///     list.parameter("fc1.weight", element_kind<float>(), {hidden, inputs});
///     list.buffer("norm.mean", element_kind<float>(), {hidden});
///
/// Parameters are listed in forward order. A tensor's number is its index in its role.
class TensorList {
 public:
  explicit TensorList(std::span<const ElementKind> kinds) : kinds_(kinds) {}

  void parameter(std::string name, ElementKind element, const std::vector<std::size_t>& extents) {
    require(detail::is_floating(element), name,
            "is a parameter of integers, which have no gradient", "list it as a buffer");
    add(detail::TensorRole::parameter, std::move(name), element, extents);
  }
  /// A parameter without a gradient, as if `Frozen` named it.
  void frozen_parameter(std::string name, ElementKind element,
                        const std::vector<std::size_t>& extents) {
    parameter(std::move(name), element, extents);
    of(detail::TensorRole::parameter).infos.back().is_frozen = true;
  }
  void buffer(std::string name, ElementKind element, const std::vector<std::size_t>& extents) {
    add(detail::TensorRole::buffer, std::move(name), element, extents);
  }

  /// A further name of a listed tensor: checkpoints have the tensor under each of its names.
  void alias(std::string name, std::string of) {
    aliases_.push_back({std::move(name), std::move(of)});
  }

  struct Tensors {
    std::vector<detail::TensorInfo> infos;
    std::vector<std::string> names;
    std::string_view name(std::size_t tensor) const { return names[tensor]; }
  };
  Tensors& of(detail::TensorRole role) { return roles_[static_cast<std::size_t>(role)]; }
  std::vector<detail::NameAlias>& aliases() { return aliases_; }

  /// Throws unless there is a parameter, names are unique and aliases name listed tensors.
  void check() const;

 private:
  static void require(bool ok, const std::string& name, const char* problem, const char* advice);

  void add(detail::TensorRole role, std::string name, ElementKind element,
           const std::vector<std::size_t>& extents);

  std::span<const ElementKind> kinds_;
  std::array<Tensors, 2> roles_;
  std::vector<detail::NameAlias> aliases_;
};

/// A model that lists its tensors at run time, with `using Elements = ElementList<float>;`. Keys
/// are numbers: `step.param(0)`, `step.ready(0)`. The list must not change during training.
template <class M>
concept TensorListing = requires(const M& model, TensorList& list) {
  { M::Elements::kinds.size() } -> std::convertible_to<std::size_t>;
  model.tensors(list);
};

namespace detail {
template <TensorListing Model>
TensorList list_tensors(const Model& model) {
  TensorList list(Model::Elements::kinds);
  model.tensors(list);
  list.check();
  return list;
}

inline constexpr std::size_t not_found = static_cast<std::size_t>(-1);

/// `Count` tensors and their names, in declaration order.
template <std::size_t Count, std::size_t Characters>
struct TensorTable {
  std::array<TensorInfo, Count> infos{};
  std::array<std::size_t, Count> name_ends{};
  std::array<char, Characters> text{};

  static constexpr std::size_t size() { return Count; }

  constexpr std::string_view name(std::size_t tensor) const {
    const std::size_t begin = tensor == 0 ? 0 : name_ends[tensor - 1];
    return {text.data() + begin, name_ends[tensor] - begin};
  }
};

/// Names sorted by hash: comparing a thousand names as text costs the compiler seconds.
template <std::size_t Count>
struct NameIndex {
  std::array<std::uint64_t, Count> hashes{};
  std::array<std::uint32_t, Count> tensors{};

  consteval explicit NameIndex(const auto& table) {
    std::array<std::pair<std::uint64_t, std::uint32_t>, Count> entries{};
    for (std::size_t i = 0; i != Count; ++i)
      entries[i] = {hash_of(table.name(i)), static_cast<std::uint32_t>(i)};
    std::sort(entries.begin(), entries.end());
    for (std::size_t i = 0; i != Count; ++i) {
      hashes[i] = entries[i].first;
      tensors[i] = entries[i].second;
    }
  }

  /// The tensor of this name, or `not_found`. Declared names of equal hash are rejected; an
  /// undeclared name collides with one of a thousand with probability 1 in 10^16.
  constexpr std::size_t find(std::string_view name) const {
    const std::uint64_t hash = hash_of(name);
    const auto found = std::lower_bound(hashes.begin(), hashes.end(), hash);
    if (found == hashes.end() || *found != hash) return not_found;
    return tensors[static_cast<std::size_t>(found - hashes.begin())];
  }

  /// A tensor with a duplicate name, or `not_found`.
  constexpr std::size_t find_duplicate() const {
    const auto found = std::adjacent_find(hashes.begin(), hashes.end());
    return found == hashes.end() ? not_found
                                 : tensors[static_cast<std::size_t>(found - hashes.begin())];
  }
};

// Everything downstream is parameterised on the model, never on its list: a symbol that spells a
// thousand parameters takes a compiler a minute. Each table that is read once per name is a
// constant of its own, because nvcc copies the whole constant at every read.

template <class Model, TensorRole Role>
inline constexpr auto tensor_table = [] {
  using List = DeclaredList<Model, Role>;
  TensorTable<List::tensors, List::characters> table;
  TensorSink sink{table.text.data(), table.name_ends.data(), table.infos.data()};
  List::declare(sink, nullptr);
  return table;
}();

template <class Model, TensorRole Role>
inline constexpr NameIndex<tensor_table<Model, Role>.size()> name_index(tensor_table<Model, Role>);

template <class Model, TensorRole Role>
inline constexpr std::size_t tensor_count = [] {
  if constexpr (TensorListing<Model>) {
    return dynamic;
  } else {
    return tensor_table<Model, Role>.size();
  }
}();

template <class Model>
inline constexpr const auto& parameter_table = tensor_table<Model, TensorRole::parameter>;

template <class Model>
inline constexpr const auto& buffer_table = tensor_table<Model, TensorRole::buffer>;

}  // namespace detail

/// The tensor that Key names among Model's parameters or buffers: one instantiation per name.
template <class Model, detail::TensorRole Role, class Key>
struct NamedTensor {
 private:
  static constexpr std::size_t found = [] {
    if constexpr (detail::NameKey<Key>) return detail::name_index<Model, Role>.find(Key::name);
    return std::size_t{0};
  }();
  static_assert(detail::NameKey<Key>,
                "lockstep: the key of a declared tensor is its name with _p behind it; write "
                "step.param(\"weight\"_p), step.ready(\"weight\"_p), and using namespace lockstep");
  static_assert(
      Role != detail::TensorRole::parameter || found != detail::not_found,
      "lockstep: the model declares no parameter of this name; compare the spelling with its "
      "ParameterList (the compiler prints the name beside this message)");
  static_assert(
      Role != detail::TensorRole::buffer || found != detail::not_found,
      "lockstep: the model declares no buffer of this name; compare the spelling with its "
      "BufferList, in which a batch norm stands too (the compiler prints the name beside this "
      "message)");

 public:
  static constexpr bool is_declared = detail::NameKey<Key> && found != detail::not_found;
  /// The index in declaration order; 0 after an error, so that there is only one error.
  static constexpr std::size_t index = found == detail::not_found ? 0 : found;
  static constexpr detail::TensorInfo info = detail::tensor_table<Model, Role>.infos[index];
};

/// The key of a listed tensor if the model lists several element types; else its number suffices.
template <Element T>
struct Listed {
  std::size_t index;
};

namespace detail {

template <class Key>
inline constexpr ElementKind listed_kind = ElementKind::unsupported;
template <class T>
inline constexpr ElementKind listed_kind<Listed<T>> = element_kind<T>();

/// The index of a key's tensor: a constant if the key is a name.
template <class Model, TensorRole Role, class Key>
constexpr std::size_t tensor_index(Key) {
  return NamedTensor<Model, Role, Key>::index;
}
template <TensorListing Model, TensorRole Role, class Key>
constexpr std::size_t tensor_index([[maybe_unused]] Key key) {
  if constexpr (listed_kind<Key> != ElementKind::unsupported) {
    return key.index;
  } else if constexpr (std::integral<Key>) {
    return static_cast<std::size_t>(key);
  } else {
    static_assert(sizeof(Key) == 0,
                  "lockstep: the model lists its tensors at run time, so that their keys are "
                  "numbers: step.param(0)");
    return 0;
  }
}

template <TensorListing Model, class Key>
consteval ElementKind kind_of_listed() {
  constexpr ElementKind kind = listed_kind<Key>;
  static_assert(
      !std::integral<Key> || Model::Elements::kinds.size() == 1,
      "lockstep: the model lists several element types, and a view needs to know which one its "
      "tensor has: step.param(Listed<float>{0})");
  return kind == ElementKind::unsupported ? Model::Elements::kinds[0] : kind;
}

}  // namespace detail

}  // namespace lockstep
