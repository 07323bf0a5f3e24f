// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Combining all ranks' values on the host, always in rank order: bitwise equal on all ranks.

#include <cstring>

#include "lockstep/detail/comm/collective.hpp"
#include "lockstep/detail/core/bytes.hpp"

namespace lockstep::detail {

/// `Op` between `prepare` and `finish`: prepared values may be combined in any number of stages.
template <class Op>
struct Combining : Narrowing {
  static constexpr std::string_view name = Op::name;
  Op op;

  constexpr explicit Combining(const Op& whole) : op(whole) {}

  template <Element T>
  LOCKSTEP_HOST_DEVICE constexpr T combine(T a, T b) const {
    return op.combine(a, b);
  }
};

static_assert(ReduceOp<Combining<Average>, float> && ReduceOp<Combining<Max>, Half>);

/// The range [begin, end) that one rank combines: whole pairs of cache lines (no false sharing).
template <class T>
constexpr std::pair<std::size_t, std::size_t> slice_of(std::size_t count, std::size_t rank,
                                                       std::size_t ranks) {
  constexpr std::size_t unit = 128 / sizeof(T);
  const std::size_t units = (count + unit - 1) / unit;
  return {std::min(count, units * rank / ranks * unit),
          std::min(count, units * (rank + 1) / ranks * unit)};
}

/// Combines in rank order, `source(w)` being rank w's data. `store(begin, results)` gets blocks,
/// whose sources are read before: results may replace them. Blocks fit L1: sources are loaded once.
template <std::size_t Ranks, class T, class Op, class Source, class Store>
void combine_blocks(std::size_t ranks, std::size_t begin, std::size_t end, const Op& op,
                    const Source& source, const Store& store) {
  constexpr std::size_t block = 512 / sizeof(T);
  using A = decltype(op.prepare(T{}));
  const std::size_t world = Ranks == dynamic ? ranks : Ranks;
  std::array<T, block> results;
  std::array<A, block> sum;
  for (std::size_t i = begin; i < end; i += block) {
    const std::size_t n = std::min(block, end - i);
    const auto pass = [&](std::size_t length) {
      const T* const first = source(0) + i;
      for (std::size_t j = 0; j < length; ++j) sum[j] = op.prepare(first[j]);
      for (std::size_t w = 1; w < world; ++w) {
        const T* const next = source(w) + i;
        for (std::size_t j = 0; j < length; ++j) sum[j] = op.combine(sum[j], op.prepare(next[j]));
      }
      for (std::size_t j = 0; j < length; ++j) results[j] = op.template finish<T>(sum[j], world);
    };
    if (n == block) {
      pass(block);  // a constant length: unrolled and vectorised
    } else {
      pass(n);
    }
    store(i, std::span<const T>(results.data(), n));
  }
}

/// Calls `f(pointers...)` if unrolling over the ranks pays, and returns whether it did.
template <std::size_t Ranks, class T, class F>
bool with_unrolled(std::span<T* const> pointers, const F& f) {
  const auto call = [&]<std::size_t... W>(std::index_sequence<W...>) {
    if (pointers.size() == sizeof...(W)) f(pointers[W]...);
    return pointers.size() == sizeof...(W);
  };
  if constexpr (Ranks == dynamic) {
    return call(std::make_index_sequence<2>{}) || call(std::make_index_sequence<3>{}) ||
           call(std::make_index_sequence<4>{}) || call(std::make_index_sequence<8>{});
  } else {
    return Ranks <= 8 && call(std::make_index_sequence<Ranks <= 8 ? Ranks : 0>{});
  }
}

template <class T, class Op, class... Rest>
[[gnu::always_inline]] inline T combined(const Op& op, T first, Rest... rest) {
  auto sum = op.prepare(first);
  ((sum = op.combine(sum, op.prepare(rest))), ...);
  return op.template finish<T>(sum, 1 + sizeof...(Rest));
}

/// Like `combine_blocks`, for consumers that do more than copy. Longer blocks amortize their work
/// per block; beyond 2 KiB (at 8 KiB) their arrays, often in the same cache sets, evict each other.
template <std::size_t Ranks, class T, class Op, class Consume>
void consume_blocks(std::span<T* const> sources, std::size_t begin, std::size_t end, const Op& op,
                    const Consume& consume) {
  constexpr std::size_t block = 2048 / sizeof(T);
  alignas(64) std::array<T, block> results;
  const auto unrolled = [&](const auto*... source) {
    for (std::size_t i = begin; i < end; i += block) {
      const std::size_t n = std::min(block, end - i);
      T* const out = results.data();
#pragma GCC ivdep
      for (std::size_t j = 0; j < n; ++j) out[j] = combined<T>(op, source[i + j]...);
      consume(i, std::span<const T>(results.data(), n));
    }
  };
  if (with_unrolled<Ranks>(sources, unrolled)) return;
  combine_blocks<Ranks, T>(
      sources.size(), begin, end, op, [&](std::size_t w) { return sources[w]; }, consume);
}

/// All-reduces elements [begin, end) in place, in two passes over memory for any number of ranks.
template <std::size_t Ranks, class T, class Op>
void push(std::span<T* const> targets, std::size_t begin, std::size_t end, const Op& op) {
  const auto unrolled = [&](auto*... target) {
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i) {
      const T result = combined<T>(op, target[i]...);
      ((target[i] = result), ...);
    }
  };
  if (with_unrolled<Ranks>(targets, unrolled)) return;
  combine_blocks<Ranks, T>(
      targets.size(), begin, end, op, [&](std::size_t w) { return targets[w]; },
      [&](std::size_t i, std::span<const T> results) {
        for (T* const target : targets) std::copy(results.begin(), results.end(), target + i);
      });
}

