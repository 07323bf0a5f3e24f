// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Reductions: by Gloo's ring where values travel as they are added up, else by everybody
/// combining a slice.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/comm/backends/gloo/engine.hpp"
#include "lockstep/comm/backends/gloo/library.hpp"
#include "lockstep/comm/backends/gloo/transfer.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/reduce_op.hpp"
#include "lockstep/core/strong.hpp"

namespace lockstep::over_gloo {

/// Can partial results travel in the place of elements? Not those of 16-bit floats: they are summed
/// in float, and a ring would round them at every step.
template <class T, class Op>
inline constexpr bool travels_in_place = sizeof(Prepared<T, Op>) == sizeof(T);

template <class T, class Op>
void prepare(std::span<T> data, const Op& op) {
  if constexpr (requires { op.factor; }) {
    for (T& value : data) value = static_cast<T>(op.prepare(value));
  }
}

/// Operations that only narrow have nothing to finish where nothing was widened.
template <class T, class Op>
void finish(std::span<T> data, const Op& op, std::size_t world) {
  if constexpr (!std::derived_from<Op, detail::Narrowing>) {
    for (T& value : data) value = op.template finish<T>(static_cast<Prepared<T, Op>>(value), world);
  }
}

/// Combines partial results, as Gloo's algorithms call it.
template <class T, class Op>
auto combiner(const Op& op) {
  return [op](void* out, const void* left, const void* right, std::size_t count) {
    using Value = Prepared<T, Op>;
    auto* const result = static_cast<Value*>(out);
    const auto* const a = static_cast<const Value*>(left);
    const auto* const b = static_cast<const Value*>(right);
    for (std::size_t i = 0; i < count; ++i) result[i] = op.combine(a[i], b[i]);
  };
}

/// Combines `pieces`, one of every rank, in rank order, rounding once.
template <class T, class Op>
void combine_pieces(std::span<const T> pieces, std::span<T> out, const Op& op, std::size_t world) {
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto sum = op.prepare(pieces[i]);
    for (std::size_t w = 1; w < world; ++w)
      sum = op.combine(sum, op.prepare(pieces[w * out.size() + i]));
    out[i] = op.template finish<T>(sum, world);
  }
}

/// How `count` elements are divided among ranks that each combine a slice.
inline Counts slices(std::size_t count, std::size_t world) {
  Counts counts(world);
  for (std::size_t w = 0; w < world; ++w)
    counts[w] = static_cast<std::int64_t>(count * (w + 1) / world - count * w / world);
  return counts;
}

/// This rank's slice of `data`, combined over ranks.
template <class T, class Op>
std::vector<T> combined_slice(Engine& engine, std::span<const T> data, const Counts& counts,
                              const Op& op) {
  const std::int64_t own = counts[engine.rank().value()];
  std::vector<T> slice(static_cast<std::size_t>(own));
  std::vector<T> pieces(slice.size() * engine.world());
  all_to_all(engine, data, counts, std::span<T>(pieces), Counts(engine.world(), own));
  combine_pieces<T>(pieces, slice, op, engine.world());
  return slice;
}

/// Up to this many bytes, fewer messages matter more than shorter ones.
inline constexpr std::size_t few_bytes = 16 << 10;

template <class T, class Op>
void all_reduce(Engine& engine, std::span<T> data, const Op& op) {
  if (data.empty()) return;
  if constexpr (travels_in_place<T, Op>) {
    prepare(data, op);
    ::gloo::AllreduceOptions options(engine.connections());
    options.setOutput(data.data(), data.size());
    options.setReduceFunction(combiner<T>(op));
    options.setAlgorithm(data.size_bytes() <= few_bytes
                             ? ::gloo::AllreduceOptions::Algorithm::BCUBE
                             : ::gloo::AllreduceOptions::Algorithm::RING);
    options.setTag(engine.tag());
    ::gloo::allreduce(options);
    finish(data, op, engine.world());
  } else {
    const Counts counts = slices(data.size(), engine.world());
    const std::vector<T> slice = combined_slice<T>(engine, data, counts, op);
    all_gather<T>(engine, slice, data, counts);
  }
}

template <class T, class Op>
void reduce(Engine& engine, std::span<T> data, Rank root, const Op& op) {
  if (data.empty()) return;
  const bool is_root = engine.rank() == root;
  if constexpr (travels_in_place<T, Op>) {
    std::vector<T> partial(data.begin(), data.end());  // all but the root's data stays
    prepare(std::span<T>(partial), op);
    ::gloo::ReduceOptions options(engine.connections());
    options.setOutput(partial.data(), partial.size());
    options.setReduceFunction(combiner<T>(op));
    options.setRoot(static_cast<int>(root.value()));
    options.setTag(engine.tag());
    ::gloo::reduce(options);
    if (!is_root) return;
    finish(std::span<T>(partial), op, engine.world());
    std::copy(partial.begin(), partial.end(), data.begin());
  } else {
    const Counts counts = slices(data.size(), engine.world());
    const std::vector<T> slice = combined_slice<T>(engine, data, counts, op);
    Counts sent(engine.world());
    sent[root.value()] = static_cast<std::int64_t>(slice.size());
    all_to_all<T>(engine, slice, sent, is_root ? data : std::span<T>(),
                  is_root ? counts : Counts(engine.world()));
  }
}

template <class T, class Op>
void reduce_scatter(Engine& engine, std::span<const T> in, std::span<T> out, const Op& op) {
  if (out.empty()) return;
  std::vector<T> pieces(in.size());
  all_to_all(engine, in, std::span<T>(pieces));
  combine_pieces<T>(pieces, out, op, engine.world());
}

}  // namespace lockstep::over_gloo
