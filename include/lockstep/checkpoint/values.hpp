// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Values of the program that a checkpoint keeps beside the model: counters, random streams,
/// histories. Every rank has its own.

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/element.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/random_stream.hpp"

namespace lockstep {

namespace detail {

/// A value of one rank as a checkpoint has it.
struct SavedValue {
  std::string name;
  std::string type;   // `double`, `float[]`, `text`, `bool` or `RandomStream`
  std::string bytes;  // of a random stream: its seed and its position
};

template <class T>
inline constexpr bool is_vector_of_numbers = false;
template <Element T>
inline constexpr bool is_vector_of_numbers<std::vector<T>> = true;

/// What a checkpoint can keep.
template <class T>
concept Keepable = Element<T> || std::same_as<T, bool> || std::same_as<T, std::string> ||
                   std::same_as<T, RandomStream> || is_vector_of_numbers<T>;

template <class T>
std::string value_type() {
  if constexpr (std::same_as<T, bool>) {
    return "bool";
  } else if constexpr (std::same_as<T, std::string>) {
    return "text";
  } else if constexpr (std::same_as<T, RandomStream>) {
    return "RandomStream";
  } else if constexpr (is_vector_of_numbers<T>) {
    return value_type<typename T::value_type>() + "[]";
  } else {
    return std::string(element_name(element_kind<T>()));
  }
}

/// A value's bytes, and a value of bytes that have the right number.
template <class T>
std::string value_bytes(const T& value) {
  if constexpr (std::same_as<T, std::string>) {
    return value;
  } else if constexpr (std::same_as<T, RandomStream>) {
    const std::uint64_t state[] = {value.seed().value(), value.position()};
    return {reinterpret_cast<const char*>(state), sizeof state};
  } else if constexpr (is_vector_of_numbers<T>) {
    return {reinterpret_cast<const char*>(value.data()),
            value.size() * sizeof(typename T::value_type)};
  } else {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }
}

template <class T>
void set_value(T& value, std::string_view bytes) {
  if constexpr (std::same_as<T, std::string>) {
    value = bytes;
  } else if constexpr (std::same_as<T, RandomStream>) {
    std::uint64_t state[2] = {};
    std::memcpy(state, bytes.data(), sizeof state);
    value = RandomStream(Seed{state[0]}, state[1]);
  } else if constexpr (is_vector_of_numbers<T>) {
    value.resize(bytes.size() / sizeof(typename T::value_type));
    if (!bytes.empty()) std::memcpy(value.data(), bytes.data(), bytes.size());
  } else if constexpr (std::same_as<T, bool>) {
    value = bytes.front() != 0;
  } else {
    bytes.copy(reinterpret_cast<char*>(&value), sizeof value);
  }
}

}  // namespace detail

/// A name, and a reference to a value: `{"reward", reward}`.
class KeptValue {
 public:
  template <class T>
  KeptValue(std::string_view name, T& value) : name_(name), object_(&value) {
    static_assert(detail::Keepable<T>,
                  "lockstep: a checkpoint keeps numbers, bool, std::string, std::vector of numbers "
                  "and RandomStream, no constants and no other types (the compiler prints the type "
                  "beside this sentence)");
    if constexpr (detail::Keepable<T>) {
      type_ = detail::value_type<T>();
      bytes_ = [](const void* object) {
        return detail::value_bytes(*static_cast<const T*>(object));
      };
      set_ = [](void* object, std::string_view bytes) {
        detail::set_value(*static_cast<T*>(object), bytes);
      };
    }
  }

  const std::string& name() const { return name_; }
  const std::string& type() const { return type_; }
  /// The value as it is now.
  detail::SavedValue saved() const { return {name_, type_, bytes_(object_)}; }
  /// Takes the value that a checkpoint had, which is of this type.
  void set(const detail::SavedValue& saved) const { set_(object_, saved.bytes); }

 private:
  std::string name_;
  std::string type_;
  void* object_;
  std::string (*bytes_)(const void*) = nullptr;
  void (*set_)(void*, std::string_view) = nullptr;
};

/// References to values of the program by name, which must outlive them:
///
///     RandomStream noise(rank_seed(seed, rank));
///     double longest = 0;
///     const KeptValues mine{{"noise", noise}, {"longest", longest}};
///     save(ddp, path, {.values = mine});
class KeptValues {
 public:
  KeptValues() = default;
  KeptValues(std::initializer_list<KeptValue> values) {
    for (const KeptValue& value : values) add(value);
  }

  /// Throws where the name is taken.
  KeptValues& add(const KeptValue& value);
  template <class T>
  KeptValues& add(std::string_view name, T& value) {
    return add(KeptValue(name, value));
  }

  bool empty() const { return values_.empty(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<KeptValue> values_;
};

}  // namespace lockstep
