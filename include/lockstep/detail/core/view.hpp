// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Row-major views of tensors, with mdspan's interface and convertible to row-major mdspans.
///
/// Not mdspans, because every shape is a type: each mdspan costs a compiler some 25 ms, and its
/// header more than all others. All shapes of one rank share a base class for all that is common.
/// LOCKSTEP_CHECKED, for debug builds, adds checks of indices, and elsewhere of complete gradients.

#include <iterator>

#include "lockstep/detail/core/dynamic.hpp"

#if defined(LOCKSTEP_CHECKED)
#include <cstdio>

#include "lockstep/detail/core/error.hpp"
#endif

namespace lockstep {

/// The memory of a view, as a type. Device code can access both kinds.
struct HostMemory {};

/// GPU memory. Host code can pass such views on; accessing an element does not compile.
struct DeviceMemory {};

/// The extents of a tensor, constructed from all of them or from the dynamic ones.
template <std::size_t... E>
struct Extents {
  std::size_t all[sizeof...(E) + 1] = {E..., 1};

  constexpr Extents() = default;
  template <std::convertible_to<std::size_t>... N>
    requires(sizeof...(N) == sizeof...(E) || sizeof...(N) == ((E == dynamic ? 1 : 0) + ... + 0))
  LOCKSTEP_HOST_DEVICE constexpr explicit Extents(N... sizes) {
    const std::size_t given[] = {static_cast<std::size_t>(sizes)..., 0};
    const std::size_t* next = given;
    for (std::size_t axis = 0; axis < sizeof...(E); ++axis) {
      if (sizeof...(N) == sizeof...(E) || all[axis] == dynamic) all[axis] = *next++;
    }
  }
};

namespace detail {

// Files of both modes would break the one-definition rule; this symbol makes the linker fail.
#if defined(LOCKSTEP_CHECKED)
inline constexpr bool is_checked = true;
[[gnu::used]] inline thread_local char lockstep_checked_in_all_files_or_in_none = 0;
#else
inline constexpr bool is_checked = false;
#if !defined(LOCKSTEP_LIBRARY)  // The compiled library makes no views and links with both modes.
[[gnu::used]] inline char lockstep_checked_in_all_files_or_in_none = 0;
#endif
#endif

#if defined(LOCKSTEP_CHECKED)
/// The index check of a view, which holds a copy of the tensor's name, because device code cannot
/// read host memory.
class IndexCheck {
 public:
  constexpr void set_name(std::string_view name) {
    std::size_t length = 0;
    for (; length != name.size() && length + 1 != sizeof name_; ++length)
      name_[length] = name[length];
    name_[length] = 0;
  }
  /// The view's memory may be released, which `releases` counts.
  constexpr void set_releases(const std::uint64_t& releases) {
    releases_ = &releases;
    releases_before_ = releases;
  }

 protected:
  template <class Index>
  LOCKSTEP_HOST_DEVICE constexpr void require_index(Index index, std::size_t axis,
                                                    std::size_t extent) const {
#if !defined(__CUDA_ARCH__)
    if (releases_ != nullptr && *releases_ != releases_before_) reject_released();
#endif
    // A negative index becomes a huge one.
    if (static_cast<std::size_t>(index) >= extent)
      reject(static_cast<long long>(index), axis, extent);
  }

 private:
  void reject_released() const {
    fail(name_, {"this view is read after its unit was released"},
         "ask for parameters again by step.param when a layer needs them, or keep more units by "
         "Sharding<FullyShard, GatheredUnits<N>>");
  }
  /// Device code cannot throw: it prints the message and traps.
  LOCKSTEP_HOST_DEVICE void reject(long long index, std::size_t axis, std::size_t extent) const {
#if defined(__CUDA_ARCH__)
    printf("lockstep: %s: index %lld of axis %d is out of range, its extent is %llu\n", name_,
           index, static_cast<int>(axis), static_cast<unsigned long long>(extent));
    __trap();
#else
    fail(name_, {"index ", index, " of axis ", axis, " is out of range, its extent is ", extent},
         "count indices from 0, and end loops at view.extent(axis)");
#endif
  }

  char name_[64] = "view";
  const std::uint64_t* releases_ = nullptr;
  std::uint64_t releases_before_ = 0;
};
#else
class IndexCheck {};
#endif

/// The pointer itself, or that of a fancy pointer such as Thrust's `device_ptr`.
template <class T>
LOCKSTEP_HOST_DEVICE constexpr T* raw_pointer(T* pointer) {
  return pointer;
}
template <class P>
  requires requires(const P& pointer) { raw_pointer(pointer.get()); }
LOCKSTEP_HOST_DEVICE constexpr auto* raw_pointer(const P& pointer) {
  return pointer.get();
}

/// A fancy pointer to T.
template <class P, class T>
concept PointerTo = !std::is_pointer_v<P> && requires(const P& pointer) {
  { raw_pointer(pointer) } -> std::convertible_to<T*>;
};

/// The base of all views of one rank with static extents.
template <class Memory, class T, std::size_t Rank, bool IsDynamic>
class ViewBase : public IndexCheck {
 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using memory = Memory;

