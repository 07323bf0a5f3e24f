// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The loops of collectives over elements, and the scratch memory for them: on the host here,
/// on a GPU in passes.cuh.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "lockstep/comm/combine.hpp"
#include "lockstep/core/bytes.hpp"
#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::detail {

template <class T>
void copy_elements(const T* from, T* to, std::size_t count) {
  if (from != to && count != 0) std::memmove(to, from, count * sizeof(T));
}

/// Passes over host memory. **Host** each blocks until it is done.
struct HostPasses {
  /// Memory for `wanted` elements, or for fewer if that is much, of the same kind as `like`.
  template <class T>
  static std::vector<T> scratch(const T*, std::size_t wanted, std::size_t least) {
    return std::vector<T>(std::max(least, std::min(wanted, most_bytes / sizeof(T))));
  }

  /// Is it memory that only a GPU can reach?
  static constexpr bool is_device(const void*) { return false; }
  /// Can the passes below use this memory?
  static constexpr bool takes(const void*) { return true; }

  template <class T>
  static void copy(std::span<const T> from, std::span<T> to) {
    copy_elements(from.data(), to.data(), from.size());
  }

  /// out = op over ranks of `gathered`, which holds the elements of all ranks in rank order.
  template <class T, class Op>
  static void combine(std::span<const T> gathered, std::span<T> out, const Op& op) {
    if (out.empty()) return;
    combine_blocks<dynamic, T>(
        gathered.size() / out.size(), 0, out.size(), op,
        [&](std::size_t w) { return gathered.data() + w * out.size(); },
        [&](std::size_t i, std::span<const T> results) {
          copy_elements(results.data(), out.data() + i, results.size());
        });
  }

  /// to = the elements of `from`, prepared by `op`, then zeros.
  template <class T, class Value, class Op>
  static void prepare(std::span<const T> from, std::span<Value> to, const Op& op) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = op.prepare(from[i]);
    std::fill(to.begin() + static_cast<std::ptrdiff_t>(from.size()), to.end(), Value{});
  }

  /// to = the combined values of `from`, finished by `op` in a world of `ranks`.
  template <class Value, class T, class Op>
  static void finish(std::span<const Value> from, std::span<T> to, const Op& op,
                     std::size_t ranks) {
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = op.template finish<T>(from[i], ranks);
  }

 private:
  static constexpr std::size_t most_bytes = 4_MiB;
};

/// The passes of a backend: its own where it has them, else the host's.
template <class B>
decltype(auto) passes_of(B& backend) {
  if constexpr (requires { backend.passes(); }) {
    return backend.passes();
  } else {
    return HostPasses{};
  }
}

}  // namespace lockstep::detail
