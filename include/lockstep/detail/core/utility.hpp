// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A reference to a function, and storage with one object per type.

#include "lockstep/detail/core/standard.hpp"

namespace lockstep::detail {

template <class Signature>
class FunctionRef;

/// A non-owning reference to a callable, for functions that are compiled once. It calls through a
/// pointer: steps do not use it, except for gradients of LibTorch's autograd, which is virtual.
template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(reinterpret_cast<const volatile void*>(std::addressof(f)))),
        // NOLINTNEXTLINE(performance-unnecessary-value-param): as the signature has them
        call_([](void* object, Arguments... arguments) -> Result {
          auto& function = *reinterpret_cast<std::remove_reference_t<F>*>(object);
          return function(std::forward<Arguments>(arguments)...);
        }) {}

  Result operator()(Arguments... arguments) const {
    return call_(object_, std::forward<Arguments>(arguments)...);
  }

 private:
  void* object_;
  Result (*call_)(void*, Arguments...);
};

/// One object per type, made at its first use, for a class with templates over types of batches.
class TypedStorage {
 public:
  template <class T>
  T& get() {
    for (const auto& [key, value] : values_) {
      if (key == &key_of<T>) return *static_cast<T*>(value.get());
    }
    values_.emplace_back(&key_of<T>, std::make_shared<T>());  // remembers the deleter of T
    return *static_cast<T*>(values_.back().second.get());
  }

 private:
  template <class T>
  static constexpr char key_of = 0;

  std::vector<std::pair<const char*, std::shared_ptr<void>>> values_;
};

/// Converts to the result of `make()`, to construct an immovable object in place.
template <class Make>
struct MadeInPlace {
  const Make& make;
  operator std::invoke_result_t<const Make&>() const { return make(); }
};

}  // namespace lockstep::detail
