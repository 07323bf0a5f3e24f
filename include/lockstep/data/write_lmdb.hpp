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

/// Whatever fails names the sample.
template <class F>
void for_sample(std::size_t index, const F& f) {
  try {
    f();
  } catch (...) {
    rethrow_of_sample(index, 0);
  }
}

/// Calls `f(indices)` for all samples in order, some at a time.
template <class F>
void for_pieces(std::size_t samples, const F& f) {
  constexpr std::size_t most = 256;
  std::vector<std::size_t> indices;
  for (std::size_t begin = 0; begin != samples; begin += indices.size()) {
    indices.resize(std::min(most, samples - begin));
    std::iota(indices.begin(), indices.end(), begin);
    f(std::span<const std::size_t>(indices));
  }
}

template <class Source, class Encode>
void write_samples(LmdbWriter& out, const Source& source, const Encode& encode) {
  RecordBytes record;
  ChainOf<Source> chain;
  typename Source::sample_type sample;
  for_pieces(source.size(), [&](std::span<const std::size_t> indices) {
    prepare_samples(source, indices);
    for (const std::size_t index : indices) {
      record.clear();
      for_sample(index, [&] {
        read_sample(source, index, Pass{}, chain, sample);
        encode(std::as_const(sample), record);
      });
      out.add(record);
    }
  });
}

template <class Data, class Encode>
void write_batches(LmdbWriter& out, const Data& dataset, const Encode& encode) {
  RecordBytes record;
  typename Data::batch_type batch;
  std::size_t number = 0;
  for_pieces(dataset.size(), [&](std::span<const std::size_t> indices) {
    load_batch(dataset, indices, BatchPlace{.number = number++}, batch);
    for (std::size_t i = 0; i != indices.size(); ++i) {
      record.clear();
      for_sample(indices[i], [&] { encode(batch, i, record); });
      out.add(record);
    }
  });
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
    if constexpr (by_sample) {
      detail::write_samples(out, source, encode);
    } else {
      detail::write_batches(out, source, encode);
    }
    out.finish();
  }
}

template <class Source>
void write_lmdb(const std::string& path, const Source& source,
                const LmdbWriteOptions& options = {}) {
  write_lmdb(path, source, detail::EncodeLabelled{}, options);
}

}  // namespace lockstep
