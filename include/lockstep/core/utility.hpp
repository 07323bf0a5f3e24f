// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A reference to a function, and one object of every type that is asked for.

#include "lockstep/core/standard.hpp"

namespace lockstep::detail {

template <class Signature>
class FunctionRef;

/// Refers to a function, or to an object that can be called, which must outlive the reference: for
/// arguments of functions that are compiled once. It is called through a pointer and so never used
/// on a step's path, but for the gradients that LibTorch's autograd hands over
/// (`GradientReceiver`): it calls virtual functions as well.
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

/// A class whose members are templates over batches cannot declare a member for each type of batch.
/// This has one object for each type, made at its first use and found by comparing addresses.
class TypedStorage {
 public:
  template <class T>
  T& get() {
    for (const auto& [key, value] : values_) {
      if (key == &key_of<T>) return *static_cast<T*>(value.get());
    }
    values_.emplace_back(&key_of<T>, std::make_shared<T>());  // keeps how T is destroyed
    return *static_cast<T*>(values_.back().second.get());
  }

 private:
  template <class T>
  static constexpr char key_of = 0;

  std::vector<std::pair<const char*, std::shared_ptr<void>>> values_;
};

}  // namespace lockstep::detail
