// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The step that a model sees in a world of one.

#include <cstddef>
#include <type_traits>

#include "lockstep/bucket/element_types.hpp"
#include "lockstep/bucket/layout.hpp"
#include "lockstep/core/view.hpp"
#include "lockstep/model/lookup.hpp"

namespace lockstep {

/// Is a declared parameter trained in steps of this type, or is it frozen? A model that is trained
/// with different policies asks before it writes a gradient:
///
///     if constexpr (trains<decltype(step)>("embed.weight"_p)) { ... }
template <class Step, class Key>
  requires requires(Key key) { std::remove_cvref_t<Step>::trains(key); }
constexpr bool trains(Key key) {
  return std::remove_cvref_t<Step>::trains(key);
}

}  // namespace lockstep

namespace lockstep::detail {

/// Where a replica's tensors start. Each arena is as long as its layout's plan says and aligned to
/// `arena_alignment`.
struct Arenas {
  std::byte* parameters = nullptr;
  std::byte* gradients = nullptr;
  std::byte* buffers = nullptr;
};

/// Hands a model its tensors as views into arenas. `ready` does nothing with one rank, and the
/// compiler removes the call. Steps for more ranks have the same members.
template <class Model, class Limits = Buckets<>, class Memory = HostMemory,
          class ParameterTypes = DeclaredTypes, class BufferTypes = DeclaredTypes>
class BareStep {
  using LayoutOfParameters = Layout<Model, Limits, ParameterTypes>;
  using LayoutOfBuffers = BufferLayout<Model, BufferTypes>;

 public:
  constexpr BareStep(const Model& model, Arenas arenas)
      : BareStep(LayoutOfParameters(model), LayoutOfBuffers(model), arenas) {}
  constexpr BareStep(const LayoutOfParameters& parameters, const LayoutOfBuffers& buffers,
                     Arenas arenas)
      : parameters_(parameters), buffers_(buffers), arenas_(arenas) {}

  /// A parameter, to read. Only optimizers write parameters.
  template <class Key>
  constexpr auto param(Key key) const {
    return parameters_.template view<Memory, true>(arenas_.parameters, key);
  }

  /// A parameter's gradient, to write.
  template <class Key>
  constexpr auto grad(Key key) const {
    parameters_.require_trained(key);
    return parameters_.template view<Memory, false>(arenas_.gradients, key);
  }

  /// A buffer, to read and write.
  template <class Key>
  constexpr auto buffer(Key key) const {
    return buffers_.template view<Memory, false>(arenas_.buffers, key);
  }

  /// Says that a gradient is complete.
  template <class Key>
  constexpr void ready(Key key) const {
    // A misspelt name is an error here too.
    static_cast<void>(find_tensor<Model, TensorRole::parameter>(key).index);
    parameters_.require_trained(key);
  }

  /// Is a parameter trained, or frozen?
  template <class Key>
  static constexpr bool trains(Key key)
    requires(!TensorListing<Model>)
  {
    return LayoutOfParameters::trains(key);
  }
  template <class Key>
  bool trains(Key key) const
    requires TensorListing<Model>
  {
    return parameters_.trains(key);
  }

 private:
  [[no_unique_address]] LayoutOfParameters parameters_;
  [[no_unique_address]] LayoutOfBuffers buffers_;
  Arenas arenas_;
};

}  // namespace lockstep::detail
