// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The records of an LMDB as samples. Programs that read them link liblmdb (`-llmdb`).

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "lockstep/core/element.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/labelled_record.hpp"
#include "lockstep/data/lmdb.hpp"
#include "lockstep/data/pipeline.hpp"
#include "lockstep/data/sample.hpp"

namespace lockstep {

namespace detail {

/// Decodes what `EncodeLabelled` has encoded; inputs stay where they are mapped.
struct DecodeLabelled {
  template <class X, class Y>
  void operator()(std::span<const std::byte> record, LabelledSample<X, Y>& out) const {
    decode_labelled(record, out);
  }
};

/// Stands for a function that was refused.
struct DecodeNothing {
  void operator()(auto&&...) const {}
};

}  // namespace detail

/// The records of an LMDB, decoded when they are read: `decode(record, sample)`, where a record is
/// a `std::span<const std::byte>` of the file's own pages. They are valid while the data set lives,
/// so a sample may point into them. Copies share the open file; threads and forked ranks may use
/// one object, and all ranks of a host share the pages in memory.
template <class Sample, class Decode = detail::DecodeLabelled>
class LmdbDataset : public detail::LoadsSamples<LmdbDataset<Sample, Decode>, Sample> {
 public:
  using sample_type = Sample;
  static constexpr bool changes_by_pass = false;

  explicit LmdbDataset(const std::string& path, Decode decode = {}, const LmdbOptions& options = {})
      : records_(path, options), decode_(std::move(decode)) {}

  std::size_t size() const { return records_.size(); }

  /// What must be done once before the samples of a batch are read one by one; `load` does it: a
  /// file that has changed is an error, and records that are read together are fetched together.
  void prepare(std::span<const std::size_t> indices) const {
    records_.require_intact();
    records_.fetch(indices);
  }

  /// Looks at the file again: one that is cut while a batch is read would end the process.
  void read(std::size_t index, Sample& out) const {
    records_.require_intact();
    detail::LmdbRecords::Reader reader(records_);
    const std::span<const std::byte> record = reader[index];
    try {
      decode_(record, out);
    } catch (...) {
      reader.require_unchanged();
      records_.rethrow_decoding(index, record.size());
    }
    reader.require_unchanged();
  }

 private:
  detail::LmdbRecords records_;
  [[no_unique_address]] Decode decode_;
};

/// The records of the LMDB at `path`, a file or a folder with data.mdb, as samples that
/// `decode(record, sample)` makes of them.
template <class Sample, class Decode>
  requires(!std::convertible_to<Decode, LmdbOptions>)
auto lmdb_dataset(const std::string& path, Decode decode, const LmdbOptions& options = {}) {
  constexpr bool decodes = std::invocable<const Decode&, std::span<const std::byte>, Sample&>;
  static_assert(decodes,
                "lockstep: lmdb_dataset<Sample>(path, decode) calls decode(record, sample) with a "
                "std::span<const std::byte> and a Sample&; give it such a function");
  if constexpr (decodes) {
    return LmdbDataset<Sample, Decode>(path, std::move(decode), options);
  } else {  // one error is enough
    return LmdbDataset<Sample, detail::DecodeNothing>(path, {}, options);
  }
}

/// The samples that `write_lmdb` has written of inputs of type X and labels of type Y, each where
/// it is mapped.
template <Element X, Element Y>
auto lmdb_dataset(const std::string& path, const LmdbOptions& options = {}) {
  return LmdbDataset<LabelledSample<X, Y>>(path, {}, options);
}

static_assert(SampleSource<LmdbDataset<LabelledSample<float, std::int32_t>>>);
static_assert(Dataset<LmdbDataset<LabelledSample<float, std::int32_t>>>);

}  // namespace lockstep