  constexpr ViewBase() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit ViewBase(T* data, const std::size_t* = nullptr)
      : data_(data) {}

  LOCKSTEP_HOST_DEVICE static constexpr std::size_t rank() { return Rank; }
  LOCKSTEP_HOST_DEVICE static constexpr bool is_exhaustive() { return true; }
  LOCKSTEP_HOST_DEVICE constexpr T* data_handle() const { return data_; }

 private:
  T* data_ = nullptr;
};

/// The base of all views of one rank with dynamic extents.
template <class Memory, class T, std::size_t Rank>
class ViewBase<Memory, T, Rank, true> : public ViewBase<Memory, T, Rank, false> {
 public:
  constexpr ViewBase() = default;
  LOCKSTEP_HOST_DEVICE constexpr ViewBase(T* data, const std::size_t* extents)
      : ViewBase<Memory, T, Rank, false>(data) {
    for (std::size_t axis = 0; axis < Rank; ++axis) sizes_[axis] = extents[axis];
  }

 protected:
  std::size_t sizes_[Rank] = {};
};

/// Is the layout of `Mdspan` row-major? The stride of a 2 x 3 shape tells, without mdspan's header.
template <class Mdspan, class Shape>
inline constexpr bool is_row_major_of = false;
template <class Mdspan, template <class, std::size_t...> class Shape, class Index, std::size_t... E>
inline constexpr bool is_row_major_of<Mdspan, Shape<Index, E...>> =
    typename Mdspan::layout_type::template mapping<Shape<Index, 2, 3>>{}.stride(0) == 3;

template <class Mdspan>
concept RowMajorMdspan = is_row_major_of<Mdspan, typename Mdspan::extents_type>;

/// The view of a tensor that the model does not declare: after that error, its uses add none.
template <class Memory, class T>
class AnyView : public ViewBase<Memory, T, 1, false> {
 public:
  LOCKSTEP_HOST_DEVICE constexpr T& operator()(const auto&...) const {
    return *this->data_handle();
  }
  LOCKSTEP_HOST_DEVICE constexpr std::size_t extent(std::size_t) const { return 0; }
  LOCKSTEP_HOST_DEVICE constexpr std::size_t size() const { return 0; }
  template <class Other>
  operator Other() const;
};

/// A view of a tensor: a pointer, and the extents if any is dynamic.
template <class Memory, class T, std::size_t... E>
class View : public ViewBase<Memory, T, sizeof...(E), ((E == dynamic) || ...)> {
  static constexpr bool is_dynamic = ((E == dynamic) || ...);
  using Base = ViewBase<Memory, T, sizeof...(E), is_dynamic>;

 public:
  using extents_type = Extents<E...>;

  constexpr View() = default;
  LOCKSTEP_HOST_DEVICE constexpr explicit View(T* data)
    requires(!is_dynamic)
      : Base(data) {}
  LOCKSTEP_HOST_DEVICE constexpr View(T* data, const Extents<E...>& extents)
      : Base(data, extents.all) {}
  template <std::convertible_to<std::size_t>... N>
    requires(sizeof...(N) > 0 && std::constructible_from<Extents<E...>, N...>)
  LOCKSTEP_HOST_DEVICE constexpr explicit View(T* data, N... extents)
      : Base(data, Extents<E...>(extents...).all) {}
  /// From a fancy pointer, such as Thrust's: `DeviceView<float, 2, 3>(v.data())`.
  template <PointerTo<T> P, std::convertible_to<std::size_t>... N>
    requires(sizeof...(N) == 0 ? !is_dynamic : std::constructible_from<Extents<E...>, N...>)
  LOCKSTEP_HOST_DEVICE constexpr explicit View(const P& data, N... extents)
      : Base(raw_pointer(data), Extents<E...>(extents...).all) {}
  template <std::same_as<std::remove_const_t<T>> U>
    requires std::is_const_v<T>
  LOCKSTEP_HOST_DEVICE constexpr View(const View<Memory, U, E...>& other)
      : Base(other.data_handle(), other.extents().all) {
    if constexpr (is_checked) static_cast<IndexCheck&>(*this) = other;
  }

  LOCKSTEP_HOST_DEVICE constexpr std::size_t extent(std::size_t axis) const {
    if constexpr (is_dynamic) {
      return this->sizes_[axis];
    } else {
      return static_extent(axis);
    }
  }
  /// The extent, or `dynamic`.
  LOCKSTEP_HOST_DEVICE static constexpr std::size_t static_extent(std::size_t axis) {
    const std::size_t all[] = {E..., 1};
    return all[axis];
  }
  LOCKSTEP_HOST_DEVICE constexpr Extents<E...> extents() const {
    Extents<E...> result;
    for (std::size_t axis = 0; axis != sizeof...(E); ++axis) result.all[axis] = extent(axis);
    return result;
  }

