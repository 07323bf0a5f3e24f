// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The arithmetic of a shared-memory reduction: one rank's slice of everybody's data.

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lockstep/core/dynamic.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"

namespace lockstep::shm {

/// Elements [begin, end) of `count` that one of `ranks` ranks works on: whole pairs of cache lines,
/// so that no two ranks write the same.
template <class T>
constexpr std::pair<std::size_t, std::size_t> slice(std::size_t count, std::size_t rank,
                                                    std::size_t ranks) {
  constexpr std::size_t unit = 128 / sizeof(T);
  const std::size_t units = (count + unit - 1) / unit;
  return {std::min(count, units * rank / ranks * unit),
          std::min(count, units * (rank + 1) / ranks * unit)};
}

/// Combines in rank order, `source(w)` being rank w's data, and hands each block of results to
/// `store(begin, results)`. Every source is read before anything is stored, so results may go where
/// sources are. A block fits into registers or the first-level cache: every byte of the sources is
/// loaded from memory once.
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

/// All-reduces elements [begin, end) in place: loads from all ranks, combines in registers in rank
/// order, stores to all. Two passes over memory in all, whatever the number of ranks.
template <std::size_t Ranks, class T, class Op>
void push_unrolled(const std::array<T*, Ranks>& targets, std::size_t begin, std::size_t end,
                   const Op& op) {
  const auto pass = [&]<std::size_t... W>(std::index_sequence<W...>, auto... target) {
#pragma GCC ivdep
    for (std::size_t i = begin; i < end; ++i) {
      const T loaded[] = {target[i]...};
      auto sum = op.prepare(loaded[0]);
      ((sum = op.combine(sum, op.prepare(loaded[W + 1]))), ...);
      const T result = op.template finish<T>(sum, Ranks);
      ((target[i] = result), ...);
    }
  };
  std::apply([&](auto... target) { pass(std::make_index_sequence<Ranks - 1>{}, target...); },
             targets);
}

/// The same for any number of ranks: unrolled for the common ones, in blocks for the rest.
template <std::size_t Ranks, class T, class Op>
void push(std::span<T* const> targets, std::size_t begin, std::size_t end, const Op& op) {
  const auto unrolled = [&]<std::size_t N>(std::integral_constant<std::size_t, N>) {
    std::array<T*, N> fixed;
    std::copy_n(targets.begin(), N, fixed.begin());
    push_unrolled<N>(fixed, begin, end, op);
  };
  if constexpr (Ranks != dynamic && Ranks <= 8) {
    unrolled(std::integral_constant<std::size_t, Ranks>{});
  } else {
    switch (targets.size()) {
      case 2:
        return unrolled(std::integral_constant<std::size_t, 2>{});
      case 3:
        return unrolled(std::integral_constant<std::size_t, 3>{});
      case 4:
        return unrolled(std::integral_constant<std::size_t, 4>{});
      case 8:
        return unrolled(std::integral_constant<std::size_t, 8>{});
      default:
        combine_blocks<Ranks, T>(
            targets.size(), begin, end, op, [&](std::size_t w) { return targets[w]; },
            [&](std::size_t i, std::span<const T> results) {
              for (T* const target : targets) std::copy(results.begin(), results.end(), target + i);
            });
    }
  }
}

}  // namespace lockstep::shm
