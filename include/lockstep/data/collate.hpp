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

/// The batches of a source. `Held` is the source's type, or a reference to it.
template <class Held, class Collate>
class Collated
    : public LoadsSamples<Collated<Held, Collate>, typename std::remove_cvref_t<Held>::sample_type,
                          ChainOf<std::remove_cvref_t<Held>>, Collate> {
  using Source = std::remove_cvref_t<Held>;
  using Base = LoadsSamples<Collated, typename Source::sample_type, ChainOf<Source>, Collate>;

 public:
  static constexpr bool changes_by_pass = detail::changes_by_pass<Source>();

  template <class Given>
  Collated(Given&& source, Collate collate)
      : Base(std::move(collate)), source_(std::forward<Given>(source)) {}

  std::size_t size() const { return source_.size(); }
  void prepare(std::span<const std::size_t> indices) const { prepare_samples(source_, indices); }

  /// For the base alone: batches are no samples, and `map` comes before.
  void read(std::size_t index, Pass pass, ChainOf<Source>& chain, auto& out) const {
    read_sample(source_, index, pass, chain, out);
  }

 private:
  Held source_;
};

/// Samples of different length become the rows of a `PaddedBatch`.
template <class Sample, class Fill>
struct PaddedCollate {
  using batch_type = PaddedBatch<InputOf<Sample>, LabelOf<Sample>>;

  void operator()(std::span<const Sample> samples, batch_type& out) const {
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
template <class Sample>
struct RaggedCollate {
  using batch_type = RaggedBatch<InputOf<Sample>, LabelOf<Sample>>;

  void operator()(std::span<const Sample> samples, batch_type& out) const {
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
template <class Sample, class Batch, class C>
struct OwnCollate {
  using batch_type = Batch;
  static constexpr bool is_callable =
      std::is_invocable_v<const C&, std::span<const Sample>, Batch&>;

  void operator()(std::span<const Sample> samples, Batch& out) const { c(samples, out); }

  C c;
};

template <class Sample, class C>
struct OwnCollate<Sample, void, C> {
  static constexpr auto result() {
    if constexpr (std::is_invocable_v<const C&, std::span<const Sample>>) {
      return std::invoke_result<const C&, std::span<const Sample>>{};
    } else {  // some batch, so that there is one error
      return std::type_identity<LabelledBatch<float, std::int32_t>>{};
    }
  }
  using batch_type = std::remove_cvref_t<typename decltype(result())::type>;
  static constexpr bool is_callable = std::is_invocable_v<const C&, std::span<const Sample>>;

  void operator()(std::span<const Sample> samples, batch_type& out) const { out = c(samples); }

  C c;
};

/// What `padded`, `ragged` and `collate` return. `Make::collate<Sample>()` is the collate for a
/// type of sample, and `Make::require<Sample>()` says what is wrong with one that it cannot take.
template <class Make>
struct CollateStage : PipelineStage {
  explicit CollateStage(Make made) : make(std::move(made)) {}

  template <class Sample>
  static constexpr bool require() {
    return Make::template require<Sample>();
  }
  template <class Held, class Given>
  auto behind(Given&& source) {
    auto collate = make.template collate<typename std::remove_cvref_t<Held>::sample_type>();
    return Collated<Held, decltype(collate)>(std::forward<Given>(source), std::move(collate));
  }

  Make make;
};

struct MakeLabelled {
  template <class Sample>
  static constexpr bool require() {
    static_assert(Labelled<Sample>,
                  "lockstep: stacked, padded and ragged take samples with `inputs` (a range) and "
                  "`label`; give samples both with map, or say collate<Batch>(c)");
    return Labelled<Sample>;
  }
};

struct MakeStacked : MakeLabelled {
  template <class Sample>
  static auto collate() {
    return RowCollate<Sample>{};
  }
};

template <class Fill>
struct MakePadded : MakeLabelled {
  MakePadded(Fill fill, std::size_t multiple) : fill_(std::move(fill)), multiple_(multiple) {}
  template <class Sample>
  auto collate() {
    return PaddedCollate<Sample, Fill>{std::move(fill_), multiple_};
  }

 private:
  Fill fill_;
  std::size_t multiple_;
};

struct MakeRagged : MakeLabelled {
  template <class Sample>
  static auto collate() {
    return RaggedCollate<Sample>{};
  }
};

template <class Batch, class C>
struct MakeOwn {
  template <class Sample>
  static constexpr bool require() {
    constexpr bool is_callable = OwnCollate<Sample, Batch, C>::is_callable;
    static_assert(is_callable,
                  "lockstep: collate cannot call its function with the samples of this source; "
                  "write collate<Batch>(c) with c(std::span<const Sample>, Batch&), or collate(c) "
                  "with c(std::span<const Sample>), which returns the batch. Several threads call "
                  "it, so it must be const");
    return is_callable;
  }
  template <class Sample>
  auto collate() {
    return OwnCollate<Sample, Batch, C>{std::move(c)};
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
inline auto stacked() { return detail::CollateStage(detail::MakeStacked{}); }

/// `source | padded(fill)`: batches are `PaddedBatch`es, whose rows are as long as the longest
/// sample of the batch. `fill` comes behind the inputs of shorter ones.
template <class Fill>
auto padded(Fill fill, PaddedOptions options = {}) {
  if (options.multiple == 0)
    detail::fail("padded", {"rows of a multiple of 0"}, "set multiple to 1 or more");
  return detail::CollateStage(detail::MakePadded<Fill>(std::move(fill), options.multiple));
}

/// `source | ragged()`: batches are `RaggedBatch`es, which hold samples one behind the other.
inline auto ragged() { return detail::CollateStage(detail::MakeRagged{}); }

/// `source | collate<Batch>(c)` calls `c(std::span<const Sample>, Batch& out)` for every batch, and
/// reuses the memory of `out`; `collate(c)` calls `c(std::span<const Sample>)`, which returns the
/// batch. Several threads call c at once.
template <class Batch = void, class C>
auto collate(C c) {
  return detail::CollateStage(detail::MakeOwn<Batch, C>{std::move(c)});
}

}  // namespace lockstep
