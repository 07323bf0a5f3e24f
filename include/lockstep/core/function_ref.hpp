// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file A reference to a function, for arguments of functions that are compiled once. It is called
/// through a pointer and so never used on a step's path, but for the gradients that LibTorch's
/// autograd hands over (`GradientReceiver`): it calls virtual functions as well.

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace lockstep::detail {

template <class Signature>
class FunctionRef;

/// Refers to a function, or to an object that can be called, which must outlive the reference.
template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class F>
    requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef>)
  FunctionRef(F&& f)
      : object_(const_cast<void*>(reinterpret_cast<const volatile void*>(std::addressof(f)))),
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

}  // namespace lockstep::detail
