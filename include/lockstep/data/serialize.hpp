// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file How a batch becomes bytes and a batch again, for ranks that are fed by others.
///
/// A batch type says it once, for both ways, by a function beside it:
///
///     friend void pack(auto& parcel, Batch& batch) { parcel(batch.names, batch.width, batch.rows);
///     }
///
/// Fields are numbers, strings, arrays, vectors of such, and types that have a `pack` of their own.

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/error.hpp"

namespace lockstep::detail {

/// A value whose bytes mean the same on every rank.
template <class T>
concept PackedAsBytes = std::is_arithmetic_v<T> || std::is_enum_v<T> || Element<T>;

/// A vector or a string, whose length travels too.
template <class T>
concept PackedSequence = requires(T& values, std::size_t size) {
  typename T::value_type;
  values.resize(size);
  { *values.data() } -> std::same_as<typename T::value_type&>;
};

template <class T>
inline constexpr bool is_packed_array = false;
template <class T, std::size_t N>
inline constexpr bool is_packed_array<std::array<T, N>> = true;

/// A type that has a `pack`.
template <class T, class Way>
concept PackingItself = requires(Way& parcel, T& value) { pack(parcel, value); };

/// Gives one compile error for a field that cannot be packed, although it is met both ways.
template <class T, bool CanBePacked>
struct PackedField {
  static_assert(CanBePacked,
                "lockstep: a batch that is fed to other ranks says how it is packed; write beside "
                "its type: friend void pack(auto& parcel, Batch& batch) { parcel(batch.inputs, "
                "batch.labels); }, with numbers, strings, vectors of them, and types that have "
                "such a function themselves");
};

/// What the two ways have in common: `parcel(fields...)` packs each field, or unpacks it. `Self`
/// has `bytes(memory, count)`, which moves them, and `reserve(count, size)`, which says how many
/// elements of at least so many bytes a sequence has.
template <class Self>
class Parcel {
 public:
  template <class... Fields>
  void operator()(Fields&... fields) {
    (field(fields), ...);
  }

 private:
  Self& self() { return static_cast<Self&>(*this); }

  template <class T>
  void field(T& value) {
    static_assert(!std::is_const_v<T>, "lockstep: a field of a packed batch must not be const");
    constexpr bool has_own = PackingItself<T, Self>;
    constexpr bool has_fields =
        has_own || PackedAsBytes<T> || PackedSequence<T> || is_packed_array<T>;
    static_cast<void>(sizeof(PackedField<T, has_fields>));
    if constexpr (has_own) {
      pack(self(), value);
    } else if constexpr (PackedAsBytes<T>) {
      self().bytes(std::addressof(value), sizeof value);
    } else if constexpr (PackedSequence<T>) {
      sequence(value);
    } else if constexpr (has_fields) {
      for (auto& element : value) field(element);
    }
  }

  template <class T>
  void sequence(T& values) {
    using Value = typename T::value_type;
    const std::size_t size =
        self().reserve(values.size(), PackedAsBytes<Value> ? sizeof(Value) : 1);
    if (size != values.size()) values.resize(size);
    if constexpr (PackedAsBytes<Value>) {
      if (size != 0) self().bytes(values.data(), size * sizeof(Value));
    } else {
      for (Value& value : values) field(value);
    }
  }
};

/// Packs batches, one behind the other. Its memory is used again.
class ParcelWriter : public Parcel<ParcelWriter> {
 public:
  void clear() { bytes_.clear(); }
  std::size_t size() const { return bytes_.size(); }
  std::span<const std::uint8_t> written() const { return bytes_; }
  std::span<std::uint8_t> written() { return bytes_; }

  /// Packing does not change a batch: `pack` takes it without const because it also unpacks.
  template <class Batch>
  void put(const Batch& batch) {
    (*this)(const_cast<Batch&>(batch));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  }

  // For the base.

  void bytes(const void* memory, std::size_t count) {
    const auto* first = static_cast<const std::uint8_t*>(memory);
    bytes_.insert(bytes_.end(), first, first + count);
  }
  std::size_t reserve(std::size_t count, std::size_t) {
    const std::uint64_t travelling = count;
    bytes(&travelling, sizeof travelling);
    return count;
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Unpacks a batch, and accepts no bytes that another type has packed.
class ParcelReader : public Parcel<ParcelReader> {
 public:
  explicit ParcelReader(std::span<const std::uint8_t> parcel) : left_(parcel) {}

  template <class Batch>
  void take(Batch& batch) {
    (*this)(batch);
    if (!left_.empty()) refuse();
  }

  // For the base.

  void bytes(void* memory, std::size_t count) {
    if (count > left_.size()) refuse();
    std::memcpy(memory, left_.data(), count);
    left_ = left_.subspan(count);
  }
  std::size_t reserve(std::size_t, std::size_t size) {
    std::uint64_t count = 0;
    bytes(&count, sizeof count);
    if (count > left_.size() / size) refuse();
    return count;
  }

 private:
  [[noreturn]] static void refuse() {
    fail("feed", {"a parcel does not hold a batch of this type"},
         "let all ranks run the same program, and pack and unpack the same fields");
  }

  std::span<const std::uint8_t> left_;
};

/// Memory for parcels that arrive. It only grows, so that nothing is zeroed twice.
inline std::span<std::uint8_t> room_in(std::vector<std::uint8_t>& memory, std::size_t size) {
  if (memory.size() < size) memory.resize(size);
  return std::span(memory).first(size);
}

}  // namespace lockstep::detail
