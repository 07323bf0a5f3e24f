// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file What the stages of a pipeline share: how they hold their source and read samples, and how
/// samples become batches.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/error.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/labelled_batch.hpp"
#include "lockstep/data/load_batch.hpp"
#include "lockstep/data/sample.hpp"
#include "lockstep/data/spares.hpp"

namespace lockstep::detail {

/// The source of a stage. A temporary is moved in; the program's own is referred to, and must
/// outlive the pipeline, as with the standard's views.
template <class Source>
class KeptSource {
 public:
  explicit KeptSource(Source source) : source_(std::move(source)) {}
  const Source& get() const { return source_; }

 private:
  Source source_;
};

template <class Source>
class KeptSource<const Source&> {
 public:
  explicit KeptSource(const Source& source) : source_(&source) {}
  const Source& get() const { return *source_; }

 private:
  const Source* source_;
};

/// How a stage holds what `source | stage` was given: `Given` is the type of a forwarding
/// reference.
template <class Given>
using HeldAs = std::conditional_t<std::is_lvalue_reference_v<Given>,
                                  const std::remove_cvref_t<Given>&, std::remove_cvref_t<Given>>;

/// The samples of all stages before the last, on the way to one sample. They stay as they are
/// until the batch is made, so that a stage's sample may point into the one before.
struct NoChain {};
template <class Source>
struct ChainOfSource {
  using type = NoChain;
};
template <class Source>
  requires requires { typename Source::chain_type; }
struct ChainOfSource<Source> {
  using type = typename Source::chain_type;
};
template <class Source>
using ChainOf = typename ChainOfSource<Source>::type;

template <class Source>
void read_sample(const Source& source, std::size_t index, [[maybe_unused]] Pass pass,
                 [[maybe_unused]] auto& chain, auto& out) {
  if constexpr (requires { source.read(index, pass, chain, out); }) {
    source.read(index, pass, chain, out);
  } else if constexpr (PassReading<Source>) {
    source.read(index, pass, out);
  } else {
    source.read(index, out);
  }
}

/// Tells a source which samples will be read for a batch, where it wants to know.
template <class Source>
void prepare_samples(const Source& source, std::span<const std::size_t> indices) {
  if constexpr (requires { source.prepare(indices); }) source.prepare(indices);
}

[[noreturn, gnu::cold]] inline void refuse_width(std::size_t width, std::size_t first) {
  fail("stacked", {"it has ", width, " inputs and the first sample of its batch has ", first},
       "give all samples one width with map, or say | padded(fill) or | ragged()");
}

/// Samples of one width become the rows of a `LabelledBatch`, each written as soon as it is read.
template <class Sample>
struct RowCollate {
  using batch_type = LabelledBatch<InputOf<Sample>, LabelOf<Sample>>;
  static constexpr bool is_known = true;
  static constexpr bool takes_rows = true;

  /// Writes row i of `count`.
  template <LabelledRows Batch>
  static void put(const Sample& sample, std::size_t i, std::size_t count, Batch& out) {
    const std::size_t width = std::size(sample.inputs);
    if (i == 0) out.resize(count, width);
    const auto row = out.row(i);
    if (row.size() != width) [[unlikely]]
      refuse_width(width, row.size());
    std::copy(std::begin(sample.inputs), std::end(sample.inputs), row.data());
    out.labels[i] = sample.label;
  }
};

/// Stands for the collate of samples that no stage has said how to collate. Its batches have the
/// usual type, so that a program that needs them gets one error, and not one for each use.
struct UnknownCollate {
  using batch_type = LabelledBatch<float, std::int32_t>;
  static constexpr bool is_known = false;
  static constexpr bool takes_rows = true;
};

template <class Sample>
struct UsualCollate {
  using type = UnknownCollate;
};
template <Labelled Sample>
struct UsualCollate<Sample> {
  using type = RowCollate<Sample>;
};

/// Makes a source a data set: `Source` derives from it and has `read(index, pass, chain, out)`, or
/// one of the simpler reads of a source whose chain is `NoChain`.
template <class Source, class Sample, class Chain = NoChain,
          class Collate = typename UsualCollate<Sample>::type>
class LoadsSamples {
 public:
  using batch_type = typename Collate::batch_type;