template <class T>
void copy_elements(const T* from, T* to, std::size_t count) {
  if (from != to && count != 0) std::memmove(to, from, count * sizeof(T));
}

/// Passes over host memory. **Host** each blocks until it is done.
struct HostPasses {
  /// Memory of the same kind as `like` for `wanted` elements, or if that is much for fewer.
  template <class T>
  static std::vector<T> scratch(const T*, std::size_t wanted, std::size_t least) {
    return std::vector<T>(std::max(least, std::min(wanted, most_bytes / sizeof(T))));
  }

  /// Can only a GPU access this memory?
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

template <class B>
decltype(auto) passes_of(B& backend) {
  if constexpr (requires { backend.passes(); }) {
    return backend.passes();
  } else {
    return HostPasses{};
  }
}

/// Executes elements [begin, begin + n) of the pieces for rank `me`; those of rank w's piece p are
/// at `source(w) + p * stride`. `Ranks` is the world size if it is static.
template <std::size_t Ranks, class C, class Source>
void take_from_all(const C& call, Rank me, std::size_t world, const Source& source,
                   std::size_t stride, std::size_t begin, std::size_t n) {
  using T = typename C::element;
  if (call.out.empty()) return;
  T* const out = call.out.data() + begin;
  const std::size_t own_piece = C::deals_pieces ? me.value() * stride : 0;
  if constexpr (!std::is_same_v<typename C::operation, NoOperation>) {
    combine_blocks<Ranks, T>(
        world, 0, n, call.op, [&](std::size_t w) { return source(w) + own_piece; },
        [&](std::size_t i, std::span<const T> results) {
          copy_elements(results.data(), out + i, results.size());
        });
  } else if constexpr (C::collects_pieces) {
    for (std::size_t w = 0; w < world; ++w)
      copy_elements<T>(source(w) + own_piece, out + w * call.count, n);
  } else {
    copy_elements<T>(source(call.root.value()) + own_piece, out, n);
  }
}

}  // namespace lockstep::detail
