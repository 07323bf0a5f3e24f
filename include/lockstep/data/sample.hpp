// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Samples read one at a time: what `map` changes before samples become batches.

#include <concepts>
#include <cstddef>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/data/dataset.hpp"

namespace lockstep {

/// A sample that lies in its source's memory.
template <class X, class Y>
struct LabelledSample {
  std::span<const X> inputs;
  Y label{};
};

/// A sample with memory of its own, which is used again for the next.
template <class X, class Y>
struct OwnedSample {
  std::vector<X> inputs;
  Y label{};
};

namespace detail {

/// Reads samples that are the same in every pass.
template <class S>
concept Reading = requires(const S& source, std::size_t index, typename S::sample_type& out) {
  { source.read(index, out) } -> std::same_as<void>;
};

/// Reads samples that depend on the pass.
template <class S>
concept PassReading =
    requires(const S& source, std::size_t index, Pass pass, typename S::sample_type& out) {
      { source.read(index, pass, out) } -> std::same_as<void>;
    };

/// Whether every pass has other samples, because something draws random numbers for them. A type
/// that takes a pass only to hand it on says so itself, by its member of this name.
template <class S>
constexpr bool changes_by_pass() {
  if constexpr (requires { S::changes_by_pass; }) {
    return S::changes_by_pass;
  } else if constexpr (requires { typename S::batch_type; }) {
    return PassReading<S> || PassLoading<S, typename S::batch_type>;
  } else {
    return PassReading<S>;
  }
}

/// A sample that can be a row of a batch.
template <class S>
concept Labelled = requires(const S& sample) {
  std::begin(sample.inputs);
  std::size(sample.inputs);
  sample.label;
};

template <Labelled S>
using InputOf = std::remove_cvref_t<decltype(*std::begin(std::declval<const S&>().inputs))>;
template <Labelled S>
using LabelOf = std::remove_cvref_t<decltype(std::declval<const S&>().label)>;

}  // namespace detail

/// `read(index, out)` replaces what `out` held by one sample, and reuses its memory. It is const
/// and is called by several threads at once, each with an `out` of its own. A sample may point into
/// the source. A source that draws random numbers has `read(index, pass, out)`. One that has work
/// to do once for a batch, before its samples are read, may have `prepare(indices)`: a mapped file
/// is looked at there, to see that it has not changed.
template <class S>
concept SampleSource = requires(const S& source) {
  requires std::default_initializable<typename S::sample_type>;
  { source.size() } -> std::convertible_to<std::size_t>;
  requires detail::Reading<S> || detail::PassReading<S>;
};

}  // namespace lockstep
