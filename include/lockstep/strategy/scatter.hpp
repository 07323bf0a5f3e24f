// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Cuts a replica's share out of a batch: batches, arrays and views are cut, also inside of
/// containers, and everything else is shared.

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/strategy/shares.hpp"

namespace lockstep::detail {

/// A batch that can write its rows [first, first + count) to another batch, whose memory it reuses.
template <class B>
concept SlicedInto = requires(const B& batch, std::size_t n, B& out) {
  { batch.size() } -> std::convertible_to<std::size_t>;
  batch.slice(n, n, out);
  requires std::default_initializable<B>;
};

/// A batch that can return its rows [first, first + count) as another batch or as a view.
template <class B>
concept Sliced = requires(const B& batch, std::size_t n) {
  { batch.size() } -> std::convertible_to<std::size_t>;
  batch.slice(n, n);
};

/// How a T is cut: `sizes(value, f)` calls `f(size)` for each part that is cut, and `take(value,
/// rows_of)` returns one replica's share, where `rows_of(size)` are its rows of `size`. A value
/// with nothing to cut is shared by reference.
template <class T>
struct Cutting {
  static constexpr bool cuts = false;
  static void sizes(const T&, const auto&) {}
  static const T& take(const T& value, const auto&) {
    return value;  // NOLINT(bugprone-return-const-ref-from-parameter): batches are no temporaries
  }
};

template <class T>
inline constexpr bool is_cut = Cutting<T>::cuts;

/// One replica's share of a T.
template <class T>
using ShareOf =
    decltype(Cutting<T>::take(std::declval<const T&>(), std::declval<RowRange (&)(std::size_t)>()));

template <class B>
  requires SlicedInto<B> || Sliced<B>
struct Cutting<B> {
  static constexpr bool cuts = true;
  static void sizes(const B& batch, const auto& f) { f(batch.size()); }
  static auto take(const B& batch, const auto& rows_of) {
    const RowRange rows = rows_of(batch.size());
    if constexpr (SlicedInto<B>) {
      B share;
      batch.slice(rows.first, rows.count, share);
      return share;
    } else {
      return batch.slice(rows.first, rows.count);
    }
  }
};

template <class T, std::size_t Extent>
struct Cutting<std::span<T, Extent>> {
  static constexpr bool cuts = true;
  static void sizes(std::span<T, Extent> values, const auto& f) { f(values.size()); }
  static std::span<T> take(std::span<T, Extent> values, const auto& rows_of) {
    const RowRange rows = rows_of(values.size());
    return values.subspan(rows.first, rows.count);
  }
};

template <class T, class Allocator>
struct Cutting<std::vector<T, Allocator>> {
  using Values = std::vector<T, Allocator>;
  static constexpr bool cuts = true;
  static void sizes(const Values& values, const auto& f) { f(values.size()); }
  static Values take(const Values& values, const auto& rows_of) {
    const RowRange rows = rows_of(values.size());
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(rows.first);
    return Values(first, first + static_cast<std::ptrdiff_t>(rows.count));
  }
};

/// The type of a row-major tensor with any number of rows.
template <class Tensor>
struct AnyRows;
template <class Memory, class T, std::size_t First, std::size_t... Rest>
struct AnyRows<View<Memory, T, First, Rest...>> {
  using type = View<Memory, T, dynamic, Rest...>;
};
template <template <class, class, class, class> class Mdspan, class T,
          template <class, std::size_t...> class Shape, class Index, std::size_t First,
          std::size_t... Rest, class Order, class Accessor>
  requires RowMajorMdspan<Mdspan<T, Shape<Index, First, Rest...>, Order, Accessor>>
struct AnyRows<Mdspan<T, Shape<Index, First, Rest...>, Order, Accessor>> {
  using type = Mdspan<T, Shape<Index, dynamic, Rest...>, Order, Accessor>;
};

/// Views and mdspans are cut along the first extent.
template <class Tensor>
  requires requires { typename AnyRows<Tensor>::type; }
struct Cutting<Tensor> {
  static constexpr bool cuts = true;
  static void sizes(const Tensor& tensor, const auto& f) { f(tensor.extent(0)); }
  static auto take(const Tensor& tensor, const auto& rows_of) {
    const RowRange rows = rows_of(tensor.extent(0));
    return [&]<std::size_t... Axis>(std::index_sequence<Axis...>) {
      const std::size_t row = (std::size_t{1} * ... * tensor.extent(Axis + 1));
      return typename AnyRows<Tensor>::type(tensor.data_handle() + rows.first * row, rows.count,
                                            tensor.extent(Axis + 1)...);
    }(std::make_index_sequence<Tensor::rank() - 1>{});
  }
};

/// Tuples, pairs and arrays, whose shares consist of the shares of their parts.
template <class Shares, class Parts>
struct PartsCutting {
  static constexpr bool cuts = true;
  static void sizes(const Parts& parts, const auto& f) {
    std::apply([&]<class... Ts>(const Ts&... part) { (Cutting<Ts>::sizes(part, f), ...); }, parts);
  }
  static Shares take(const Parts& parts, const auto& rows_of) {
    return std::apply(
        [&]<class... Ts>(const Ts&... part) { return Shares{Cutting<Ts>::take(part, rows_of)...}; },
        parts);
  }
};

template <class... Ts>
  requires(is_cut<Ts> || ...)
struct Cutting<std::tuple<Ts...>> : PartsCutting<std::tuple<ShareOf<Ts>...>, std::tuple<Ts...>> {};

template <class A, class B>
  requires(is_cut<A> || is_cut<B>)
struct Cutting<std::pair<A, B>> : PartsCutting<std::pair<ShareOf<A>, ShareOf<B>>, std::pair<A, B>> {
};

template <class T, std::size_t N>
  requires is_cut<T>
struct Cutting<std::array<T, N>> : PartsCutting<std::array<ShareOf<T>, N>, std::array<T, N>> {};

template <class Map, class Shares>
struct MapCutting {
  using T = typename Map::mapped_type;
  static constexpr bool cuts = true;
  static void sizes(const Map& values, const auto& f) {
    for (const auto& [key, value] : values) Cutting<T>::sizes(value, f);
  }
  static Shares take(const Map& values, const auto& rows_of) {
    Shares shares;
    for (const auto& [key, value] : values) shares.emplace(key, Cutting<T>::take(value, rows_of));
    return shares;
  }
};

template <class Allocator, class K, class T>
using ShareAllocator = typename std::allocator_traits<Allocator>::template rebind_alloc<
    std::pair<const K, ShareOf<T>>>;

/// `std::map` and similar containers, whose headers are not included here.
template <template <class, class, class, class> class Map, class K, class T, class Less,
          class Allocator>
  requires is_cut<T> && std::same_as<typename Map<K, T, Less, Allocator>::mapped_type, T>
struct Cutting<Map<K, T, Less, Allocator>>
    : MapCutting<Map<K, T, Less, Allocator>,
                 Map<K, ShareOf<T>, Less, ShareAllocator<Allocator, K, T>>> {};

/// `std::unordered_map` and similar containers.
template <template <class, class, class, class, class> class Map, class K, class T, class Hasher,
          class Equal, class Allocator>
  requires is_cut<T> && std::same_as<typename Map<K, T, Hasher, Equal, Allocator>::mapped_type, T>
struct Cutting<Map<K, T, Hasher, Equal, Allocator>>
    : MapCutting<Map<K, T, Hasher, Equal, Allocator>,
                 Map<K, ShareOf<T>, Hasher, Equal, ShareAllocator<Allocator, K, T>>> {};

/// Puts replica `i`'s share of a batch into `share`, in the same memory if the batch can do that.
template <class Batch>
void take_share(const Batch& batch, const BatchCut& cut, std::size_t i,
                std::optional<ShareOf<Batch>>& share) {
  if constexpr (SlicedInto<Batch>) {
    const RowRange rows = cut.rows(batch.size(), i);
    if (!share) share.emplace();
    batch.slice(rows.first, rows.count, *share);
  } else {
    share.emplace(Cutting<Batch>::take(batch, [&](std::size_t size) { return cut.rows(size, i); }));
  }
}

/// The number of samples of replica `i`: its rows of the first part that is cut. It is 0 if the
/// replica gets no rows of some part: as in PyTorch, only replicas that have rows of every part
/// run.
template <class Batch>
std::size_t samples_of(const Batch& batch, const BatchCut& cut, std::size_t i) {
  std::size_t samples = 0;
  std::size_t fewest = std::numeric_limits<std::size_t>::max();
  bool first = true;
  Cutting<Batch>::sizes(batch, [&](std::size_t size) {
    const std::size_t count = cut.rows(size, i).count;
    if (std::exchange(first, false)) samples = count;
    fewest = std::min(fewest, count);
  });
  return fewest == 0 ? 0 : samples;
}

/// The number of samples of a whole batch: its `size()`, or the rows of its first part.
template <class Batch>
std::size_t row_count(const Batch& batch) {
  constexpr bool counts = requires { batch.size(); } || is_cut<Batch>;
  static_assert(counts,
                "lockstep: this batch does not say how many samples it has; give it `std::size_t "
                "size() const`");
  if constexpr (requires { batch.size(); }) {
    return batch.size();
  } else if constexpr (counts) {
    return samples_of(batch, BatchCut{}, 0);
  } else {
    return 0;
  }
}

/// Says in words that a batch has nothing to cut.
template <class Batch>
consteval bool require_scattering() {
  static_assert(is_cut<Batch>,
                "lockstep: ParallelStrategy<DP> cannot cut this batch into shares; give it size() "
                "and void slice(first, count, out) const, or use spans, vectors or views");
  return is_cut<Batch>;
}

}  // namespace lockstep::detail
