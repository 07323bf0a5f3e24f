// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Values of the program in a checkpoint: counters, random streams, histories, per rank.

#include <cstring>

#include "lockstep/detail/core/element.hpp"
#include "lockstep/detail/core/json.hpp"
#include "lockstep/detail/core/random_stream.hpp"

namespace lockstep {

namespace detail {

template <class T>
inline constexpr bool is_vector_of_numbers = false;
template <Element T>
inline constexpr bool is_vector_of_numbers<std::vector<T>> = true;

template <class T>
concept Keepable = Element<T> || std::same_as<T, bool> || std::same_as<T, std::string> ||
                   std::same_as<T, RandomStream> || is_vector_of_numbers<T>;

/// `double`, `float[]`, `text`, `bool` or `RandomStream`.
template <Keepable T>
std::string value_type() {
  if constexpr (std::same_as<T, std::string>) return "text";
  if constexpr (std::same_as<T, bool>) return "bool";
  if constexpr (std::same_as<T, RandomStream>) return "RandomStream";
  if constexpr (Element<T>) return std::string(element_name(element_kind<T>()));
  if constexpr (is_vector_of_numbers<T>) return value_type<typename T::value_type>() + "[]";
}

/// The element type of texts and vectors, stored as tensors; `unsupported` for header values.
template <Keepable T>
constexpr ElementKind value_kind() {
  if constexpr (std::same_as<T, std::string>) return ElementKind::u8;
  if constexpr (is_vector_of_numbers<T>) return element_kind<typename T::value_type>();
  return ElementKind::unsupported;
}

/// Returns the bytes of the tensor, or adds the value to the header.
template <Keepable T>
std::string_view save_value(const void* object, JsonLine& to) {
  const T& value = *static_cast<const T*>(object);
  if constexpr (value_kind<T>() != ElementKind::unsupported) {
    return {reinterpret_cast<const char*>(value.data()), value.size() * sizeof *value.data()};
  } else if constexpr (std::same_as<T, RandomStream>) {
    const std::uint64_t state[] = {value.seed().value(), value.position()};
    to.add_array("value", state);
  } else if constexpr (std::same_as<T, bool>) {
    to.add("value", value);
  } else if constexpr (std::integral<T>) {  // also `char`, which JSON does not take
    to.add(
        "value",
        static_cast<std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>(value));
  } else {
    to.add_exact("value", static_cast<double>(static_cast<Accumulator<T>>(value)));
  }
  return {};
}

/// Throws on a value of another form; assigns it unless `object` is null.
template <Keepable T>
void load_value(void* object, const JsonEntry& from, std::string_view bytes) {
  const auto set = [&](const T& value) {
    if (object != nullptr) *static_cast<T*>(object) = value;
  };
  if constexpr (std::same_as<T, std::string>) {
    set(T(bytes));
  } else if constexpr (is_vector_of_numbers<T>) {
    T value(bytes.size() / sizeof(typename T::value_type));
    if (!bytes.empty()) std::memcpy(value.data(), bytes.data(), bytes.size());
    set(value);
  } else if constexpr (std::same_as<T, RandomStream>) {
    const std::vector<std::uint64_t> state = from.at("value").naturals();
    if (state.size() != 2) from.fail("is no state of a random stream");
    set(RandomStream(Seed{state[0]}, state[1]));
  } else if constexpr (std::same_as<T, bool>) {
    set(from.at("value").boolean());
  } else if constexpr (std::integral<T>) {
    const auto number = [&] {
      if constexpr (std::signed_integral<T>) return from.at("value").integer();
      if constexpr (std::unsigned_integral<T>) return from.at("value").natural();
    }();
    if (static_cast<T>(number) != number) from.fail("is too large for its type");
    set(static_cast<T>(number));
  } else {
    set(static_cast<T>(static_cast<Accumulator<T>>(from.at("value").real())));
  }
}

}  // namespace detail

/// A name, and a reference to a value: `{"reward", reward}`.
class StateValue {
 public:
  template <class T>
  StateValue(std::string_view name, T& value) : name_(name), object_(&value) {
    static_assert(detail::Keepable<T>,
                  "lockstep: a checkpoint keeps numbers, bool, std::string, std::vector of numbers "
                  "and RandomStream, no constants and no other types (the compiler prints the type "
                  "beside this message)");
    if constexpr (detail::Keepable<T>) {
      type_ = detail::value_type<T>();
      kind_ = detail::value_kind<T>();
      save_ = &detail::save_value<T>;
      load_ = &detail::load_value<T>;
    }
  }

  const std::string& name() const { return name_; }
  const std::string& type() const { return type_; }
  /// The element type of its tensor; `unsupported` for a value in the header.
  ElementKind kind() const { return kind_; }
  /// Describes the current value in `to`; returns the bytes of its tensor.
  std::string_view save(JsonLine& to) const { return save_(object_, to); }
  /// Throws where `load` would, and changes nothing.
  void check(const detail::JsonEntry& from, std::string_view bytes) const {
    load_(nullptr, from, bytes);
  }
  void load(const detail::JsonEntry& from, std::string_view bytes) const {
    load_(object_, from, bytes);
  }

 private:
  std::string name_;
  std::string type_;
  ElementKind kind_ = ElementKind::unsupported;
  void* object_;
  std::string_view (*save_)(const void*, JsonLine&) = nullptr;
  void (*load_)(void*, const detail::JsonEntry&, std::string_view) = nullptr;
};

/// References to values of the program by name; the values must outlive the references:
///
///     RandomStream noise(rank_seed(seed, rank));
///     double longest = 0;
///     const StateValues mine{{"noise", noise}, {"longest", longest}};
///     save(ddp, path, {.values = mine});
class StateValues {
 public:
  StateValues() = default;
  StateValues(std::initializer_list<StateValue> values) {
    for (const StateValue& value : values) add(value);
  }

  /// Throws where the name is taken or not UTF-8.
  StateValues& add(const StateValue& value);
  StateValues& add(std::string_view name, auto& value) { return add(StateValue(name, value)); }

  bool empty() const { return values_.empty(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<StateValue> values_;
};

}  // namespace lockstep
