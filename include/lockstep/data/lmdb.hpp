// SPDX-License-Identifier: Apache-2.0
#pragma once
/// @file The records of an LMDB as samples, and any source of samples written into one. Programs
/// that write link liblmdb (`-llmdb`).

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/core/bytes.hpp"
#include "lockstep/core/element.hpp"
#include "lockstep/core/file.hpp"
#include "lockstep/core/macros.hpp"
#include "lockstep/core/standard.hpp"
#include "lockstep/data/dataset.hpp"
#include "lockstep/data/pipeline.hpp"

namespace lockstep {

/// How an LMDB is read.
struct LmdbOptions {
  bool read_ahead = false;  ///< lets the system read ahead: for draws in order or in large blocks
  /// Which records are samples, by key: some sets have others, as for their length. Without it, all
  /// are.
  std::function<bool(std::string_view key)> is_sample{};
};

namespace detail {

class LmdbFile;

/// Bytes of the file, where they are mapped.
struct LmdbRecord {
  const std::byte* data = nullptr;
  std::size_t size = 0;
};

/// The key of a record by number: eight bytes, big-endian, so that keys sort as numbers do.
inline std::array<char, 8> lmdb_key(std::uint64_t number) {
  std::array<char, 8> key{};
  for (std::size_t i = 0; i != key.size(); ++i) key[i] = static_cast<char>(number >> (56 - 8 * i));
  return key;
}

/// The records of a file by number, for any number of threads and forked ranks. Keys of 8 bytes
/// that are the big-endian numbers from 0, as `write_lmdb` writes them, are looked up when they are
/// first asked for; records under other keys are numbered in the order of their keys, and listed
/// when the file is opened. No lock is taken and no file is written beside it, so that a set may
/// lie on a read-only disk.
class LmdbRecords {
 public:
  explicit LmdbRecords(const std::string& path, const LmdbOptions& options = {});

  std::size_t size() const { return size_; }

  /// Throws where the file was cut off or written to since it was opened: see `MappedFile`.
  void require_intact() const;
  /// Throws if a transaction was committed since the set was opened: what was read may be mixed up.
  /// This reads a mapped page and asks nothing of the system.
  void require_same_transaction() const;

  /// Fetches the fronts of records that were looked up before into the cache, all at once: records
  /// that are read one by one would be waited for one by one.
  void fetch(std::span<const std::size_t> indices) const;

  /// The record, where it is mapped; it stays there while the data set lives.
  std::span<const std::byte> operator[](std::size_t index) const;

  /// For handlers: throws what is being handled as the failure to decode a record.
  [[noreturn, gnu::cold]] void rethrow_decoding(std::size_t index, std::size_t bytes) const;

 private:
  LmdbRecord look_up(std::size_t index) const;

  std::shared_ptr<const LmdbFile> file_;
  /// Where records are: all that are listed, and those that were looked up before. None where that
  /// would be large beside the file.
  std::shared_ptr<LmdbRecord[]> places_;
  std::size_t size_ = 0;
};

/// The front of a record; the inputs follow. It has 24 bytes, and keys have eight: so in a set of
/// one type of inputs all nodes of a page begin at multiples of its size, and inputs are read where
/// they lie.
struct LabelledRecord {
  static constexpr std::array<char, 4> own_mark{'L', 'S', 'R', '1'};

  std::array<char, 4> mark = own_mark;
  ElementKind input{};
  ElementKind label{};
  std::uint16_t zero = 0;
  std::uint64_t width = 0;           ///< the number of inputs
  std::array<std::byte, 8> value{};  ///< the label, in its first bytes
};
static_assert(sizeof(LabelledRecord) == 24 && std::endian::native == std::endian::little);

/// The front of a record of such inputs and labels; throws where these bytes are none.
LabelledRecord labelled_record(std::span<const std::byte> record, ElementKind input,
                               ElementKind label);

template <class X, class Y>
void encode_labelled(const std::ranges::contiguous_range auto& inputs, const Y& label,
                     std::vector<std::byte>& out) {
  static_assert(Element<X> && Element<Y>,
                "lockstep: a record of inputs and a label holds numbers of the library's element "
                "types; give write_lmdb an encoding of these samples: encode(sample, bytes)");
  LabelledRecord front;
  front.input = element_kind<X>();
  front.label = element_kind<Y>();
  front.width = std::ranges::size(inputs);
  std::memcpy(front.value.data(), &label, sizeof label);
  const std::size_t bytes = front.width * sizeof(X);
  out.clear();
  out.resize(sizeof front + bytes);
  std::memcpy(out.data(), &front, sizeof front);
  if (bytes != 0) std::memcpy(out.data() + sizeof front, std::ranges::data(inputs), bytes);
}

/// Decodes what `EncodeLabelled` has encoded; inputs stay where they are mapped.
struct DecodeLabelled {
  template <class X, class Y>
  void operator()(std::span<const std::byte> record, LabelledSample<X, Y>& out) const {
    const LabelledRecord front = labelled_record(record, element_kind<X>(), element_kind<Y>());
    std::memcpy(&out.label, front.value.data(), sizeof(Y));
    // labelled_record has seen that there are as many, at an address that is fit for them.
    out.inputs = {reinterpret_cast<const X*>(record.data() + sizeof front), front.width};
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
    const std::span<const std::byte> record = records_[index];
    try {
      decode_(record, out);
    } catch (...) {
      records_.require_same_transaction();
      records_.rethrow_decoding(index, record.size());
    }
    records_.require_same_transaction();
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
