// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Any source of samples or data set, written into an LMDB. Programs that use it link liblmdb
/// (`-llmdb`).

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/pipeline.hpp"

namespace lockstep {

/// How `write_lmdb` writes.
struct LmdbWriteOptions {
  std::size_t commit_bytes = 16_MiB;  ///< records are held in memory up to so many bytes
};

namespace detail {

/// Records are numbered from 0 as they come. They go into a temporary beside `path`, which `finish`
/// brings into place; without that, nothing stays. A temporary that a killed process has left is
/// removed by the next that writes to the same path.
class LmdbWriter {
 public:
  LmdbWriter(const std::string& path, const LmdbWriteOptions& options);
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;
  ~LmdbWriter();

  void add(std::span<const std::byte> record);
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

using RecordBytes = std::vector<std::byte>;

/// The encoding of samples that have inputs and a label, and of the rows of labelled batches.
struct EncodeLabelled {
  template <Labelled Sample>
  void operator()(const Sample& sample, RecordBytes& out) const {
    encode_labelled<InputOf<Sample>, LabelOf<Sample>>(sample.inputs, sample.label, out);
  }
  template <LabelledRows Batch>
  void operator()(Batch& batch, std::size_t i, RecordBytes& out) const {
    const auto row = batch.row(i);
    encode_labelled<std::remove_cvref_t<decltype(row[0])>,
                    std::remove_cvref_t<decltype(batch.labels[i])>>(row, batch.labels[i], out);
  }
};

/// Encodes a source's samples one by one.
template <class Encode, class Source>
concept EncodesSamples =
    SampleSource<Source> &&
    std::invocable<const Encode&, const typename Source::sample_type&, RecordBytes&>;

/// Encodes one sample of a data set's batch, by its place in the batch.
template <class Encode, class Data>
concept EncodesBatches =
    Dataset<Data> &&
    std::invocable<const Encode&, typename Data::batch_type&, std::size_t, RecordBytes&>;

/// Writes what `encode` makes of all samples, in order. Some are prepared or loaded at a time;
/// whatever fails names the sample.
template <class Source, class Encode>
void write_records(LmdbWriter& out, const Source& source, const Encode& encode) {
  constexpr std::size_t at_a_time = 256;
  constexpr bool by_sample = EncodesSamples<Encode, Source>;
  const auto make = [] {
    if constexpr (by_sample) {
      return std::pair<ChainOf<Source>, typename Source::sample_type>();
    } else {
      return std::pair<NoChain, typename Source::batch_type>();
    }
  };
  auto [chain, made] = make();
  RecordBytes record;
  std::vector<std::size_t> indices;
  for (std::size_t begin = 0; begin != source.size(); begin += indices.size()) {
    indices.resize(std::min(at_a_time, source.size() - begin));
    std::iota(indices.begin(), indices.end(), begin);
    if constexpr (by_sample) {
      prepare_samples(source, indices);
    } else {
      load_batch(source, indices, BatchPlace{.number = begin / at_a_time}, made);
    }
    for (std::size_t i = 0; i != indices.size(); ++i) {
      record.clear();
      try {
        if constexpr (by_sample) {
          read_sample(source, indices[i], Pass{}, chain, made);
          encode(std::as_const(made), record);
        } else {
          encode(made, i, record);
        }
      } catch (...) {
        rethrow_of_sample(indices[i], 0);
      }
      out.add(record);
    }
  }
}

}  // namespace detail

/// Writes all samples of `source`, in order, into a new LMDB at `path`, as records 0, 1, ... that
/// `lmdb_dataset` reads. `encode(sample, bytes)` appends a sample to an empty vector of bytes;
/// `encode(batch, i, bytes)` does so for data sets that can only load batches. Without `encode`,
/// samples have inputs and a label.
///
/// The set is there as a whole or not at all: a path that exists is refused, and a failure leaves
/// nothing. Where another program expects a folder, make it and write `FOLDER/data.mdb`. Samples of
/// a pipeline that draws random numbers are those of seed 0 and epoch 0. One rank calls this.
template <class Source, class Encode>
  requires(!std::same_as<std::remove_cvref_t<Encode>, LmdbWriteOptions>)
void write_lmdb(const std::string& path, const Source& source, const Encode& encode,
                const LmdbWriteOptions& options = {}) {
  constexpr bool by_sample = detail::EncodesSamples<Encode, Source>;
  constexpr bool by_batch = detail::EncodesBatches<Encode, Source>;
  static_assert(by_sample || by_batch,
                "lockstep: write_lmdb cannot encode these samples; give it a function that appends "
                "a sample to a std::vector<std::byte>: encode(sample, bytes), or encode(batch, i, "
                "bytes) where the data set has no read()");
  if constexpr (by_sample || by_batch) {
    detail::LmdbWriter out(path, options);
    detail::write_records(out, source, encode);
    out.finish();
  }
}

template <class Source>
void write_lmdb(const std::string& path, const Source& source,
                const LmdbWriteOptions& options = {}) {
  write_lmdb(path, source, detail::EncodeLabelled{}, options);
}

}  // namespace lockstep