  void load(std::span<const std::size_t> indices, auto& out) const { load(indices, Pass{}, out); }

  template <class Batch>
  void load(std::span<const std::size_t> indices, Pass pass, Batch& out) const {
    static_assert(
        Collate::is_known,
        "lockstep: these samples are no rows of a LabelledBatch, which takes samples with `inputs` "
        "(a range) and `label`; say how they become a batch: source | collate<Batch>(c), where c "
        "is called as c(std::span<const Sample>, batch)");
    prepare_samples(static_cast<const Source&>(*this), indices);
    if constexpr (Collate::is_known && Collate::takes_rows) {
      load_rows(indices, pass, out);
    } else if constexpr (Collate::is_known) {
      load_whole(indices, pass, out);
    }
  }

 protected:
  explicit LoadsSamples(Collate collate = {}) : collate_(std::move(collate)) {}

  /// Calls `f(chain)` with the memory that one sample needs on its way.
  template <class F>
  void with_chain(const F& f) const {
    const auto scratch = spares_.borrow();
    if (scratch->chains.empty()) scratch->chains.resize(1);
    f(scratch->chains.front());
  }

 private:
  struct Scratch {
    std::vector<Chain> chains;
    std::vector<Sample> samples;

    /// Never makes them fewer: memory inside of samples is used again.
    void reserve(std::size_t count) {
      if (chains.size() < count) chains.resize(count);
      if (samples.size() < count) samples.resize(count);
    }
  };

  /// Reads, and does `then()` with, the sample of a draw.
  template <class Then>
  void read_draw(std::span<const std::size_t> indices, std::size_t draw, Pass pass, Chain& chain,
                 Sample& out, const Then& then) const {
    try {
      read_sample(static_cast<const Source&>(*this), indices[draw], pass, chain, out);
      then();
    } catch (...) {
      rethrow_of_sample(indices[draw], draw);
    }
  }

  template <class Batch>
  void load_rows(std::span<const std::size_t> indices, Pass pass, Batch& out) const {
    if (indices.empty()) {
      if constexpr (requires { out.clear(); }) {
        out.clear();
      } else {
        out.resize(0, 0);
      }
    }
    const auto scratch = spares_.borrow();
    scratch->reserve(1);
    Sample& sample = scratch->samples.front();
    for (std::size_t i = 0; i != indices.size(); ++i) {
      read_draw(indices, i, pass, scratch->chains.front(), sample,
                [&] { collate_.put(sample, i, indices.size(), out); });
    }
  }

  /// All samples are read before they become a batch.
  void load_whole(std::span<const std::size_t> indices, Pass pass, batch_type& out) const {
    const auto scratch = spares_.borrow();
    scratch->reserve(indices.size());
    for (std::size_t i = 0; i != indices.size(); ++i)
      read_draw(indices, i, pass, scratch->chains[i], scratch->samples[i], [] {});
    collate_(std::span<const Sample>(scratch->samples).first(indices.size()), out);
  }

  Collate collate_;
  mutable Spares<Scratch> spares_;
};

/// Stands for a pipeline that was refused with a sentence, so that what is done with it gives no
/// further errors.
struct RejectedPipeline {
  using sample_type = OwnedSample<float, std::int32_t>;
  using batch_type = LabelledBatch<float, std::int32_t>;
  static std::size_t size() { return 0; }
  void read(std::size_t, sample_type&) const {}
  void load(std::span<const std::size_t>, batch_type&) const {}
};

/// Whether a stage can be put behind `Source`; says so if not.
template <class Source>
constexpr bool require_source() {
  static_assert(
      SampleSource<Source>,
      "lockstep: this has no samples that map, stacked, padded, ragged or collate could take; give "
      "them a type with size(), sample_type and `void read(std::size_t index, sample_type& out) "
      "const`, and put map before the stage that makes batches");
  return SampleSource<Source>;
}

}  // namespace lockstep::detail
