// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file `source | stacked()`, `padded(fill)`, `ragged()`, `collate(c)`: how samples become
/// batches.

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>

#include "lockstep/core/error.hpp"
#include "lockstep/data/batch.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/pipeline.hpp"

namespace lockstep {

namespace detail {

/// Samples of different length become the rows of a `PaddedBatch`.
template <class Fill>
struct PaddedCollate : Collate {
  template <class Sample>
  static PaddedBatch<InputOf<Sample>, LabelOf<Sample>> batch();
  template <class Sample>
  static constexpr bool require() {
    return require_labelled<Sample>();
  }

  template <class Sample, class Batch>
  void operator()(std::span<const Sample> samples, Batch& out) const {
    std::size_t longest = 0;
    for (const Sample& sample : samples) longest = std::max(longest, std::size(sample.inputs));
    out.resize(samples.size(), (longest + multiple - 1) / multiple * multiple);
    for (std::size_t i = 0; i != samples.size(); ++i) {
      const auto& inputs = samples[i].inputs;
      const auto row = out.row(i);
      std::fill(std::copy(std::begin(inputs), std::end(inputs), row.begin()), row.end(),
                static_cast<InputOf<Sample>>(fill));
      out.lengths[i] = std::size(inputs);
      out.labels[i] = samples[i].label;
    }
  }

  Fill fill;
  std::size_t multiple;
};

/// Samples of different length become a `RaggedBatch`.
struct RaggedCollate : Collate {
  template <class Sample>
  static RaggedBatch<InputOf<Sample>, LabelOf<Sample>> batch();
  template <class Sample>
  static constexpr bool require() {
    return require_labelled<Sample>();
  }

  template <class Sample, class Batch>
  void operator()(std::span<const Sample> samples, Batch& out) const {
    out.inputs.clear();
    out.offsets.assign(1, 0);
    out.labels.resize(samples.size());
    out.weights.assign(samples.size(), 1.f);
    for (std::size_t i = 0; i != samples.size(); ++i) {
      const auto& inputs = samples[i].inputs;
      out.inputs.insert(out.inputs.end(), std::begin(inputs), std::end(inputs));
      out.offsets.push_back(out.inputs.size());
      out.labels[i] = samples[i].label;
    }
  }
};

/// The program's own function: it fills a batch, or returns one where `Batch` is void.
template <class Batch, class C>
struct OwnCollate : Collate {
  template <class Sample>
  static auto batch() {
    if constexpr (std::is_void_v<Batch>) {
      return std::remove_cvref_t<std::invoke_result_t<const C&, std::span<const Sample>>>();
    } else {
      return Batch();
    }
  }
  template <class Sample>
  static constexpr bool require() {
    constexpr bool is_callable = [] {
      if constexpr (std::is_void_v<Batch>)
        return std::is_invocable_v<const C&, std::span<const Sample>>;
      else
        return std::is_invocable_v<const C&, std::span<const Sample>, Batch&>;
    }();
    static_assert(is_callable,
                  "lockstep: collate cannot call its function with the samples of this source; "
                  "write collate<Batch>(c) with c(std::span<const Sample>, Batch&), or collate(c) "
                  "with c(std::span<const Sample>), which returns the batch. Several threads call "
                  "it, so it must be const");
    return is_callable;
  }

  template <class Sample, class Out>
  void operator()(std::span<const Sample> samples, Out& out) const {
    if constexpr (std::is_void_v<Batch>) {
      out = c(samples);
    } else {
      c(samples, out);
    }
  }

  C c;
};

}  // namespace detail

/// How `padded` fills up.
struct PaddedOptions {
  std::size_t multiple = 1;  ///< rows are as long as the longest sample, rounded up to this
};

/// `source | stacked()`: batches are `LabelledBatch`es. Samples have `inputs`, a range, all of one
/// length, and `label`. `map` does the same unasked.
inline auto stacked() { return detail::RowCollate(); }

/// `source | padded(fill)`: batches are `PaddedBatch`es, whose rows are as long as the longest
/// sample of the batch. `fill` comes behind the inputs of shorter ones.
template <class Fill>
auto padded(Fill fill, PaddedOptions options = {}) {
  if (options.multiple == 0)
    detail::fail("padded", {"rows of a multiple of 0"}, "set multiple to 1 or more");
  return detail::PaddedCollate<Fill>{{}, std::move(fill), options.multiple};
}

/// `source | ragged()`: batches are `RaggedBatch`es, which hold samples one behind the other.
inline auto ragged() { return detail::RaggedCollate(); }

/// `source | collate<Batch>(c)` calls `c(std::span<const Sample>, Batch& out)` for every batch, and
/// reuses the memory of `out`; `collate(c)` calls `c(std::span<const Sample>)`, which returns the
/// batch. Several threads call c at once.
template <class Batch = void, class C>
auto collate(C c) {
  return detail::OwnCollate<Batch, C>{{}, std::move(c)};
}

}  // namespace lockstep
