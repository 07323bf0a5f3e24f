// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Data sets and sources of samples: concepts, loading of batches, and the set in memory.

#include "lockstep/detail/core/error.hpp"
#include "lockstep/detail/core/view.hpp"
#include "lockstep/detail/data/batch.hpp"

namespace lockstep {

/// A pass over the data. A data set's random numbers depend on it and on the sample alone.
struct Pass {
  Seed seed{};
  Epoch epoch{};

  friend bool operator==(const Pass&, const Pass&) = default;
};

/// A sample in its source's memory.
template <class X, class Y>
struct LabelledSample {
  std::span<const X> inputs;
  Y label{};
};

/// A sample with its own memory, which is reused for the next.
template <class X, class Y>
struct OwnedSample {
  std::vector<X> inputs;
  Y label{};
};

namespace detail {

/// Loads batches of type B, independent of the pass.
template <class D, class B>
concept Loading = requires(const D& dataset, std::span<const std::size_t> indices, B& out) {
  { dataset.load(indices, out) } -> std::same_as<void>;
};

template <class D, class B>
concept PassLoading =
    requires(const D& dataset, std::span<const std::size_t> indices, Pass pass, B& out) {
      { dataset.load(indices, pass, out) } -> std::same_as<void>;
    };

/// Reads samples, independent of the pass.
template <class S>
concept Reading = requires(const S& source, std::size_t index, typename S::sample_type& out) {
  { source.read(index, out) } -> std::same_as<void>;
};

template <class S>
concept PassReading =
    requires(const S& source, std::size_t index, Pass pass, typename S::sample_type& out) {
      { source.read(index, pass, out) } -> std::same_as<void>;
    };

/// Does every pass draw other samples? A type that merely forwards the pass says so in a member.
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

/// `load(indices, out)` replaces the contents of `out` by the samples of `indices`, in that order,
/// and reuses its memory. Several threads call it concurrently. A data set that draws random
/// numbers has `load(indices, pass, out)`, which loaders then call instead.
template <class D>
concept Dataset = requires(const D& dataset) {
  requires std::default_initializable<typename D::batch_type>;
  { dataset.size() } -> std::convertible_to<std::size_t>;
  requires detail::Loading<D, typename D::batch_type> ||
               detail::PassLoading<D, typename D::batch_type>;
};

/// `read(index, out)` replaces `out` by one sample, which may point into the source, and reuses its
/// memory. Several threads call it, each with its own `out`. A source that draws random numbers has
/// `read(index, pass, out)`. `prepare(indices)`, if there is one, is called once before a batch.
template <class S>
concept SampleSource = requires(const S& source) {
  requires std::default_initializable<typename S::sample_type>;
  { source.size() } -> std::convertible_to<std::size_t>;
  requires detail::Reading<S> || detail::PassReading<S>;
};

namespace detail {

/// Rethrows the current exception nested in an error of `operation`, after `about`; not `Stopped`.
[[noreturn, gnu::cold]] void rethrow_as(std::string_view operation, std::string_view about,
                                        std::string_view advice);

/// Rethrows the current exception as the failure of a batch's sample; `Stopped` unchanged.
[[noreturn, gnu::cold]] void rethrow_of_sample(std::size_t sample, std::size_t draw);

/// Rethrows the current exception as the failure of a batch; names the sample, if known, or all.
[[noreturn, gnu::cold]] void rethrow_of_batch(std::span<const std::size_t> indices, Epoch epoch,
                                              std::size_t number);

/// Loads a batch; `number` is its number in the epoch on this rank, from 0.
template <Dataset Source, class Batch>
void load_batch(const Source& dataset, std::span<const std::size_t> indices, Pass pass,
                std::size_t number, Batch& out) {
  try {
    if constexpr (PassLoading<Source, Batch>) {
      dataset.load(indices, pass, out);
    } else {
      dataset.load(indices, out);
    }
  } catch (...) {
    rethrow_of_batch(indices, pass.epoch, number);
  }
}

/// A contiguous range of T: a standard or Thrust vector, an array, a span.
template <class R, class T>
concept MemoryOf =
    ContiguousMemory<const R> && std::same_as<std::remove_cv_t<FlatElement<const R>>, T>;

/// The width of rows. Throws unless the inputs are one row per label.
inline std::size_t width_of_rows(const char* operation, std::size_t inputs, std::size_t labels) {
  const std::size_t width = labels == 0 ? 0 : inputs / labels;
  if (width * labels != inputs)
    fail(operation, {inputs, " inputs are no whole rows for ", labels, " labels"},
         "give one row of inputs, all of the same width, for every label");
  return width;
}

}  // namespace detail

/// Samples of `X` with labels of `Y`, in memory.
template <class X, class Y>
class InMemoryDataset {
 public:
  using batch_type = LabelledBatch<X, Y>;
  using sample_type = LabelledSample<X, Y>;

  /// `inputs` is row-major, with one row per label.
  InMemoryDataset(std::vector<X> inputs, std::vector<Y> labels)
      : inputs_(std::move(inputs)),
        labels_(std::move(labels)),
        width_(detail::width_of_rows("InMemoryDataset", inputs_.size(), labels_.size())) {}

  /// Copies other contiguous ranges: arrays, spans, Thrust's vectors.
  template <detail::MemoryOf<X> Inputs, detail::MemoryOf<Y> Labels>
    requires(!std::same_as<Inputs, std::vector<X>> || !std::same_as<Labels, std::vector<Y>>)
  InMemoryDataset(const Inputs& inputs, const Labels& labels)
      : InMemoryDataset(copied<X>(inputs), copied<Y>(labels)) {}

  std::size_t size() const { return labels_.size(); }
  std::size_t width() const { return width_; }

  template <LabelledRows Batch>
  void load(std::span<const std::size_t> indices, Batch& out) const {
    out.resize(indices.size(), width_);
    for (std::size_t i = 0; i != indices.size(); ++i) {
      std::copy_n(inputs_.data() + indices[i] * width_, width_, out.row(i).data());
      out.labels[i] = labels_[indices[i]];
    }
  }

  void read(std::size_t index, sample_type& out) const {
    out = {std::span(inputs_).subspan(index * width_, width_), labels_[index]};
  }

 private:
  /// Elements that the host cannot read, as in a `thrust::device_vector`, have proxy references.
  template <class T>
  static std::vector<T> copied(const auto& range) {
    std::vector<T> values(std::size(range));
    if constexpr (std::is_lvalue_reference_v<decltype(*std::begin(range))>) {
      std::copy_n(flat(range).data(), values.size(), values.data());
    } else {
      copy(range.begin(), range.end(), values.data());
    }
    return values;
  }

  std::vector<X> inputs_;
  std::vector<Y> labels_;
  std::size_t width_;
};

template <class Inputs, class Labels>
InMemoryDataset(const Inputs&, const Labels&)
    -> InMemoryDataset<std::remove_cv_t<detail::FlatElement<const Inputs>>,
                       std::remove_cv_t<detail::FlatElement<const Labels>>>;

static_assert(Dataset<InMemoryDataset<float, std::int32_t>>);
static_assert(SampleSource<InMemoryDataset<float, std::int32_t>>);

}  // namespace lockstep
