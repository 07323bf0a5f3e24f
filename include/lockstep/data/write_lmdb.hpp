// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file Any source of samples, written into an LMDB. Programs that use it link liblmdb
/// (`-llmdb`).

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/pipeline.hpp"

struct MDB_env;
struct MDB_txn;

namespace lockstep {

/// How `write_lmdb` writes.
struct LmdbWriteOptions {
  std::size_t commit_bytes = 16_MiB;  ///< records are held in memory up to so many bytes
};

namespace detail {

/// Records are numbered from 0 as they come. They go into a temporary beside `path`, which `finish`
/// brings into place; without that, nothing stays. Who writes it holds a lock on it; what a killed
/// process has left is overwritten by the next that writes to the same path.
class LmdbWriter {
 public:
  LmdbWriter(const std::string& path, const LmdbWriteOptions& options);
  LmdbWriter(const LmdbWriter&) = delete;
  LmdbWriter& operator=(const LmdbWriter&) = delete;
  ~LmdbWriter();

  void add(std::span<const std::byte> record);
  void finish();

 private:
  void require(int code) const;
  int put(MDB_txn* transaction) const;
  void commit();
  [[noreturn, gnu::cold]] void fail_writing(int error) const;
  [[noreturn, gnu::cold]] void refuse_existing() const;
  void sync(const std::string& path) const;

  std::string path_;
  std::string temporary_;  ///< empty when it is in place
  Descriptor lock_;        ///< of the temporary
  MDB_env* environment_ = nullptr;
  std::size_t commit_bytes_;
  std::size_t map_bytes_ = 16_MiB;
  std::size_t committed_ = 0;  ///< records
  /// The records that were not committed yet lie one behind another in memory, because a
  /// transaction that finds the map full is made again in a larger one.
  std::vector<std::byte> held_;
  std::vector<std::size_t> sizes_;
};

using RecordBytes = std::vector<std::byte>;

/// The encoding of samples that have inputs and a label.
struct EncodeLabelled {
  template <Labelled Sample>
  void operator()(const Sample& sample, RecordBytes& out) const {
    encode_labelled<InputOf<Sample>, LabelOf<Sample>>(sample.inputs, sample.label, out);
  }
};

/// Encodes a source's samples one by one.
template <class Encode, class Source>
concept EncodesSamples =
    SampleSource<Source> &&
    std::invocable<const Encode&, const typename Source::sample_type&, RecordBytes&>;

}  // namespace detail

/// Writes all samples of `source`, in order, into a new LMDB at `path`, as records 0, 1, ... that
/// `lmdb_dataset` reads. `encode(sample, bytes)` appends a sample to an empty vector of bytes.
/// Without `encode`, samples have inputs and a label.
///
/// The set is there as a whole or not at all: a path that exists is refused, and a failure leaves
/// nothing. Where another program expects a folder, make it and write `FOLDER/data.mdb`. Samples of
/// a pipeline that draws random numbers are those of seed 0 and epoch 0. One rank calls this.
template <class Source, class Encode>
  requires(!std::same_as<std::remove_cvref_t<Encode>, LmdbWriteOptions>)
void write_lmdb(const std::string& path, const Source& source, const Encode& encode,
                const LmdbWriteOptions& options = {}) {
  constexpr bool encodes = detail::EncodesSamples<Encode, Source>;
  static_assert(encodes,
                "lockstep: write_lmdb cannot encode these samples; give it a function that appends "
                "a sample to a std::vector<std::byte>: encode(sample, bytes), and a source with "
                "size(), sample_type and read(index, sample)");
  if constexpr (encodes) {
    constexpr std::size_t at_a_time = 256;
    detail::LmdbWriter out(path, options);
    detail::RecordBytes record;
    detail::ChainOf<Source> chain;
    typename Source::sample_type sample;
    std::vector<std::size_t> indices;
    for (std::size_t begin = 0; begin != source.size(); begin += indices.size()) {
      indices.resize(std::min(at_a_time, source.size() - begin));
      std::iota(indices.begin(), indices.end(), begin);
      detail::prepare_samples(source, indices);
      for (const std::size_t index : indices) {
        record.clear();
        try {
          detail::read_sample(source, index, Pass{}, chain, sample);
          encode(std::as_const(sample), record);
        } catch (...) {
          detail::rethrow_of_sample(index, 0);
        }
        out.add(record);
      }
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