  LOCKSTEP_HOST_DEVICE constexpr std::size_t size() const {
    std::size_t product = 1;
    for (std::size_t axis = 0; axis != sizeof...(E); ++axis) product *= extent(axis);
    return product;
  }

#if defined(__CUDACC__)
  template <std::convertible_to<std::size_t>... I>
    requires std::same_as<Memory, DeviceMemory>
  __device__ constexpr T& operator()(I... indices) const {
    return this->data_handle()[offset(indices...)];
  }
  template <std::convertible_to<std::size_t>... I>
    requires(!std::same_as<Memory, DeviceMemory>)
#else
  template <std::convertible_to<std::size_t>... I>
#endif
  LOCKSTEP_HOST_DEVICE constexpr T& operator()(I... indices) const {
    static_assert(std::same_as<Memory, HostMemory>,
                  "lockstep: this view is of device memory, which host code cannot read or write; "
                  "copy it to the host first, or do the work in a kernel");
    return this->data_handle()[offset(indices...)];
  }

  /// The same elements as an mdspan.
  template <RowMajorMdspan Mdspan>
    requires std::convertible_to<T (*)[], typename Mdspan::element_type (*)[]>
  LOCKSTEP_HOST_DEVICE constexpr operator Mdspan() const {
    static_assert(Mdspan::rank() == sizeof...(E), "lockstep: an mdspan of a view has its rank");
    return [this]<std::size_t... Axis>(std::index_sequence<Axis...>) {
      return Mdspan(this->data_handle(), extent(Axis)...);
    }(std::make_index_sequence<sizeof...(E)>{});
  }

 private:
  template <class... I>
  LOCKSTEP_HOST_DEVICE constexpr std::size_t offset([[maybe_unused]] I... indices) const {
    static_assert(sizeof...(I) == sizeof...(E),
                  "lockstep: a view takes one index for each of its dimensions; the element of a "
                  "matrix is view(row, column), that of a tensor without extents view()");
    std::size_t at = 0;
    if constexpr (sizeof...(I) == sizeof...(E)) {
      [[maybe_unused]] std::size_t axis = 0;
      if constexpr (is_checked) {
        ((this->require_index(indices, axis, extent(axis)), ++axis), ...);
        axis = 0;
      }
      ((at = at * (E == dynamic ? extent(axis) : E) + static_cast<std::size_t>(indices), ++axis),
       ...);
    }
    return at;
  }
};

/// A view or mdspan without gaps, of host or device memory.
template <class V>
concept DenseView = requires(const V& view) {
  { view.data_handle() } -> std::convertible_to<typename V::element_type*>;
  { view.is_exhaustive() } -> std::convertible_to<bool>;
};

/// A range with contiguous elements, in memory that the host need not be able to access.
template <class R>
concept ContiguousMemory = requires(R& range) {
  raw_pointer(std::data(range));
  { std::size(range) } -> std::convertible_to<std::size_t>;
};

/// `std::vector<bool>` has no contiguous elements.
template <class R>
inline constexpr bool packs_bits = false;
template <class Allocator>
inline constexpr bool packs_bits<std::vector<bool, Allocator>> = true;

}  // namespace detail

/// A view of host memory: `HostView<float, 128, 784>`.
template <class T, std::size_t... E>
using HostView = detail::View<HostMemory, T, E...>;

/// A view of GPU memory.
template <class T, std::size_t... E>
using DeviceView = detail::View<DeviceMemory, T, E...>;

static_assert(detail::is_checked || sizeof(HostView<float, 128, 784>) == sizeof(float*));
static_assert(std::is_trivially_copyable_v<DeviceView<float, dynamic, 784>>);

/// The elements of a view, an array, a span or a vector (also Thrust's), in memory order.
template <detail::DenseView V>
constexpr auto flat(const V& view) {
  return std::span<typename V::element_type>(view.data_handle(), view.size());
}
template <class R>
  requires(!detail::DenseView<std::remove_cvref_t<R>>)
constexpr auto flat(R&& range) {
  constexpr bool packed = detail::packs_bits<std::remove_cvref_t<R>>;
  static_assert(!packed,
                "lockstep: std::vector<bool> packs its elements into bits; give an array of bool, "
                "or a std::vector<std::uint8_t>");
  if constexpr (packed) {
    return std::span<bool>();
  } else {
    return std::span(detail::raw_pointer(std::data(range)), std::size(range));
  }
}

namespace detail {

template <class S>
using FlatElement = typename decltype(flat(std::declval<S&>()))::element_type;

}  // namespace detail

}  // namespace lockstep
