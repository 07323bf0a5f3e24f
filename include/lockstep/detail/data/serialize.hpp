// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Serializes batches for ranks that are fed by others.
///
/// A batch type has one function for both directions, with fields that are numbers, strings,
/// arrays, vectors of such, and types with their own `pack`:
///
///     friend void pack(auto& archive, Batch& batch) { archive(batch.names, batch.width); }

#include <cstring>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/error.hpp"

namespace lockstep::detail {

/// A value whose bytes mean the same on every rank.
template <class T>
concept PackedAsBytes = std::is_arithmetic_v<T> || std::is_enum_v<T> || Element<T>;

template <class T>
concept PackedSequence = requires(T& values) {
  typename T::value_type;
  { *values.data() } -> std::same_as<typename T::value_type&>;
} && (requires(T& values) { values.resize(1); } || requires { std::tuple_size<T>::value; });

/// One compile error for a field that cannot be packed, although both directions meet it.
template <class T, bool CanBePacked>
consteval bool require_packed() {
  static_assert(CanBePacked,
                "lockstep: a batch that is fed to other ranks says how it is packed; write beside "
                "its type: friend void pack(auto& archive, Batch& batch) { archive(batch.inputs, "
                "batch.labels); }, with numbers, strings, vectors of them, and types that have "
                "such a function themselves");
  return true;
}

/// Packs or unpacks a field. `reserve(count, size)`: a length, of elements of `size` bytes or more.
template <class Archive, class T>
void pack_field(Archive& archive, T& value) {
  static_assert(!std::is_const_v<T>, "lockstep: a field of a packed batch must not be const");
  constexpr bool has_own = requires { pack(archive, value); };
  constexpr bool is_packed = has_own || PackedAsBytes<T> || PackedSequence<T>;
  static_cast<void>(require_packed<T, is_packed>());
  if constexpr (has_own) {
    pack(archive, value);
  } else if constexpr (PackedAsBytes<T>) {
    archive.bytes(std::addressof(value), sizeof value);
  } else if constexpr (PackedSequence<T>) {
    using Value = typename T::value_type;
    if constexpr (requires { value.resize(1); }) {
      const std::size_t least = PackedAsBytes<Value> ? sizeof(Value) : 1;
      const std::size_t size = archive.reserve(value.size(), least);
      if (size != value.size()) value.resize(size);
    }
    if constexpr (PackedAsBytes<Value>) {
      if (!value.empty()) archive.bytes(value.data(), value.size() * sizeof(Value));
    } else {
      for (Value& each : value) pack_field(archive, each);
    }
  }
}

/// Packs batches one after the other; memory is reused.
class ArchiveWriter {
 public:
  void operator()(auto&... fields) { (pack_field(*this, fields), ...); }

  void clear() { bytes_.clear(); }
  std::size_t size() const { return bytes_.size(); }
  std::span<const std::uint8_t> written() const { return bytes_; }
  std::span<std::uint8_t> written() { return bytes_; }

  /// `pack` takes a batch without const because it also unpacks; packing changes nothing.
  template <class Batch>
  void put(const Batch& batch) {
    (*this)(const_cast<Batch&>(batch));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  }

  void bytes(const void* memory, std::size_t count) {
    const auto* first = static_cast<const std::uint8_t*>(memory);
    bytes_.insert(bytes_.end(), first, first + count);
  }
  std::size_t reserve(std::size_t count, std::size_t) {
    const std::uint64_t sent = count;
    bytes(&sent, sizeof sent);
    return count;
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Unpacks a batch. Throws if the number of bytes does not fit the batch's type.
class ArchiveReader {
 public:
  explicit ArchiveReader(std::span<const std::uint8_t> archive) : left_(archive) {}

  void operator()(auto&... fields) { (pack_field(*this, fields), ...); }

  void take(auto& batch) {
    (*this)(batch);
    if (!left_.empty()) reject();
  }

  void bytes(void* memory, std::size_t count) {
    if (count > left_.size()) reject();
    std::memcpy(memory, left_.data(), count);
    left_ = left_.subspan(count);
  }
  std::size_t reserve(std::size_t, std::size_t size) {
    std::uint64_t count = 0;
    bytes(&count, sizeof count);
    if (count > left_.size() / size) reject();
    return count;
  }

 private:
  [[noreturn]] static void reject() {
    fail("feed", {"an archive does not hold a batch of this type"},
         "let all ranks run the same program, and pack and unpack the same fields");
  }

  std::span<const std::uint8_t> left_;
};

/// Memory for received bytes. It only grows, so that nothing is zeroed twice.
inline std::span<std::uint8_t> room_in(std::vector<std::uint8_t>& memory, std::size_t size) {
  if (memory.size() < size) memory.resize(size);
  return std::span(memory).first(size);
}

}  // namespace lockstep::detail
