// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A model's tensors as constant tables: full names, infos, and look-up by name.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/hash.hpp"
#include "lockstep/model/declaration.hpp"
#include "lockstep/model/tensor.hpp"
#include "lockstep/model/tensor_listing.hpp"
#include "lockstep/model/tensor_sink.hpp"

namespace lockstep::detail {

/// The result of look-ups for a name that is not there.
inline constexpr std::size_t not_found = static_cast<std::size_t>(-1);

/// `Count` tensors, in declaration order.
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

/// Names in the order of their hashes, for binary search: comparing a thousand names as text would
/// cost the compiler seconds.
template <std::size_t Count>
struct NameIndex {
  std::array<std::uint64_t, Count> hashes{};
  std::array<std::uint32_t, Count> tensors{};

  /// The tensor of this name, or `not_found`. Declared names of one hash count as duplicates and
  /// are rejected; that an undeclared name has the hash of a declared one is left to chance, which
  /// is 1 in 10^16 for a thousand names.
  constexpr std::size_t find(std::string_view name) const {
    const std::uint64_t hash = hash_of(name);
    const auto found = std::lower_bound(hashes.begin(), hashes.end(), hash);
    if (found == hashes.end() || *found != hash) return not_found;
    return tensors[static_cast<std::size_t>(found - hashes.begin())];
  }

  /// A tensor whose name another one has too, or `not_found`.
  constexpr std::size_t find_duplicate() const {
    const auto found = std::adjacent_find(hashes.begin(), hashes.end());
    return found == hashes.end() ? not_found
                                 : tensors[static_cast<std::size_t>(found - hashes.begin())];
  }
};

template <std::size_t Count, std::size_t Characters>
consteval NameIndex<Count> make_name_index(const TensorTable<Count, Characters>& table) {
  struct Entry {
    std::uint64_t hash = 0;
    std::uint32_t tensor = 0;
  };
  std::array<Entry, Count> entries{};
  for (std::size_t i = 0; i != Count; ++i) {
    entries[i] = {hash_of(table.name(i)), static_cast<std::uint32_t>(i)};
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.hash < b.hash; });
  NameIndex<Count> index;
  for (std::size_t i = 0; i != Count; ++i) {
    index.hashes[i] = entries[i].hash;
    index.tensors[i] = entries[i].tensor;
  }
  return index;
}

template <class Model, TensorRole Role>
struct ListOf {
  using type = BufferList<>;
};
template <class Model>
struct ListOf<Model, TensorRole::parameter> {
  using type = typename Model::Parameters;
};
template <class Model>
  requires requires { typename Model::Buffers; }
struct ListOf<Model, TensorRole::buffer> {
  using type = typename Model::Buffers;
};

/// A model's declarations of a role; an empty list for a model without buffers.
template <class Model, TensorRole Role>
using DeclaredList = typename ListOf<Model, Role>::type;

// The tables of a model. Everything downstream is parameterised on the model, never on its list: a
// symbol that spells a thousand parameters takes a compiler a minute. And each table that is read
// once per name is a constant of its own, because nvcc copies the whole constant at every read.

/// The declarations are walked once.
template <class Model, TensorRole Role>
inline constexpr auto tensor_table = [] {
  using List = DeclaredList<Model, Role>;
  TensorTable<List::tensors, List::characters> table;
  TensorSink sink{table.text.data(), table.name_ends.data(), table.infos.data()};
  List::declare(sink, nullptr);
  return table;
}();

template <class Model, TensorRole Role>
inline constexpr auto name_index = make_name_index(tensor_table<Model, Role>);

/// How many tensors of a role a model has; `dynamic` where it lists them at run time.
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

}  // namespace lockstep::detail
