// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What stages do to elements by themselves, in the memory that a communicator works on: a
/// host's here, a GPU's in passes.cuh.

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>

#include "lockstep/core/reduce_op.hpp"

namespace lockstep {

namespace on_host {

/// to = what `op` makes of `from` before it combines; zeros behind that.
template <class T, class Value, class Op>
void prepare(std::span<T> from, std::span<Value> to, const Op& op) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = op.prepare(from[i]);
  for (Value& padding : to.subspan(from.size())) padding = Value{};
}

template <class Value, class T, class Op>
void finish(std::span<Value> from, std::span<T> to, const Op& op, std::size_t ranks) {
  for (std::size_t i = 0; i < from.size(); ++i) to[i] = op.template finish<T>(from[i], ranks);
}

/// out = op over what all ranks had, one's behind the other's in `gathered`, in rank order.
template <class T, class Op>
void combine(std::span<T> gathered, std::span<T> out, const Op& op) {
  const std::size_t ranks = out.empty() ? 0 : gathered.size() / out.size();
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto sum = op.prepare(gathered[i]);
    for (std::size_t w = 1; w < ranks; ++w)
      sum = op.combine(sum, op.prepare(gathered[w * out.size() + i]));
    out[i] = op.template finish<T>(sum, ranks);
  }
}

}  // namespace on_host

/// Passes over memory that `Comm` works on. **Host** these block; a GPU's enqueue on its stream.
template <class Comm>
struct Passes {
  /// Is it memory that only a GPU can reach?
  static bool is_device(const void*) { return false; }
  /// Is it memory that the stages of `Comm` can work on?
  static bool takes(const void*) { return true; }

  template <class T, class Value, class Op>
  static void prepare(Comm&, std::span<T> from, std::span<Value> to, const Op& op) {
    on_host::prepare(from, to, op);
  }
  template <class Value, class T, class Op>
  static void finish(Comm&, std::span<Value> from, std::span<T> to, const Op& op,
                     std::size_t ranks) {
    on_host::finish(from, to, op, ranks);
  }
  template <class T, class Op>
  static void combine(Comm&, std::span<T> gathered, std::span<T> out, const Op& op) {
    on_host::combine(gathered, out, op);
  }
  template <class T>
  static void copy(Comm&, std::span<T> from, std::span<std::remove_const_t<T>> to) {
    std::copy(from.begin(), from.end(), to.begin());
  }
};

}  // namespace lockstep
